import torch
from torch import nn

encoder = nn.Sequential(nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 384)).cuda().eval()


def extract(tokens):
    hidden = encoder(tokens)
    return hidden[:, 0]


features = []
with torch.no_grad():
    for batch in range(16):
        tokens = torch.randn(64, 197, 192, device="cuda")
        features.append(extract(tokens))
print(torch.cat(features).shape)
