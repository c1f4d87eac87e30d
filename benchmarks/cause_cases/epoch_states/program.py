import copy

import torch
from torch import nn

net = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
states = {}
for epoch in range(12):
    for batch in range(2):
        x = torch.randn(512, 1024, device="cuda")
        loss = (net(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    states[f"epoch{epoch}"] = copy.deepcopy(net.state_dict())
torch.save(states["epoch11"], "/dev/null")
print(len(states), loss.item())
