from collections.abc import Callable

import torch
from torch import nn


def squared_pairwise_distance(x, y, floor=1e-30):
    x2 = x.pow(2).sum(dim=-1, keepdim=True)
    y2 = y.pow(2).sum(dim=-1, keepdim=True)
    dist = torch.addmm(y2.transpose(-2, -1), x, y.transpose(-2, -1), alpha=-2).add_(x2)
    return dist.clamp_min_(floor)


class GaussianRBF(nn.Module):
    def __init__(self, sigma):
        super().__init__()
        self.register_buffer("log_sigma", torch.tensor(sigma).log())

    def forward(self, x, y):
        dist = squared_pairwise_distance(x.flatten(1), y.flatten(1))
        gamma = 1.0 / (2.0 * self.log_sigma.exp() ** 2)
        return torch.exp(-gamma * dist)


class Encoder(nn.Module):
    def __init__(self, features=3 * 16 * 16, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(features, 256), nn.ReLU(), nn.Linear(256, width)
        )

    def forward(self, x):
        return self.net(x)


class MMDDrift:
    def __init__(self, x_ref, preprocess_fn: Callable, sigma=4.0, n_permutations=20, device="cuda"):
        self.device = device
        self.preprocess_fn = preprocess_fn
        self.x_ref = preprocess_fn(x_ref)
        self.kernel = GaussianRBF(sigma).to(device)
        self.n_permutations = n_permutations

    def kernel_matrix(self, x, y):
        k_xy, k_xx, k_yy = self.kernel(x, y), self.kernel(x, x), self.kernel(y, y)
        return torch.cat([torch.cat([k_xx, k_xy], 1), torch.cat([k_xy.T, k_yy], 1)], 0)

    @staticmethod
    def mmd2(kernel_mat, m):
        n = kernel_mat.shape[0] - m
        c_xx, c_yy = 1 / (n * (n - 1)), 1 / (m * (m - 1))
        k_xx = kernel_mat[:-m, :-m].sum()
        k_yy = kernel_mat[-m:, -m:].sum()
        return c_xx * k_xx + c_yy * k_yy - 2.0 * kernel_mat[-m:, :-m].mean()

    def score(self, x):
        x = self.preprocess_fn(x)
        matrix = self.kernel_matrix(self.x_ref, x)
        matrix -= torch.diag(matrix.diag())
        return self.mmd2(matrix, len(x)).item()


@torch.no_grad()
def preprocess(x, model, device="cuda", batch_size=512):
    return torch.cat([model(part.to(device)) for part in x.split(batch_size)])


def main():
    torch.manual_seed(0)
    model = Encoder().cuda().eval()
    detector = MMDDrift(torch.rand(3000, 3, 16, 16), lambda x: preprocess(x, model))
    for day in range(3):
        print(day, detector.score(torch.rand(2500, 3, 16, 16)))


if __name__ == "__main__":
    main()
