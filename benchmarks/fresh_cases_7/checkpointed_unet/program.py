"""A U-Net whose blocks are checkpointed, trained in half precision with a scaler."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.down1, self.down2 = block(3, width), block(width, 2 * width)
        self.mid = block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)
        self.pool, self.scale = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def run(self, part, x):
        return checkpoint(part, x, use_reentrant=False) if self.training else part(x)

    def forward(self, x):
        a = self.run(self.down1, x)
        b = self.run(self.down2, self.pool(a))
        x = self.run(self.mid, self.pool(b))
        x = self.run(self.up2, torch.cat([self.scale(x), b], 1))
        x = self.run(self.up1, torch.cat([self.scale(x), a], 1))
        return self.out(x)


class Stats:
    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value.item())


def fit(model, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        model.train()
        stats = Stats()
        for _ in range(3):
            image = torch.rand(4, 3, 96, 96, device="cuda")
            mask = (torch.rand(4, 1, 96, 96, device="cuda") > 0.5).float()
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(image)
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), mask)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            stats.add(loss.detach())
        model.eval()
        with torch.no_grad():
            area = model(torch.rand(4, 3, 96, 96, device="cuda")).sigmoid().mean().item()
        print(epoch, stats.values, area)


if __name__ == "__main__":
    torch.manual_seed(0)
    fit(UNet().cuda(), 2)
