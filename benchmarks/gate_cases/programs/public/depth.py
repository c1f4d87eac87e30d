"""Attention over the tokens of several views, as Depth-Anything-3 has it."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim=128, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_mask=None):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask[:, None] if attn_mask is not None else None,
        )
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


def main():
    torch.manual_seed(0)
    model = nn.ModuleList(Attention() for _ in range(2)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.ones(2, 192, 192, device="cuda").tril()
    for _ in range(5):
        x = torch.randn(2, 192, 128, device="cuda")
        for block in model:
            x = x + block(x, attn_mask=mask)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
