import torch
from torch import nn

encoder = nn.Sequential(
    nn.Linear(256, 1024), *[m for _ in range(6) for m in (nn.ReLU(), nn.Linear(1024, 1024))]
).cuda()
policy = nn.Linear(1024, 16).cuda()
value = nn.Linear(1024, 1).cuda()
optimizer = torch.optim.Adam(
    [*encoder.parameters(), *policy.parameters(), *value.parameters()], lr=1e-4
)
for step in range(4):
    features = encoder(torch.randn(8192, 256, device="cuda"))
    losses = {
        "policy": -policy(features).log_softmax(-1)[:, 0].mean(),
        "value": value(features).pow(2).mean(),
    }
    optimizer.zero_grad()
    for name, loss in losses.items():
        loss.backward(retain_graph=True)
    optimizer.step()
    del features
print({name: loss.item() for name, loss in losses.items()})
