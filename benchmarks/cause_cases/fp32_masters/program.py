import torch
from torch import nn

model = (
    nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(2048, 2048), nn.ReLU())]).cuda().half()
)
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=1e-5, foreach=False)
for step in range(4):
    loss = model(torch.randn(1024, 2048, device="cuda", dtype=torch.float16)).float().pow(2).mean()
    (loss * 128).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float().div_(128)
        p.grad = None
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
print(loss.item())
