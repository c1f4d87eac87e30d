import torch
from torch import nn

encoder = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()


def check(features):
    if features.shape[1] % 384:
        raise ValueError(f"cannot split {features.shape[1]} features into heads")


def process(batch):
    features = encoder(batch)
    check(features)
    return features.mean().item()


failures = []
for i in range(12):
    batch = torch.randn(1024, 512, device="cuda")
    try:
        process(batch)
    except ValueError as error:
        failures.append((i, error))
for i, error in failures:
    print(i, error)
