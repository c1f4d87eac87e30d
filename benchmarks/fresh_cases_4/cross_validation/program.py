import torch
import torch.nn.functional as F
from torch import nn


class TabularNet(nn.Module):
    def __init__(self, features, width=1536):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


class Regressor:
    def __init__(self, features, epochs=2, batch_size=512):
        self.model = TabularNet(features).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.epochs, self.batch_size = epochs, batch_size

    def fit(self, x, y):
        for _ in range(self.epochs):
            for xs, ys in zip(x.split(self.batch_size), y.split(self.batch_size)):
                loss = F.mse_loss(self.model(xs.cuda()), ys.cuda())
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return self

    @torch.no_grad()
    def score(self, x, y):
        parts = [self.model(xs.cuda()).cpu() for xs in x.split(self.batch_size)]
        return 1 - F.mse_loss(torch.cat(parts), y).item() / y.var().item()


def folds(x, y, count):
    parts = torch.arange(len(x)).chunk(count)
    for k, held_out in enumerate(parts):
        rest = torch.cat([part for i, part in enumerate(parts) if i != k])
        yield x[rest], y[rest], x[held_out], y[held_out]


def evaluate_fold(split):
    x, y, x_test, y_test = split
    return Regressor(x.shape[1]).fit(x, y).score(x_test, y_test)


def main():
    torch.manual_seed(0)
    x, y = torch.randn(6000, 40), torch.randn(6000)
    print([evaluate_fold(split) for split in folds(x, y, 4)])


if __name__ == "__main__":
    main()
