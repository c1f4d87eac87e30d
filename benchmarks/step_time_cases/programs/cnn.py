"""A small residual network for images, with autocast and channels last."""

import torch
import torch.nn as nn
import torch.nn.functional as F

WIDTHS, BLOCKS, BATCH, SIZE, CLASSES = (64, 128, 256), 2, 128, 128, 1000


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = None
        if stride > 1 or inputs != outputs:
            self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.conv1(x)
        y = self.bn1(y)
        y = F.relu(y)
        y = self.conv2(y)
        y = self.bn2(y)
        if self.down is not None:
            x = self.down(x)
        return F.relu(x + y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        layers, channels = [], WIDTHS[0]
        for at, width in enumerate(WIDTHS):
            for number in range(BLOCKS):
                stride = 2 if at and not number else 1
                layers.append(Block(channels, width, stride))
                channels = width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = self.blocks(x)
        x = x.mean(dim=(2, 3))
        return self.head(x)


def batches():
    images = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8).pin_memory()
    labels = torch.zeros(BATCH, dtype=torch.int64).pin_memory()
    for _ in range(4):
        yield images, labels


def main():
    model = Net().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean = torch.tensor([123.7, 116.3, 103.5], device="cuda").view(1, 3, 1, 1)
    std = torch.tensor([58.4, 57.1, 57.4], device="cuda").view(1, 3, 1, 1)
    for images, labels in batches():
        x = images.to("cuda", non_blocking=True)
        y = labels.to("cuda", non_blocking=True)
        x = (x.float() - mean) / std
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
