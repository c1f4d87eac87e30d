import torch
from torch import nn


class Accelerator:
    def __init__(self):
        self._optimizers = []

    def prepare(self, model, optimizer):
        self._optimizers.append(optimizer)
        return model.cuda(), optimizer


def training(accelerator, width, batch):
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(torch.randn(batch, width, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


accelerator = Accelerator()
print(training(accelerator, 3072, 512))
print(training(accelerator, 2048, 4096))
