"""The bug of an unsynchronised stream: a sum on one stream of what another is still writing.

Needs a CUDA device; without one, run it on a simulated GPU:
gpuprobe run --hazards examples/stream_race.py
"""

import torch

values = torch.empty(100, 100, device="cuda").normal_(0.0, 1.0)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    total = torch.sum(values)
torch.cuda.synchronize()
print("sum finished")
