import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PatchNet(nn.Module):
    def __init__(self, patch=8, width=256, depth=4, classes=10):
        super().__init__()
        self.patch = patch
        self.stem = nn.Linear(3 * patch**2, width)
        self.early = nn.Sequential(*[self.layer(width) for _ in range(depth)])
        self.late = nn.Sequential(*[self.layer(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    @staticmethod
    def layer(width):
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, images):
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        return self.head(self.late(self.early(self.stem(patches))).mean(1))


class ActivationMaps:
    """Where a layer's output speaks for a class; use it in a with statement."""

    def __init__(self, model, layer):
        self.model = model.eval().requires_grad_(False)
        self.handle = layer.register_forward_hook(self.record)
        self.activation = None

    def record(self, module, inputs, output):
        self.activation = output.requires_grad_()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()
        self.activation = None

    def __call__(self, images):
        scores = self.model(images).max(1).values
        (gradient,) = torch.autograd.grad(scores.sum(), self.activation)
        weights = gradient.mean(1, keepdim=True)
        maps = (weights * self.activation.detach()).sum(-1).relu()
        self.activation = None
        return maps.cpu()


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


data = TensorDataset(torch.rand(256, 3, 128, 128), torch.randint(0, 10, (256,)))
model = PatchNet().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in DataLoader(data, batch_size=64, shuffle=True):
    loss = train_step(model, optimizer, x.cuda(), y.cuda())
optimizer.zero_grad()
maps = []
with ActivationMaps(model, model.early) as cam:
    for x, _ in DataLoader(data, batch_size=64):
        maps.append(cam(x.cuda()))
print(loss, torch.cat(maps).shape)
