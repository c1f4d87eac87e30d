import functools
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

gc.disable()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def checkpointed_forward(forward, module, *args):
    if not torch.is_grad_enabled():
        return forward(module, *args)
    return checkpoint(forward, module, *args, use_reentrant=False)


def checkpoint_wrapper(module):
    module.forward = functools.partial(checkpointed_forward, type(module).forward, module)
    return module


def build(depth, width, classes):
    blocks = [checkpoint_wrapper(Block(width)) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, classes)).cuda()


def train(model, loader, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def accuracy(model, loader):
    right = 0
    for x, y in loader:
        right += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
    return right / len(loader.dataset)


def trial(lr):
    model = build(depth=4, width=768, classes=10)
    train(model, DataLoader(data, batch_size=512, shuffle=True), lr)
    return accuracy(model, DataLoader(data, batch_size=512))


data = TensorDataset(torch.randn(1024, 768), torch.randint(0, 10, (1024,)))
scores = {}
for lr in [0.3, 0.1, 0.03, 0.01]:
    scores[lr] = trial(lr)
print(max(scores, key=scores.get), torch.cuda.memory_allocated() >> 20)
