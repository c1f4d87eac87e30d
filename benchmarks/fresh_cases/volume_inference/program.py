import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        scan = torch.randn(1, *self.size, generator=generator)
        return scan, (scan[0] > 0).long()


class VoxelNet(nn.Module):
    def __init__(self, width=16, classes=14):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1),
            nn.InstanceNorm3d(width),
            nn.LeakyReLU(),
            nn.Conv3d(width, classes, 1),
        )

    def forward(self, x):
        return self.layers(x)


def starts(length, window):
    return sorted({*range(0, length - window, window // 2), length - window})


def sliding_window_inference(scan, window, model, classes):
    size = scan.shape[2:]
    output = torch.zeros(1, classes, *size, device=scan.device)
    count = torch.zeros(1, 1, *size, device=scan.device)
    for corner in itertools.product(*[starts(n, window) for n in size]):
        where = tuple(slice(at, at + window) for at in corner)
        output[(..., *where)] += model(scan[(..., *where)])
        count[(..., *where)] += 1
    return output.div_(count)


def train_step(model, optimizer, patch, label):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(patch), label)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    right = 0
    for scan, label in loader:
        output = sliding_window_inference(scan.cuda(), 48, model, classes=14)
        right += (output.argmax(1).cpu() == label).sum().item()
    model.train()
    return right


model = VoxelNet().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for scan, label in DataLoader(Scans(4, (32, 32, 32)), batch_size=2):
    loss = train_step(model, optimizer, scan.cuda(), label.cuda())
print(loss, validate(model, DataLoader(Scans(2, (144, 144, 96)), batch_size=1)))
