import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Streets(Dataset):
    def __init__(self, count, height, width):
        self.count, self.size = count, (height, width)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        image = torch.rand(3, *self.size, generator=generator)
        return image, torch.randint(0, 8, self.size, generator=generator)


class SmallNet(nn.Module):
    def __init__(self, width=16, classes=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(4)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_step(model, optimizer, image, label):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(image), label)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model, optimizer, loader):
    model.train()
    for image, label in loader:
        loss = train_step(model, optimizer, image.cuda(), label.cuda())
    return loss


class ConfusionMatrix:
    def __init__(self, classes):
        self.counts = torch.zeros(classes, classes, dtype=torch.long)

    def update(self, label, predicted):
        pairs = label.flatten() * len(self.counts) + predicted.flatten()
        self.counts += pairs.bincount(minlength=self.counts.numel()).view_as(self.counts)


def val(model, loader):
    model.eval()
    torch.no_grad()
    matrix = ConfusionMatrix(8)
    for image, label in loader:
        output = model(image.cuda())
        matrix.update(label, output.argmax(1).cpu().clamp(0, 7))
    return matrix.counts.diagonal().sum().item() / max(matrix.counts.sum().item(), 1)


model = SmallNet().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
trainset = DataLoader(Streets(4, 128, 256), batch_size=2, shuffle=True)
valset = DataLoader(Streets(4, 256, 512), batch_size=2)
for epoch in range(2):
    print(epoch, train(model, optimizer, trainset), val(model, valset))
