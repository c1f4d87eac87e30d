import torch
from torch import nn


class BatchNorm(nn.Module):
    def __init__(self, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.running_mean = torch.zeros(features, device="cuda")
        self.running_var = torch.ones(features, device="cuda")

    def forward(self, x):
        mean = x.mean(0)
        var = x.var(0, unbiased=False)
        if self.training:
            m = self.momentum
            self.running_mean = (1 - m) * self.running_mean + m * mean
            self.running_var = (1 - m) * self.running_var + m * x.var(0, unbiased=True)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


net = nn.Sequential(nn.Linear(256, 1024), BatchNorm(1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(16):
    x = torch.randn(4096, 256, device="cuda")
    y = torch.randint(0, 10, (4096,), device="cuda")
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
