"""One attention layer over 32,768 tokens."""

import torch
import torch.nn as nn
import torch.nn.functional as F

HEADS, SIZE, LENGTH = 32, 128, 32768
WIDTH = HEADS * SIZE
project = nn.Linear(WIDTH, 3 * WIDTH, bias=False, device="cuda", dtype=torch.bfloat16)
output = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16)
parameters = [*project.parameters(), *output.parameters()]
optimizer = torch.optim.AdamW(parameters, fused=True)
for _ in range(4):
    x = torch.randn(1, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    q, k, v = project(x).view(1, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    loss = output(y.transpose(1, 2).reshape(1, LENGTH, WIDTH)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
