"""Training on pairs with a ranking loss, several batches for each update."""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(128, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.out = nn.Linear(width, 32)

    def forward(self, x):
        return self.out(self.net(x))


class Updater:
    def __init__(self, model, accumulate):
        self.model = model
        self.accumulate = accumulate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def compute_loss(self, anchors, positives):
        a, p = self.model(anchors), self.model(positives)
        n = self.model(positives.roll(1, 0))
        return nn.functional.triplet_margin_loss(a, p, n)

    def update(self, micro_batches):
        losses = []
        for anchors, positives in micro_batches:
            losses.append(self.compute_loss(anchors.cuda(), positives.cuda()))
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def stream(size):
    while True:
        anchors = torch.randn(size, 128)
        yield anchors, anchors + 0.1 * torch.randn(size, 128)


def main(updates=3, accumulate=8):
    torch.manual_seed(0)
    updater = Updater(Encoder().cuda(), accumulate)
    source = stream(2048)
    for step in range(updates):
        print(step, updater.update([next(source) for _ in range(accumulate)]))


if __name__ == "__main__":
    main()
