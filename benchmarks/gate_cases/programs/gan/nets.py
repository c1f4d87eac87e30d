"""One network that makes pictures, one that tells them from real ones."""

from torch import nn


class Maker(nn.Module):
    def __init__(self, noise=64, width=256, pixels=1024):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(noise, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, pixels),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.net(noise)


class Judge(nn.Module):
    def __init__(self, width=256, pixels=1024):
        super().__init__()
        self.first = nn.Linear(pixels, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, pictures):
        x = nn.functional.leaky_relu(self.first(pictures))
        x = nn.functional.leaky_relu(self.second(x))
        return self.last(x)
