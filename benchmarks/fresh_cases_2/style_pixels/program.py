import torch
import torch.nn.functional as F
from torch import nn


class Features(nn.Module):
    """A frozen network whose activations describe content and style."""

    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(3 if not at else width, width, 3, padding=1) for at in range(3)
        )

    def forward(self, x):
        found = []
        for layer in self.layers:
            x = F.relu(layer(x))
            found.append(x)
        return found


def gram(x):
    flat = x.flatten(2)
    return flat @ flat.transpose(1, 2) / flat.shape[2]


def stylize(features, content, style, steps=5):
    with torch.no_grad():
        wanted = features(content)[-1].clone()
        grams = [gram(x) for x in features(style)]
    image = content.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([image], lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        found = features(image)
        loss = F.mse_loss(found[-1], wanted)
        loss = loss + sum(F.mse_loss(gram(x), g) for x, g in zip(found, grams))
        del found
        loss.backward()
        optimizer.step()
    return image.detach(), loss.item()


features = Features().cuda().requires_grad_(False)
content, style = (torch.rand(1, 3, 512, 512).cuda() for _ in range(2))
image, loss = stylize(features, content, style)
print(tuple(image.shape), loss)
