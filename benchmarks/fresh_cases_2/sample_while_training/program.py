import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Velocity(nn.Module):
    """The velocity of an interpolant between noise and images, at a time."""

    def __init__(self, channels=3, width=32):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.inward = nn.Conv2d(channels, width, 3, padding=1)
        self.outward = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x, t):
        hidden = F.silu(self.inward(x) + self.time(t[:, None])[:, :, None, None])
        return self.outward(hidden)


def sample(model, count, steps=10):
    """Integrates from noise to images."""
    x = torch.randn(count, 3, 64, 64, device="cuda")
    for step in range(steps):
        t = torch.full((count,), step / steps, device="cuda")
        x = x + model(x, t) / steps
    return x.clamp(-1, 1)


def train_step(model, optimizer, images):
    noise, t = torch.randn_like(images), torch.rand(len(images), device="cuda")
    mixed = torch.lerp(noise, images, t[:, None, None, None])
    loss = F.mse_loss(model(mixed, t), images - noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


data = TensorDataset(torch.randn(64, 3, 64, 64))
model = Velocity().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for (images,) in DataLoader(data, batch_size=16, shuffle=True):
        loss = train_step(model, optimizer, images.cuda())
    grid = sample(model, 16).mean(0).cpu()
    print(epoch, loss, tuple(grid.shape))
