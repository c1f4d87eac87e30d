import torch
import torch.nn.functional as F
from torch import nn

encoder = nn.Linear(128, 256).cuda()
prototypes = nn.Parameter(torch.randn(400, 256, device="cuda"))
optimizer = torch.optim.Adam([*encoder.parameters(), prototypes], lr=1e-3)
for step in range(2):
    z = encoder(torch.randn(512, 128, device="cuda"))
    similarity = F.cosine_similarity(z[:, None], prototypes[None], dim=-1)
    loss = -similarity.logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
