"""How sharp a minimum is: the trace of the Hessian, estimated with random vectors."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def network(width=64, classes=10):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, classes),
    )


def rademacher_like(tensors):
    return [torch.randint_like(t, 0, 2) * 2 - 1 for t in tensors]


def inner(first, second):
    return sum((a * b).sum() for a, b in zip(first, second))


class Curvature:
    def __init__(self, model, data):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        images, labels = data
        loss = F.cross_entropy(model(images), labels)
        self.gradients = torch.autograd.grad(loss, self.parameters, create_graph=True)

    def product(self, vectors):
        return torch.autograd.grad(
            self.gradients, self.parameters, grad_outputs=vectors, retain_graph=True
        )

    def trace(self, samples):
        estimates = []
        for _ in range(samples):
            vectors = rademacher_like(self.parameters)
            estimates.append(inner(self.product(vectors), vectors).item())
        return sum(estimates) / len(estimates)


def train(model, batches, learning_rate=0.05):
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def batch(size, device="cuda"):
    return torch.rand(size, 3, 32, 32).to(device), torch.randint(0, 10, (size,)).to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--size", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = network().cuda()
    for round_ in range(2):
        train(model, [batch(args.size) for _ in range(2)])
        model.zero_grad(set_to_none=True)
        print(round_, Curvature(model, batch(args.size)).trace(args.samples))


if __name__ == "__main__":
    main()
