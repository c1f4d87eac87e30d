import copy

import torch
from torch import nn

net = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(2048, 2048), nn.SiLU())]).cuda()
ema = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(4):
    loss = net(torch.randn(4096, 2048, device="cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), net.parameters()):
            slow.mul_(0.99).add_(fast, alpha=0.01)
        metric = ema(torch.randn(256, 2048, device="cuda")).mean().item()
    print(step, metric)
