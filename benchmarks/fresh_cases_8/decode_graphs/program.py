"""A decoder whose steps are replayed, one graph for each size of a batch."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class GraphConfig:
    batch_sizes: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048, 3072, 4096])
    hidden: int = 1024
    layers: int = 3


class DecodeModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.ModuleList(
            nn.Linear(config.hidden, 2 * config.hidden) for _ in range(config.layers)
        )
        self.down = nn.ModuleList(
            nn.Linear(2 * config.hidden, config.hidden) for _ in range(config.layers)
        )

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.silu(up(x)))
        return x.amax(1)


class DecodingRunner:
    def __init__(self, model):
        self.model = model
        self.pool = None
        self.graph, self.inputs, self.outputs = {}, {}, {}

    def capture(self, batch_size, hidden):
        x = torch.zeros(batch_size, hidden, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = self.model(x)
        self.pool = graph.pool()
        self.graph[batch_size], self.inputs[batch_size], self.outputs[batch_size] = graph, x, out

    def run(self, x):
        size = min(size for size in self.graph if size >= len(x))
        self.inputs[size][: len(x)].copy_(x)
        self.graph[size].replay()
        return self.outputs[size][: len(x)].cpu()


class Engine:
    def __init__(self, config):
        self.config = config
        self.runner = DecodingRunner(DecodeModel(config).cuda().eval())

    @torch.no_grad()
    def warmup(self):
        self.runner.model(torch.zeros(8, self.config.hidden, device="cuda"))
        torch.cuda.synchronize()
        for batch_size in sorted(self.config.batch_sizes):
            self.runner.capture(batch_size, self.config.hidden)

    def decode(self, requests):
        return self.runner.run(torch.randn(requests, self.config.hidden, device="cuda"))


engine = Engine(GraphConfig())
engine.warmup()
for requests in (100, 900, 3000):
    print(requests, tuple(engine.decode(requests).shape))
