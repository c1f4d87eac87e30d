import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width=512, depth=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        hidden_states = [x]
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden_states.append(x)
        return hidden_states


encoder = Encoder().cuda().eval()
pooled = []
with torch.no_grad():
    for batch in range(3):
        tokens = torch.randn(64, 192, 512, device="cuda")
        states = encoder(tokens)
        pooled.append(states[-1].mean(1).cpu())
        del states
print(torch.cat(pooled).shape)
