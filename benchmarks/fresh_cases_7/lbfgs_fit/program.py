"""A physics-informed network, fitted by L-BFGS."""

import torch
from torch import nn


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def network(width=200, depth=5):
    layers = [nn.Linear(2, width), Sine()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), Sine()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Problem:
    def __init__(self, points):
        self.inside = torch.rand(points, 2, device="cuda")
        self.edge = torch.rand(points // 8, 2, device="cuda").round()

    def residual(self, net):
        xy = self.inside.clone().requires_grad_()
        u = net(xy)
        (du,) = torch.autograd.grad(u.sum(), xy, create_graph=True)
        uxx = torch.autograd.grad(du[:, 0].sum(), xy, create_graph=True)[0][:, 0]
        uyy = torch.autograd.grad(du[:, 1].sum(), xy, create_graph=True)[0][:, 1]
        return (uxx + uyy + u[:, 0]).pow(2).mean()

    def loss(self, net):
        return self.residual(net) + net(self.edge).pow(2).mean()


def fit(problem, net, rounds):
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=30)
    history = []

    def closure():
        optimizer.zero_grad()
        loss = problem.loss(net)
        loss.backward()
        history.append(loss.item())
        return loss

    for _ in range(rounds):
        optimizer.step(closure)
    return history[0], history[-1]


if __name__ == "__main__":
    torch.manual_seed(0)
    print(fit(Problem(4000), network().cuda(), rounds=3))
