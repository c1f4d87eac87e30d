import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.04)
cached = [torch.empty(44 << 20, dtype=torch.uint8, device="cuda") for _ in range(12)]
parts, small = [], []
for i in range(len(cached)):
    cached[i] = None
    parts.append(torch.empty(40 << 20, dtype=torch.uint8, device="cuda"))
    small.append(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
del parts
model = nn.Linear(4096, 4096).cuda()
x = torch.randn(5120, 4096, device="cuda")
with torch.no_grad():
    y = model(x)
print(y.mean().item(), torch.cuda.memory_reserved() >> 20)
