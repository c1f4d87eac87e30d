import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class StateCacher:
    def __init__(self):
        self.cached = {}

    def store(self, key, state_dict):
        self.cached[key] = copy.deepcopy(state_dict)

    def retrieve(self, key):
        return self.cached[key]


class LRFinder:
    """Raises the learning rate step by step, notes the losses, then restores the model."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.cacher = StateCacher()
        self.cacher.store("model", model.state_dict())
        self.cacher.store("optimizer", optimizer.state_dict())

    def range_test(self, loader, start=1e-5, end=1.0):
        batches = list(loader)
        losses = []
        for i, (x, y) in enumerate(batches):
            lr = start * (end / start) ** (i / len(batches))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            losses.append((train_step(self.model, self.optimizer, x.cuda(), y.cuda()), lr))
        return min(losses)[1] / 10

    def reset(self):
        self.model.load_state_dict(self.cacher.retrieve("model"))
        self.optimizer.load_state_dict(self.cacher.retrieve("optimizer"))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, loader):
    right = 0
    for x, y in loader:
        right += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
    return right


data = TensorDataset(torch.randn(256, 2048), torch.randint(0, 100, (256,)))
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.ReLU())])
model.append(nn.Linear(2048, 100)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
finder = LRFinder(model, optimizer)
lr = finder.range_test(DataLoader(data, batch_size=64, shuffle=True))
finder.reset()
for group in optimizer.param_groups:
    group["lr"] = lr
for x, y in DataLoader(data, batch_size=64, shuffle=True):
    loss = train_step(model, optimizer, x.cuda(), y.cuda())
print(lr, loss, evaluate(model, DataLoader(data, batch_size=64)))
