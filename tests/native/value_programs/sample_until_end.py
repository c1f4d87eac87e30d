"""Greedy decoding until the end token."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(3)
embedding = torch.nn.Embedding(64, 1024).to(device)
body = torch.nn.Linear(1024, 1024).to(device)
head = torch.nn.Linear(1024, 64).to(device)
tokens = [1]
with torch.no_grad():
    for _ in range(40):
        state = torch.tanh(body(embedding(torch.tensor(tokens).to(device)).mean(0)))
        token = head(state + 0.01 * len(tokens)).argmax().item()
        tokens.append(token)
        if token % 8 == 5 or token == tokens[-2]:
            break
print("tokens", tokens)
