"""A demo of a face detector: each image at several scales, the boxes of all of them together."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class FeatureEnhance(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 3, padding=2, dilation=2)

    def forward(self, x):
        return torch.cat([self.a(x).relu(), self.b(x).relu()], 1)


class DualShot(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
        )
        self.enhance = FeatureEnhance(channels)
        self.head = nn.Conv2d(2 * channels, 5, 3, stride=4, padding=1)

    def forward(self, x):
        return self.head(self.enhance(self.stem(x))).flatten(2).transpose(1, 2)


def infer(net, image, shrink):
    x = torch.from_numpy(image).permute(2, 0, 1)[None].cuda()
    if shrink != 1:
        x = F.interpolate(x, scale_factor=shrink, mode="bilinear")
    y = net(x)
    boxes, scores = y[0, :, :4] / shrink, y[0, :, 4].sigmoid()
    return torch.cat([boxes, scores[:, None]], 1)


def vote(dets, keep=50):
    det = torch.cat(dets)
    order = det[:, 4].topk(min(keep, len(det))).indices
    return det[order].detach().cpu().numpy()


torch.manual_seed(0)
net = DualShot().cuda()
net.eval()
for name in ("0_Parade", "11_Meeting", "24_Soldier"):
    image = np.random.default_rng(len(name)).random((240, 320, 3), dtype=np.float32)
    dets = []
    for shrink in (0.5, 1, 1.25, 1.5):
        dets.append(infer(net, image, shrink))
        dets.append(infer(net, image[:, ::-1].copy(), shrink))
    faces = vote(dets)
    print(name, faces.shape)
