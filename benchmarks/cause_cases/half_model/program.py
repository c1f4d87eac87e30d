import torch
from torch import nn


def build():
    return nn.Sequential(*[m for _ in range(10) for m in (nn.Linear(2048, 2048), nn.SiLU())])


model = build()
model = model.cuda()
model = model.half()
model.eval()
with torch.no_grad():
    for prompt in range(3):
        y = model(torch.randn(16, 2048, device="cuda", dtype=torch.float16))
print(y.shape)
