import torch
from torch import nn

actor = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(2048, 2048), nn.ELU())]).cuda()
optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3)
world_size = 4


def reduce_parameters():
    grads = [p.grad.view(-1) for p in actor.parameters()]
    flat = torch.cat(grads)
    flat /= world_size
    offset = 0
    for p in actor.parameters():
        n = p.numel()
        p.grad.copy_(flat[offset : offset + n].view_as(p.grad))
        offset += n


for update in range(4):
    loss = actor(torch.randn(256, 2048, device="cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    reduce_parameters()
    optimizer.step()
print(loss.item())
