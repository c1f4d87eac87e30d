"""A search over widths: each candidate is trained for a few steps."""

import random

import torch
import torch.nn as nn


class Regularized(nn.Module):
    """A network that penalizes how much its features change."""

    def __init__(self, width, depth):
        super().__init__()
        self.backbone = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        )
        self.head = nn.Linear(width, 10)
        self.penalty = 0.0

        def fw_hook(module, inputs, output):
            self.penalty = self.penalty + output.pow(2).mean()

        self.backbone.register_forward_hook(fw_hook)

    def forward(self, x):
        self.penalty = 0.0
        return self.head(self.backbone(x))


class Search:
    def __init__(self, space, trials, steps=3):
        self.space, self.trials, self.steps = space, trials, steps

    def sample(self):
        return {name: random.choice(values) for name, values in self.space.items()}

    def run(self, config):
        net = Regularized(**config).to("cuda:0")
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for _ in range(self.steps):
            x = torch.randn(64, config["width"], device="cuda:0")
            y = torch.randint(0, 10, (64,), device="cuda:0")
            loss = nn.functional.cross_entropy(net(x), y) + 1e-3 * net.penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def best(self):
        results = []
        for _ in range(self.trials):
            config = self.sample()
            results.append((self.run(config), str(config)))
        return min(results)


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    space = {"width": [1024, 1280], "depth": [4, 5]}
    print(Search(space, trials=6).best())
