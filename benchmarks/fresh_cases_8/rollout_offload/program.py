"""An actor that leaves the GPU for the rollouts, and comes back for each update."""

import torch
from torch import nn


class FlatBuffer:
    """All parameters of one kind, in one piece of memory."""

    def __init__(self, modules):
        params = [p for module in modules for p in module.parameters()]
        self.param_data = torch.cat([p.detach().flatten() for p in params])
        self.cpu_data = None
        self.params = params
        self._point()

    def _point(self):
        start = 0
        for p in self.params:
            p.data = self.param_data[start : start + p.numel()].view(p.shape)
            start += p.numel()


class Actor(nn.Module):
    def __init__(self, width=640, layers=3):
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))

    def forward(self, x):
        for dense, expert in zip(self.dense, self.experts, strict=True):
            x = x + dense(x).relu() + expert(x).relu().unflatten(1, (4, -1)).mean(1)
        return x


def offload_model_to_cpu(buffers):
    for buffer in buffers:
        buffer.cpu_data = buffer.param_data.cpu().pin_memory()
        for p in buffer.params:
            p.data = p.data.new_empty(0)
        buffer.param_data = None


def load_model_to_gpu(buffers):
    for buffer in buffers:
        buffer.param_data = buffer.cpu_data.cuda(non_blocking=True)
        start = 0
        for p, shape in zip(buffer.params, buffer.shapes, strict=True):
            p.data = buffer.param_data[start : start + shape.numel()].view(shape)
            start += shape.numel()
    torch.cuda.synchronize()


def update(actor, advantages):
    optimizer = torch.optim.SGD(actor.parameters(), lr=1e-4)
    loss = (actor(torch.randn(256, 640, device="cuda")).mean(1) * advantages).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(iterations=4):
    torch.manual_seed(0)
    actor = Actor().cuda()
    buffers = [FlatBuffer(actor.dense), FlatBuffer(actor.experts)]
    for buffer in buffers:
        buffer.shapes = [p.shape for p in buffer.params]
    for iteration in range(iterations):
        offload_model_to_cpu(buffers)
        rewards = torch.randn(256)
        load_model_to_gpu(buffers)
        print(iteration, update(actor, (rewards - rewards.mean()).cuda()))


main()
