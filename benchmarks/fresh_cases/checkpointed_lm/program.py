import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    @property
    def mean(self):
        return self.sum / max(self.count, 1)


class Block(nn.Module):
    def __init__(self, width, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=256, width=512, depth=6):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(x)


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_step(model, optimizer, ids):
    optimizer.zero_grad()
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    meter = AverageMeter()
    for (ids,) in loader:
        meter.update(loss_of(model, ids.cuda()).item())
    model.train()
    return meter.mean


data = TensorDataset(torch.randint(0, 256, (64, 257)))
model = LanguageModel().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
for epoch in range(2):
    meter = AverageMeter()
    for (ids,) in DataLoader(data, batch_size=16, shuffle=True):
        meter.update(train_step(model, optimizer, ids.cuda()))
    print(epoch, meter.mean, evaluate(model, DataLoader(data, batch_size=16)))
