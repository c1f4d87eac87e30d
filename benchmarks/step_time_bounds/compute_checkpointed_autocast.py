"""Float32 weights under autocast, with recomputation, on an A100."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

layers = nn.ModuleList(
    nn.Sequential(nn.Linear(3072, 12288), nn.GELU(), nn.Linear(12288, 3072)) for _ in range(3)
).cuda()
optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
for _ in range(4):
    x = torch.randn(16384, 3072, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for layer in layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        loss = x.float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
