import random

import torch
from torch import nn

random.seed(11)
layers = nn.ModuleList(
    nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)
).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
for step in range(24):
    length = random.randrange(500, 6000)
    x = torch.randn(length, 512, device="cuda")
    for layer in layers:
        x = x + layer(x)
    loss = x.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del x, loss
print(torch.cuda.max_memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
