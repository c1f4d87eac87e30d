"""Boxes above a score, then suppressed by overlap in Python."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
head = torch.nn.Linear(1024, 5).to(device)
body = torch.nn.Linear(1024, 1024).to(device)


def overlap(a, b):
    low, high = torch.maximum(a[:2], b[:2]), torch.minimum(a[2:], b[2:])
    inner = (high - low).clamp(min=0).prod()
    return inner / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - inner)


with torch.no_grad():
    out = head(body(torch.randn(200, 1024).to(device)))
    scores, corners = out[:, 0].sigmoid(), out[:, 1:].sigmoid()
    boxes = torch.cat([corners[:, :2] * 0.5, 0.5 + corners[:, 2:] * 0.5], 1)
    keep = scores > 0.6
    boxes, scores = boxes[keep], scores[keep]
    print("candidates", len(boxes))
    order, kept = scores.argsort(descending=True).tolist(), []
    while order and len(kept) < 20:
        first = order.pop(0)
        kept.append(first)
        order = [i for i in order if overlap(boxes[first], boxes[i]) < 0.7]
print("kept", len(kept))
