"""Attention written out, with the softmax in float32 and dropout."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTH, HEADS, LENGTH, BATCH = 1024, 16, 2048, 4
qkv = nn.Linear(WIDTH, 3 * WIDTH, device="cuda", dtype=torch.bfloat16)
out = nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW([*qkv.parameters(), *out.parameters()], fused=True)
mask = torch.ones(LENGTH, LENGTH, device="cuda", dtype=torch.bool).tril()
for _ in range(4):
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv(x).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q @ k.transpose(-1, -2)) * 0.125
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(torch.bfloat16)
    weights = F.dropout(weights, 0.1)
    y = (weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
    out(y).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
