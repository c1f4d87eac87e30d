"""Transfer learning: only the head is trained."""

import torch
from torch import nn


class Backbone(nn.Module):
    def __init__(self, width=64, blocks=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(blocks)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3))


class Classifier(nn.Module):
    def __init__(self, classes, frozen):
        super().__init__()
        self.encoder = Backbone()
        self.head = nn.Linear(64, classes)
        if frozen:
            self.encoder.requires_grad = False

    def forward(self, x):
        return self.head(self.encoder(x))


class Runner:
    def __init__(self, **config):
        self.config = config

    def train(self, model):
        optimizer = torch.optim.Adam(model.head.parameters(), lr=self.config["lr"])
        criterion = nn.CrossEntropyLoss()
        for epoch in range(self.config["num_epochs"]):
            for features, targets in self.loader():
                optimizer.zero_grad()
                loss = criterion(model(features), targets)
                loss.backward()
                optimizer.step()
            print(epoch, loss.item())

    def loader(self):
        for _ in range(self.config["batches"]):
            yield torch.rand(16, 3, 96, 96).cuda(), torch.randint(0, 5, (16,)).cuda()


if __name__ == "__main__":
    torch.manual_seed(0)
    Runner(lr=1e-3, num_epochs=2, batches=3).train(Classifier(5, frozen=True).cuda())
