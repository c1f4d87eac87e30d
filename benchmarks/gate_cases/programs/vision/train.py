"""Train the network, a few pictures at a time."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from images import Pictures
from network import Network
from settings import BATCH, EPOCHS, MICRO, RATE, SIDE


def make_optimizer(network):
    return torch.optim.SGD(network.parameters(), lr=RATE)


class Trainer:
    def __init__(self, device):
        self.device = device
        self.network = Network().to(device)
        self.optimizer = make_optimizer(self.network)
        self.measure = nn.CrossEntropyLoss()
        self.log = {"loss": 0.0, "epoch": 0}

    def batch(self, pixels, labels):
        total = 0.0
        for some, right in zip(pixels.chunk(MICRO), labels.chunk(MICRO)):
            loss = self.measure(self.network(some), right) / MICRO
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def epoch(self, loader):
        for pixels, labels in loader:
            pixels = pixels.to(self.device)
            labels = labels.to(self.device)
            self.log["loss"] = self.batch(pixels, labels)
        self.log["epoch"] += 1

    @torch.no_grad()
    def accuracy(self, loader):
        self.network.eval()
        right = 0
        for pixels, labels in loader:
            scores = self.network(pixels.to(self.device))
            right += (scores.argmax(1).cpu() == labels).sum().item()
        self.network.train()
        return right / len(loader.dataset)


def main():
    torch.manual_seed(0)
    trainer = Trainer(torch.device("cuda"))
    loader = DataLoader(Pictures(4 * BATCH, SIDE), batch_size=BATCH)
    for _ in range(EPOCHS):
        trainer.epoch(loader)
        print(trainer.log)
    print(trainer.accuracy(loader))


if __name__ == "__main__":
    main()
