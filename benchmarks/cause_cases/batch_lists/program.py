import torch
from torch import nn


def get_batches(rows, batch_size):
    features = torch.randn(rows, 60, 128)
    labels = torch.randint(0, 3, (rows,))
    batches = []
    for start in range(0, rows, batch_size):
        batches.append(
            (features[start : start + batch_size].cuda(), labels[start : start + batch_size].cuda())
        )
    return batches


net = nn.Sequential(
    nn.Conv1d(60, 32, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 3)
).cuda()
optimizer = torch.optim.Adam(net.parameters())
batches = get_batches(8192, 512)
for x, y in batches:
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
