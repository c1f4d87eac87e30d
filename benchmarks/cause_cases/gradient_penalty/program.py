import torch
from torch import nn

critic = nn.Sequential(nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.SGD(critic.parameters(), lr=1e-4)
for step in range(3):
    x = torch.randn(2048, 512, device="cuda", requires_grad=True)
    score = critic(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    loss = score.mean() + 10 * (gradient.norm(dim=1) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del x, score, gradient
print(loss.item())
