"""A feed-forward block that is compiled."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(1024)
        self.gate = nn.Linear(1024, 4096)
        self.up = nn.Linear(1024, 4096)
        self.down = nn.Linear(4096, 1024)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def main():
    model = Net().to("cuda", torch.bfloat16)
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
