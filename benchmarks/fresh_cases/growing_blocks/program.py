import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GrowingBlock(nn.Module):
    """A residual block that can say how its output is correlated, to decide where to grow."""

    def __init__(self, width, inner):
        super().__init__()
        self.first = nn.Linear(width, inner)
        self.second = nn.Linear(inner, width)
        self.store_activity = False
        self.activity = None
        self.samples = 0
        self.register_buffer("covariance", torch.zeros(width, width))

    def forward(self, x):
        y = x + self.second(F.gelu(self.first(x)))
        if self.store_activity:
            self.activity = y
        return y

    @torch.no_grad()
    def update_covariance(self):
        self.covariance += self.activity.T @ self.activity
        self.samples += len(self.activity)

    def rank(self):
        return self.covariance.diagonal().div(max(self.samples, 1)).gt(1e-3).sum().item()


class GrowingNet(nn.Module):
    def __init__(self, width=256, inner=4096, depth=3, classes=20):
        super().__init__()
        self.blocks = nn.ModuleList(GrowingBlock(width, inner) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gather_statistics(net, loader):
    for block in net.blocks:
        block.store_activity = True
    for x, _ in loader:
        net(x.cuda())
        for block in net.blocks:
            block.update_covariance()
    for block in net.blocks:
        block.store_activity = False
    return [block.rank() for block in net.blocks]


def train_step(net, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


data = TensorDataset(torch.randn(4096, 256), torch.randint(0, 20, (4096,)))
net = GrowingNet().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(2):
    print("ranks:", gather_statistics(net, DataLoader(data, batch_size=1024)))
    for x, y in DataLoader(data, batch_size=1024, shuffle=True):
        loss = train_step(net, optimizer, x.cuda(), y.cuda())
    print(epoch, loss)
