import torch
from torch import nn

heads, kv_heads, dim, length, batch = 32, 4, 64, 2048, 4
keys = torch.randn(batch, kv_heads, length, dim, device="cuda", dtype=torch.float16)
values = torch.randn(batch, kv_heads, length, dim, device="cuda", dtype=torch.float16)
project = nn.Linear(2048, heads * dim).cuda().half()


def attend(q, k, v):
    repeats = heads // kv_heads
    k = k.repeat_interleave(repeats, dim=1)
    v = v.repeat_interleave(repeats, dim=1)
    scores = (q @ k.transpose(2, 3) / dim**0.5).softmax(-1)
    return scores @ v


with torch.no_grad():
    for step in range(4):
        x = torch.randn(batch, 2048, device="cuda", dtype=torch.float16)
        q = project(x).view(batch, heads, 1, dim)
        out = attend(q, keys, values)
print(out.shape)
