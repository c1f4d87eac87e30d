import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.05)
model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()


def attempt(batch):
    try:
        model(torch.randn(batch, 1024, device="cuda")).pow(2).mean().backward()
    except torch.OutOfMemoryError:
        return False
    return True


batch = 32768
while not attempt(batch):
    torch.cuda.empty_cache()
    batch //= 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(batch, 1024, device="cuda")).pow(2).mean().backward()
    optimizer.step()
print("trained with", batch)
