"""A batch is decoded until all of its rows are finished."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(1)
embedding = torch.nn.Embedding(32, 1024).to(device)
body = torch.nn.Linear(1024, 1024).to(device)
tokens = torch.randint(32, (4, 1)).to(device)
finished = torch.zeros(4, dtype=torch.bool).to(device)
steps = 0
with torch.no_grad():
    while not finished.all() and steps < 30:
        state = torch.tanh(body(embedding(tokens).sum(1)) + steps)
        nxt = (state @ embedding.weight.T).argmax(-1)
        nxt = torch.where(finished, torch.zeros_like(nxt), nxt)
        finished |= nxt % 4 == 0
        tokens = torch.cat([tokens, nxt[:, None]], 1)
        steps += 1
print("steps", steps, "shape", tuple(tokens.shape))
