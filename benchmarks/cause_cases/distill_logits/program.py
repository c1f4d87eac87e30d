import torch
import torch.nn.functional as F
from torch import nn

teacher = (
    nn.Sequential(
        *[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.GELU())], nn.Linear(1024, 100)
    )
    .cuda()
    .eval()
)
student = nn.Sequential(nn.Linear(1024, 256), nn.GELU(), nn.Linear(256, 100)).cuda()
optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(6144, 1024, device="cuda")
    teacher_logits = teacher(x)
    student_logits = student(x)
    loss = F.kl_div(
        student_logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="batchmean"
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
