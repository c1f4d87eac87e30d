"""Tokens go to experts, up to a capacity; each expert gets its own batch."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
router = torch.nn.Linear(1024, 4).to(device)
experts = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(4)).to(device)
wide = torch.nn.Linear(1024, 1024).to(device)
x = wide(torch.randn(256, 1024).to(device))
choice = router(x).argmax(-1)
out, sizes, capacity = torch.zeros_like(x), [], 70
for number, expert in enumerate(experts):
    rows = torch.where(choice == number)[0]
    if len(rows) > capacity:
        rows = rows[:capacity]
    sizes.append(len(rows))
    out = out.index_add(0, rows, expert(x[rows]))
out.square().mean().backward()
print("sizes", sizes)
