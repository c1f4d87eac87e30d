"""Frechet distance of generated images, with a metric that is updated by batch."""

import torch
from torch import nn


class Metric:
    def __init__(self):
        self._defaults = {}

    def add_state(self, name, default):
        self._defaults[name] = default
        setattr(self, name, list(default))

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, list(default))


class FID(Metric):
    def __init__(self, features):
        super().__init__()
        self.inception = features
        self.add_state("real_features", [])
        self.add_state("fake_features", [])

    @torch.no_grad()
    def update(self, imgs, real):
        features = self.inception(imgs)
        if real:
            self.real_features.append(features)
        else:
            self.fake_features.append(features)

    def compute(self):
        real = torch.cat(self.real_features)
        fake = torch.cat(self.fake_features)
        spread = (real.var(0) - fake.var(0)).abs().sum()
        return ((real.mean(0) - fake.mean(0)).pow(2).sum() + spread).item()


def inception(width=32, features=4096):
    return nn.Sequential(
        nn.Conv2d(3, width, 5, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(width * 16, features),
    ).eval()


def generator():
    return nn.Sequential(nn.Linear(32, 3 * 48 * 48), nn.Tanh(), nn.Unflatten(1, (3, 48, 48)))


def main(epochs=2, batches=24, batch=64):
    torch.manual_seed(0)
    fid = FID(inception().cuda())
    net = generator().cuda()
    for epoch in range(epochs):
        for _ in range(batches):
            fid.update(torch.rand(batch, 3, 48, 48).cuda(), real=True)
            with torch.no_grad():
                samples = net(torch.randn(batch, 32).cuda())
            fid.update(samples, real=False)
        print(epoch, fid.compute())
        fid.reset()


main()
