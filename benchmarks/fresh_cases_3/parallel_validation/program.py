import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SeparableBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return F.relu(self.norm(self.pointwise(self.depthwise(x))))


class LandCover(nn.Module):
    def __init__(self, bands=6, classes=9, width=48):
        super().__init__()
        self.stem = nn.Conv2d(bands, width, 3, padding=1)
        self.blocks = nn.Sequential(SeparableBlock(width, width), SeparableBlock(width, width))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, tiles):
        return self.head(self.blocks(self.stem(tiles)))


class ConfusionMatrix:
    def __init__(self, classes):
        self.classes = classes
        self.matrix = torch.zeros(classes, classes, dtype=torch.long, device="cuda")

    def update(self, predicted, target):
        index = target.flatten() * self.classes + predicted.flatten()
        self.matrix += torch.bincount(index, minlength=self.classes**2).view_as(self.matrix)

    def mean_iou(self):
        dist.all_reduce(self.matrix)
        matrix = self.matrix.float()
        union = matrix.sum(0) + matrix.sum(1) - matrix.diag()
        return (matrix.diag() / union.clamp(min=1)).mean().item()


class Trainer:
    def __init__(self, model, classes=9):
        self.classes = classes
        self.model = DistributedDataParallel(model.cuda(), gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def train_epoch(self, loader):
        self.model.train()
        for tiles, labels in loader:
            tiles, labels = tiles.cuda(), labels.cuda()
            loss = F.cross_entropy(self.model(tiles), labels)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def validate(self, loader):
        model = self.model.module.eval()
        confusion = ConfusionMatrix(self.classes)
        for tiles, labels in loader:
            predicted = model(tiles.cuda()).argmax(1)
            confusion.update(predicted, labels.cuda())
        return confusion.mean_iou()


def tiles(count, batch_size, size=128):
    data = torch.utils.data.TensorDataset(
        torch.randn(count, 6, size, size), torch.randint(0, 9, (count, size, size))
    )
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def main():
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29531")
    dist.init_process_group("gloo", rank=0, world_size=1)
    torch.manual_seed(0)
    trainer = Trainer(LandCover())
    training, validation = tiles(12, 4), tiles(16, 4)
    for epoch in range(2):
        print(epoch, trainer.train_epoch(training), trainer.validate(validation))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
