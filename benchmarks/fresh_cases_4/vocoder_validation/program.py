from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.conv = nn.Conv1d(channels, 2 * channels, 3, padding=dilation, dilation=dilation)
        self.skip = nn.Conv1d(channels, channels, 1)
        self.out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        a, b = self.conv(x).chunk(2, dim=1)
        gated = torch.tanh(a) * torch.sigmoid(b)
        return x + self.out(gated), self.skip(gated)


class WaveGenerator(nn.Module):
    def __init__(self, layers=8, channels=32):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.blocks = nn.ModuleList(ResidualBlock(channels, 2 ** (i % 4)) for i in range(layers))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, 1, 1))

    def forward(self, z):
        x, skips = self.first(z), 0
        for block in self.blocks:
            x, skip = block(x)
            skips = skips + skip
        return self.last(skips)


def spectral_loss(x, y, size=512):
    def magnitude(signal):
        frames = signal.squeeze(1).unfold(-1, size, size // 2)
        return torch.sqrt((frames**2).mean(-1) + 1e-7)

    return F.l1_loss(magnitude(x), magnitude(y))


class Trainer:
    def __init__(self, model, optimizer, loaders, device):
        self.model, self.optimizer, self.loaders, self.device = model, optimizer, loaders, device
        self.steps = self.epochs = 0
        self.total_train_loss = defaultdict(float)
        self.total_eval_loss = defaultdict(float)

    def run(self, max_steps=8):
        while self.steps < max_steps:
            for batch in self.loaders["train"]:
                self._train_step(batch)
                if self.steps % 4 == 0:
                    self._eval_epoch()
            self.epochs += 1

    def _train_step(self, batch):
        z, y = (x.to(self.device) for x in batch)
        loss = spectral_loss(self.model(z), y)
        self.total_train_loss["spectral"] += loss.item()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def _eval_step(self, batch):
        z, y = (x.to(self.device) for x in batch)
        y_ = self.model(z)
        self.total_eval_loss["spectral"] += spectral_loss(y_, y).item()
        self.total_eval_loss["mse"] += F.mse_loss(y_, y).item()

    def _eval_epoch(self):
        self.model.eval()
        for batch in self.loaders["dev"]:
            self._eval_step(batch)
        self.total_eval_loss.clear()
        self.model.train()


def waves(batches, size, length):
    for _ in range(batches):
        yield torch.randn(size, 1, length), torch.randn(size, 1, length)


class Loader:
    def __init__(self, *args):
        self.args = args

    def __iter__(self):
        return waves(*self.args)


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = WaveGenerator().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loaders = {"train": Loader(4, 4, 8192), "dev": Loader(3, 4, 32768)}
    Trainer(model, optimizer, loaders, device).run()


if __name__ == "__main__":
    main()
