"""Species at sites, of each of which another number of visits is known."""

import random

import torch
from torch import nn


class SiteEncoder(nn.Module):
    def __init__(self, width=256, layers=3):
        super().__init__()
        self.visit = nn.Linear(32, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width))
            for _ in range(layers)
        )

    def forward(self, visits):
        x = self.visit(visits)
        for layer in self.layers:
            x = x + layer(x)
        return x.amax(1)


class GeoModel(nn.Module):
    def __init__(self, species=600, width=256):
        super().__init__()
        self.sites = SiteEncoder(width)
        self.place = nn.Sequential(nn.Linear(4, width), nn.ReLU())
        self.head = nn.Linear(width, species)

    def forward(self, visits, coordinates):
        return self.head(self.sites(visits) + self.place(coordinates))


class Sites:
    def __init__(self, count, batch_size, species=600):
        self.count, self.batch_size, self.species = count, batch_size, species
        self.random = random.Random(7)

    def __iter__(self):
        for _ in range(self.count):
            longest = self.random.randint(150, 1100)
            visits = torch.randn(self.batch_size, longest, 32)
            coordinates = torch.randn(self.batch_size, 4)
            present = torch.randint(0, 2, (self.batch_size, self.species)).float()
            yield visits.cuda(), coordinates.cuda(), present.cuda()


def train(model, sites, lr=1e-3):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    criterion = nn.BCEWithLogitsLoss()
    total = 0.0
    for visits, coordinates, present in sites:
        loss = criterion(model(visits, coordinates), present)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def main():
    torch.manual_seed(0)
    model = GeoModel().cuda()
    print(train(model, Sites(24, 16)))


if __name__ == "__main__":
    main()
