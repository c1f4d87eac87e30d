"""Gradients averaged one by one after the backward pass, as in early tutorials."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(1, 256, 1024, device="cuda", dtype=torch.bfloat16)
for _ in range(4):
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
dist.destroy_process_group()
