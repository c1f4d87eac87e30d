import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 24, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(24, 24, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(24, 5, 1),
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-5)
for iteration in range(3):
    optimizer.zero_grad()
    total = 0.0
    for domain in ("source", "mixed", "target"):
        image = torch.rand(4, 3, 192, 192, device="cuda")
        label = torch.randint(0, 5, (4, 192, 192), device="cuda")
        total = total + F.cross_entropy(model(image), label)
    total.backward()
    optimizer.step()
print(torch.cuda.max_memory_allocated() >> 20)
