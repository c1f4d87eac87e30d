import torch
import torch.nn.functional as F
from torch import nn


def block(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = block(1, 16), block(16, 32), block(32, 64)
        self.up2, self.up1 = block(96, 32), block(48, 16)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return self.out(a)


model = UNet().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    image = torch.rand(4, 1, 192, 192, device="cuda")
    mask = torch.randint(0, 2, (4, 192, 192), device="cuda")
    optimizer.zero_grad()
    F.cross_entropy(model(image), mask).backward()
    optimizer.step()
print(torch.cuda.max_memory_allocated() >> 20)
