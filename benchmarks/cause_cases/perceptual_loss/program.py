import torch
import torch.nn.functional as F
from torch import nn

features = []
vgg = (
    nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    )
    .cuda()
    .eval()
    .requires_grad_(False)
)
for index in (1, 3):
    vgg[index].register_forward_hook(lambda module, inputs, output: features.append(output))


def describe(image):
    features.clear()
    vgg(image)
    found = list(features)
    features.clear()
    return found


with torch.no_grad():
    style = describe(torch.rand(2, 3, 256, 256, device="cuda"))
canvas = torch.rand(2, 3, 256, 256, device="cuda", requires_grad=True)
optimizer = torch.optim.Adam([canvas], lr=0.02)
for step in range(3):
    loss = sum(F.mse_loss(a, b) for a, b in zip(describe(canvas), style))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
