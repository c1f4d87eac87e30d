"""A large table of embeddings with dense gradients and Adam."""

import torch
import torch.nn as nn

ROWS, WIDTH = 500_000, 512
table = nn.Embedding(ROWS, WIDTH, device="cuda")
head = nn.Linear(WIDTH, 128, device="cuda")
optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()])
for _ in range(4):
    indices = torch.randint(0, ROWS, (4096,), device="cuda")
    loss = head(table(indices)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
