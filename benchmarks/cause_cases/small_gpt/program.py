import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab=2048, width=256, depth=4):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(256, width)
        self.blocks = nn.Sequential(*[Block(width, 8) for _ in range(depth)])
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, target):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), target.flatten())


model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(3):
    ids = torch.randint(0, 2048, (8, 257), device="cuda")
    loss = model(ids[:, :-1], ids[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print(loss.item())
