import random

import torch
import torch.nn.functional as F
from torch import nn


class PCGrad:
    """Each task's gradient loses its part against those of the other tasks it conflicts with."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)

    def step(self):
        self.optimizer.step()

    def flat_gradient(self, objective, retain_graph):
        self.zero_grad()
        objective.backward(retain_graph=retain_graph)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        return torch.cat([part.flatten() for part in parts])

    def pc_backward(self, objectives):
        last = len(objectives) - 1
        grads = [self.flat_gradient(o, at < last) for at, o in enumerate(objectives)]
        self.zero_grad()
        merged = torch.zeros_like(grads[0])
        for grad in grads:
            projected = grad.clone()
            for other in random.sample(grads, len(grads)):
                inner = torch.dot(projected, other)
                projected -= inner.clamp(max=0) * other / other.square().sum()
            merged += projected
        self.assign(merged)

    def assign(self, flat):
        at = 0
        for p in self.params:
            p.grad = flat[at : at + p.numel()].view_as(p).clone()
            at += p.numel()


class MultiTaskNet(nn.Module):
    def __init__(self, width=1024, tasks=(("depth", 1), ("normal", 3), ("label", 13))):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(768, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict({name: nn.Linear(width, outputs) for name, outputs in tasks})

    def forward(self, x):
        shared = self.trunk(x)
        return {name: head(shared) for name, head in self.heads.items()}


def losses_of(outputs, batch):
    return [
        F.l1_loss(outputs["depth"], batch["depth"]),
        1 - F.cosine_similarity(outputs["normal"], batch["normal"], dim=-1).mean(),
        F.cross_entropy(outputs["label"], batch["label"]),
    ]


def scenes(count, size=512):
    for _ in range(count):
        batch = {
            "features": torch.randn(size, 768),
            "depth": torch.rand(size, 1),
            "normal": torch.randn(size, 3),
            "label": torch.randint(0, 13, (size,)),
        }
        yield {name: value.cuda() for name, value in batch.items()}


def main():
    torch.manual_seed(0)
    random.seed(0)
    model = MultiTaskNet().cuda()
    optimizer = PCGrad(torch.optim.Adam(model.parameters(), lr=1e-4))
    for epoch in range(2):
        sums = [0.0, 0.0, 0.0]
        for batch in scenes(3):
            objectives = losses_of(model(batch["features"]), batch)
            optimizer.pc_backward(objectives)
            optimizer.step()
            sums = [total + loss.item() for total, loss in zip(sums, objectives)]
        print(epoch, [round(total / 3, 3) for total in sums])


if __name__ == "__main__":
    main()
