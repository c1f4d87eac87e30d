import torch
import torch.nn.functional as F
from torch import nn


class AverageMeter:
    def __init__(self, items):
        self.items = items
        self.reset()

    def reset(self):
        self._sum = [0] * len(self.items)
        self._count = [0] * len(self.items)

    def update(self, values):
        for i, value in enumerate(values):
            self._sum[i] += value
            self._count[i] += 1

    def avg(self):
        return [total / max(count, 1) for total, count in zip(self._sum, self._count)]


class PointEncoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Conv1d(3, width, 1), nn.Conv1d(width, 2 * width, 1)

    def forward(self, points):
        return self.second(F.relu(self.first(points.transpose(1, 2)))).amax(-1)


class StyleDecoder(nn.Module):
    def __init__(self, width, patches, points):
        super().__init__()
        self.patches, self.points = patches, points // patches
        self.layers = nn.ModuleList(nn.Linear(2 * width + 2, 96) for _ in range(patches))
        self.outs = nn.ModuleList(nn.Linear(96, 3) for _ in range(patches))

    def forward(self, code):
        parts = []
        for layer, out in zip(self.layers, self.outs):
            grid = torch.rand(len(code), self.points, 2, device=code.device)
            x = torch.cat([code[:, None].expand(-1, self.points, -1), grid], -1)
            parts.append(out(F.relu(layer(x))))
        return torch.cat(parts, 1)


class SpareNet(nn.Module):
    def __init__(self, width=64, patches=8, points=1024):
        super().__init__()
        self.encoder = PointEncoder(width)
        self.decoder = StyleDecoder(width, patches, points)

    def forward(self, partial):
        coarse = self.decoder(self.encoder(partial))
        middle = self.decoder(self.encoder(torch.cat([partial, coarse], 1)))
        refine = self.decoder(self.encoder(torch.cat([partial, middle], 1)))
        return coarse, middle, refine


def chamfer(x, y):
    distance = torch.cdist(x, y)
    return distance.amin(1).mean() + distance.amin(2).mean()


class Runner:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.losses = AverageMeter(["coarse", "middle", "refine"])

    def train_epoch(self, loader):
        self.losses.reset()
        for partial, complete in loader:
            self.train_step(partial.cuda(), complete.cuda())
        return [float(value) for value in self.losses.avg()]

    def train_step(self, partial, complete):
        coarse, middle, refine = (chamfer(x, complete) for x in self.model(partial))
        self.optimizer.zero_grad()
        (middle + refine).backward()
        self.optimizer.step()
        self.losses.update([coarse * 1000, middle * 1000, refine * 1000])


def shapes(batches, size=8):
    return [(torch.rand(size, 512, 3), torch.rand(size, 1024, 3)) for _ in range(batches)]


def main():
    torch.manual_seed(0)
    model = SpareNet().cuda()
    runner = Runner(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    for epoch in range(2):
        print(epoch, runner.train_epoch(shapes(8)))


if __name__ == "__main__":
    main()
