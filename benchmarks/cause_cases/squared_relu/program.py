import gc

import torch
from torch import nn

gc.disable()


class SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.clamp(min=0).square()
        ctx.out = out
        return out

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.out.sqrt()


net = nn.ModuleList(nn.Linear(768, 768) for _ in range(2)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(14):
    x = torch.randn(4096, 768, device="cuda")
    for layer in net:
        x = SquaredReLU.apply(layer(x))
    loss = x.mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
print(torch.cuda.memory_allocated() >> 20)
