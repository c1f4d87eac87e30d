"""Beams that are kept in Python, by their scores."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
step = torch.nn.Linear(1024, 1024).to(device)
beams = [((), 0.0)]
with torch.no_grad():
    state = torch.randn(1, 1024).to(device)
    for _ in range(4):
        scores = torch.log_softmax(step(state), -1)[0]
        values, indices = scores.topk(3)
        grown = [
            ((*path, i), score + v)
            for path, score in beams
            for v, i in zip(values.tolist(), indices.tolist())
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:3]
        state = torch.tanh(step(state))
for path, score in beams:
    print(path, f"{score:.3f}")
