"""Twelve transformer layers on one sequence of 64 tokens."""

import torch
import torch.nn as nn

layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(1, 64, 256, device="cuda", dtype=torch.bfloat16)
for _ in range(4):
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
