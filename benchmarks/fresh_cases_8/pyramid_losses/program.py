"""Segmentation with a feature pyramid whose levels are taken out by hooks, for a loss on each."""

import torch
import torch.nn.functional as F
from torch import nn


class FPN(nn.Module):
    def __init__(self, width=48, classes=6):
        super().__init__()
        self.down = nn.ModuleList(
            nn.Conv2d(3 if level == 0 else width, width, 3, stride=2, padding=1)
            for level in range(4)
        )
        self.skip = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))
        self.p2, self.p3, self.p4, self.p5 = (
            nn.Conv2d(width, width, 3, padding=1) for _ in range(4)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        stages = []
        for conv in self.down:
            x = conv(x).relu()
            stages.append(x)
        x = self.p5(self.skip[3](stages[3]))
        for level, conv in ((2, self.p4), (1, self.p3), (0, self.p2)):
            x = F.interpolate(x, scale_factor=2) + self.skip[level](stages[level])
            x = conv(x)
        return self.head(x)


class PyramidFeatures:
    def __init__(self, model, names=("p2", "p3", "p4", "p5")):
        self.maps = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(self._save(name))

    def _save(self, name):
        def hook(module, inputs, output):
            self.maps[name] = output

        return hook

    def pop(self):
        maps, self.maps = self.maps, {}
        return maps


def step(model, features, heads, images, masks, optimizer):
    loss = F.cross_entropy(model(images), masks)
    for name, level in features.pop().items():
        target = F.adaptive_avg_pool2d(images.mean(1, keepdim=True), level.shape[2:])
        loss = loss + 0.1 * F.mse_loss(heads[name](level), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = FPN().cuda()
    features = PyramidFeatures(model)
    heads = nn.ModuleDict({name: nn.Conv2d(48, 1, 1) for name in ("p2", "p3", "p4", "p5")}).cuda()
    optimizer = torch.optim.SGD([*model.parameters(), *heads.parameters()], lr=0.01)
    for number in range(4):
        images = torch.rand(4, 3, 160, 160).cuda()
        masks = torch.randint(0, 6, (4, 80, 80)).cuda()
        print(number, step(model, features, heads, images, masks, optimizer))
