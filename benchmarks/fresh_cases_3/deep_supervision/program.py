import torch
import torch.nn.functional as F
from torch import nn


class VGGBlock(nn.Module):
    def __init__(self, inputs, middle, outputs):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1, self.bn1 = nn.Conv2d(inputs, middle, 3, padding=1), nn.BatchNorm2d(middle)
        self.conv2, self.bn2 = nn.Conv2d(middle, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)))


class NestedUNet(nn.Module):
    """UNet++: each node reads those of its level and the one below, and each top node scores."""

    def __init__(self, classes=1, channels=3, filters=(16, 32, 64, 128)):
        super().__init__()
        self.depth = len(filters)
        self.pool = nn.MaxPool2d(2, 2)
        self.nodes = nn.ModuleDict()
        for level, width in enumerate(filters):
            inputs = channels if level == 0 else filters[level - 1]
            self.nodes[f"{level}_0"] = VGGBlock(inputs, width, width)
        for j in range(1, self.depth):
            for level in range(self.depth - j):
                inputs = filters[level] * j + filters[level + 1]
                self.nodes[f"{level}_{j}"] = VGGBlock(inputs, filters[level], filters[level])
        self.finals = nn.ModuleList(nn.Conv2d(filters[0], classes, 1) for _ in range(1, self.depth))

    @staticmethod
    def up(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)

    def forward(self, x):
        rows = [[] for _ in range(self.depth)]
        for diagonal in range(self.depth):
            x = self.nodes[f"{diagonal}_0"](
                x if diagonal == 0 else self.pool(rows[diagonal - 1][0])
            )
            rows[diagonal].append(x)
            for j in range(1, diagonal + 1):
                level = diagonal - j
                parts = [*rows[level], self.up(rows[level + 1][j - 1])]
                rows[level].append(self.nodes[f"{level}_{j}"](torch.cat(parts, 1)))
        return [final(node) for final, node in zip(self.finals, rows[0][1:])]


class BCEDiceLoss(nn.Module):
    def forward(self, logits, target):
        bce = F.binary_cross_entropy_with_logits(logits, target)
        probability = torch.sigmoid(logits).flatten(1)
        target = target.flatten(1)
        both = (probability * target).sum(1)
        dice = (2 * both + 1e-5) / (probability.sum(1) + target.sum(1) + 1e-5)
        return 0.5 * bce + 1 - dice.mean()


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    @property
    def average(self):
        return self.sum / self.count


def train(loader, model, criterion, optimizer):
    meter = AverageMeter()
    model.train()
    for images, masks in loader:
        images, masks = images.cuda(), masks.cuda()
        outputs = model(images)
        loss = sum(criterion(output, masks) for output in outputs) / len(outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), len(images))
    return meter.average


@torch.no_grad()
def validate(loader, model, criterion):
    meter = AverageMeter()
    model.eval()
    for images, masks in loader:
        images, masks = images.cuda(), masks.cuda()
        outputs = model(images)
        meter.update(criterion(outputs[-1], masks).item(), len(images))
    return meter.average


def cells(count):
    images = torch.randn(count, 3, 96, 96)
    masks = (torch.rand(count, 1, 96, 96) > 0.5).float()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, masks), batch_size=8)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, criterion = NestedUNet().cuda(), BCEDiceLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    training, validation = cells(24), cells(8)
    for epoch in range(2):
        print(
            epoch,
            train(training, model, criterion, optimizer),
            validate(validation, model, criterion),
        )
