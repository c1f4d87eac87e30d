import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 4, 1),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(size=128):
    model.train()
    for i in range(3):
        image = torch.rand(4, 3, size, size, device="cuda")
        target = torch.randint(0, 4, (4, size, size), device="cuda")
        loss = F.cross_entropy(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(size=512):
    model.eval()
    maps = []
    for i in range(2):
        image = torch.rand(4, 3, size, size, device="cuda")
        output = model(image)
        maps.append(output.argmax(1).cpu())
    return torch.cat(maps)


train()
print(validate().shape)
