import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


model = nn.Sequential(*[Block(1280) for _ in range(8)]).cuda()
with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
    x = torch.randn(256, 1280, device="cuda")
    y = model(x)
print(y.dtype, torch.cuda.max_memory_allocated() >> 20)
