"""A privileged driving agent, which learns from maps seen from above."""

import torch
from torch import nn


class BirdViewPolicy(nn.Module):
    def __init__(self, channels=7, steps=5, commands=4):
        super().__init__()
        self.steps, self.commands = steps, commands
        self.conv = nn.Sequential(
            nn.Conv2d(channels, 24, 8, stride=8),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.location_pred = nn.Linear(48 + 1, commands * steps * 2)

    def forward(self, birdview, speed, command):
        h = self.conv(birdview).mean((2, 3))
        h = self.location_pred(torch.cat([h, speed[:, None]], 1))
        h = h.view(-1, self.commands, self.steps, 2)
        return (h * command[:, :, None, None]).sum(1)


class LocationLoss(nn.Module):
    def __init__(self, w=192, h=192):
        super().__init__()
        self.register_buffer("size", torch.tensor([w, h], dtype=torch.float32))

    def forward(self, pred, target):
        return (pred - (target / (0.5 * self.size) - 1)).abs().mean((1, 2))


class ImageDataset(torch.utils.data.Dataset):
    def __init__(self, frames):
        self.frames = frames

    def __len__(self):
        return self.frames

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        birdview = torch.randint(0, 2, (7, 192, 192), dtype=torch.uint8, generator=random)
        command = torch.eye(4)[index % 4]
        return birdview, torch.rand(5, 2, generator=random) * 192, command, torch.tensor(3.0)


def train_or_eval(criterion, net, data, optim, is_train):
    net.train(is_train)
    losses = []
    for birdview, location, command, speed in data:
        maps = birdview.to("cuda").float()
        command, speed, location = command.cuda(), speed.cuda(), location.cuda()
        pred_location = net(maps, speed, command)
        loss = criterion(pred_location, location)
        if is_train:
            optim.zero_grad()
            loss.mean().backward()
            optim.step()
        losses.append(loss.mean().item())
    return sum(losses) / len(losses)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(ImageDataset(96), batch_size=32)
    net, criterion = BirdViewPolicy().cuda(), LocationLoss().cuda()
    optim = torch.optim.Adam(net.parameters(), lr=1e-4)
    for epoch in range(2):
        print(epoch, train_or_eval(criterion, net, data, optim, is_train=True))
