"""The loss over a vocabulary of 128,256 in float32, after a narrow layer."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, WIDTH, TOKENS = 128_256, 256, 8192
table = nn.Embedding(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16)
head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW([*table.parameters(), *head.parameters()], fused=True)
for _ in range(4):
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    logits = head(table(tokens)).float()
    loss = F.cross_entropy(logits, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
