"""Elastic weight consolidation, with the importances of each experience on their own."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn


class EWCPlugin:
    def __init__(self, ewc_lambda):
        self.ewc_lambda = ewc_lambda
        self.saved_params = defaultdict(dict)
        self.importances = defaultdict(dict)

    @torch.no_grad()
    def after_backward(self, model):
        for experience, saved in self.saved_params.items():
            for name, param in model.named_parameters():
                pull = (param - saved[name]).mul_(self.importances[experience][name])
                param.grad.add_(pull, alpha=self.ewc_lambda)

    def after_training_exp(self, experience, model, dataset):
        importances = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for x, y in dataset:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for name, param in model.named_parameters():
                importances[name].add_(param.grad.square() / len(dataset))
        model.zero_grad()
        self.importances[experience] = importances
        self.saved_params[experience] = {n: p.detach().clone() for n, p in model.named_parameters()}


class Naive:
    def __init__(self, model, plugin, lr=0.05):
        self.model, self.plugin, self.lr = model, plugin, lr

    def train(self, experience, dataset, last):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, foreach=False)
        for x, y in dataset:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.plugin.after_backward(self.model)
            optimizer.step()
        if not last:
            self.plugin.after_training_exp(experience, self.model, dataset)
        print(experience, loss.item())


def permuted(batches=3, size=64):
    order = torch.randperm(784)
    return [
        (torch.rand(size, 784)[:, order].cuda(), torch.randint(0, 10, (size,)).cuda())
        for _ in range(batches)
    ]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 10)
    )
    strategy = Naive(model.cuda(), EWCPlugin(0.4))
    for experience in range(4):
        strategy.train(experience, permuted(), last=experience == 3)
