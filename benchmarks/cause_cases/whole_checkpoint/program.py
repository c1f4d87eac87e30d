import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    def __init__(self, width=512, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, width))
            for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


encoder = Encoder().cuda()
head = nn.Linear(512, 10).cuda()
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
for step in range(3):
    x = torch.randn(4096, 512, device="cuda")
    y = torch.randint(0, 10, (4096,), device="cuda")
    features = checkpoint(encoder, x, use_reentrant=False)
    loss = nn.functional.cross_entropy(head(features), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
