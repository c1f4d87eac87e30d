import torch
import torch.nn.functional as F
from torch import nn


class Metric:
    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0, device="cuda")
        self.n = 0

    def update(self, value):
        self.sum = self.sum + value
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def validate(model, epoch):
    model.eval()
    val_loss = Metric("val_loss")
    for i in range(10):
        data = torch.randn(1024, 512, device="cuda")
        target = torch.randint(0, 1000, (1024,), device="cuda")
        output = model(data)
        val_loss.update(F.cross_entropy(output, target))
    print(epoch, val_loss.avg.item())


model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1000)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    model.train()
    for i in range(3):
        data = torch.randn(256, 512, device="cuda")
        target = torch.randint(0, 1000, (256,), device="cuda")
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
    validate(model, epoch)
