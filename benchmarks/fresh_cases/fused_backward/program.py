import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
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
    def __init__(self, vocabulary=2000, width=1024, depth=6):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class OptimizersContainer:
    def __init__(self, model, lr):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, foreach=False)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def train_step(model, optimizers, ids):
    optimizers.zero_grad()
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    del logits
    loss.backward()
    optimizers.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, loader):
    right = 0
    for (ids,) in loader:
        predicted = model(ids.cuda()[:, :-1]).argmax(-1).cpu()
        right += (predicted == ids[:, 1:]).sum().item()
    return right


model = LanguageModel().cuda()
optimizers = OptimizersContainer(model, lr=0.01)
data = TensorDataset(torch.randint(0, 2000, (16, 65)))
for (ids,) in DataLoader(data, batch_size=4, shuffle=True):
    loss = train_step(model, optimizers, ids.cuda())
print(loss, evaluate(model, DataLoader(data, batch_size=4)))
