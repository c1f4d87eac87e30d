"""Depth, normals and labels from one encoder; the weights of the losses are learned (GradNorm)."""

import torch
import torch.nn.functional as F
from torch import nn


class SharedEncoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.last = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return self.last(self.layers(x))


class SceneNet(nn.Module):
    tasks = ("depth", "normals", "labels")

    def __init__(self, width=48, classes=13):
        super().__init__()
        self.encoder = SharedEncoder(width)
        sizes = dict(zip(self.tasks, (1, 3, classes)))
        self.heads = nn.ModuleDict({task: nn.Conv2d(width, sizes[task], 1) for task in self.tasks})

    def forward(self, x):
        features = self.encoder(x)
        return {task: head(features) for task, head in self.heads.items()}

    def losses(self, outputs, batch):
        return torch.stack(
            [
                F.l1_loss(outputs["depth"], batch["depth"]),
                1 - F.cosine_similarity(outputs["normals"], batch["normals"]).mean(),
                F.cross_entropy(outputs["labels"], batch["labels"]),
            ]
        )


class LossBalancer:
    def __init__(self, tasks, shared, alpha=1.5, device="cuda"):
        self.weights = torch.ones(tasks, device=device, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.weights], lr=0.025)
        self.shared, self.alpha = shared, alpha
        self.initial_losses = None

    def backward(self, losses):
        if self.initial_losses is None:
            self.initial_losses = losses
        (self.weights.detach() * losses).sum().backward(retain_graph=True)
        norms = []
        for weight, loss in zip(self.weights, losses):
            (gradient,) = torch.autograd.grad(loss, self.shared.weight, retain_graph=True)
            norms.append(weight * gradient.norm())
        norms = torch.stack(norms)
        progress = losses.detach() / self.initial_losses.detach()
        goal = norms.mean().detach() * (progress / progress.mean()) ** self.alpha
        (self.weights.grad,) = torch.autograd.grad((norms - goal).abs().sum(), self.weights)
        self.optimizer.step()
        with torch.no_grad():
            self.weights.mul_(len(norms) / self.weights.sum())


def scenes(count, batch=4, size=96, device="cuda"):
    for _ in range(count):
        yield {
            "image": torch.rand(batch, 3, size, size).to(device),
            "depth": torch.rand(batch, 1, size, size).to(device),
            "normals": torch.randn(batch, 3, size, size).to(device),
            "labels": torch.randint(0, 13, (batch, size, size)).to(device),
        }


def main():
    torch.manual_seed(0)
    model = SceneNet().cuda()
    balancer = LossBalancer(len(model.tasks), model.encoder.last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step, batch in enumerate(scenes(5)):
        optimizer.zero_grad()
        losses = model.losses(model(batch["image"]), batch)
        balancer.backward(losses)
        optimizer.step()
        print(step, [round(value, 3) for value in losses.tolist()])


if __name__ == "__main__":
    main()
