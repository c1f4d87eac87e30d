"""A policy over entities, with keys for the relative positions of each pair."""

import torch
from torch import nn
from torch.distributions import Categorical


class RelposEncoding(nn.Module):
    def __init__(self, extent, d_head):
        super().__init__()
        self.extent = extent
        self.keys = nn.Embedding((2 * extent + 1) ** 2, d_head)

    def indices(self, positions):
        offsets = positions[:, :, None] - positions[:, None]
        offsets = offsets.clamp(-self.extent, self.extent) + self.extent
        return offsets[..., 0] * (2 * self.extent + 1) + offsets[..., 1]

    def forward(self, positions):
        return self.keys(self.indices(positions))


class Attention(nn.Module):
    def __init__(self, d_model, heads, relpos):
        super().__init__()
        self.heads, self.relpos = heads, relpos
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, positions):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(2, 3)
        relkeys = self.relpos(positions)
        logits = logits + torch.einsum("bhqd,bqkd->bhqk", q, relkeys)
        attended = (logits * q.shape[-1] ** -0.5).softmax(-1) @ v
        return x + self.proj(attended.transpose(1, 2).flatten(2))


class RogueNet(nn.Module):
    def __init__(self, d_features=16, d_model=64, heads=2, actions=6):
        super().__init__()
        self.embed = nn.Linear(d_features, d_model)
        self.attention = Attention(d_model, heads, RelposEncoding(5, d_model // heads))
        self.head = nn.Linear(d_model, actions)

    def forward(self, entities, positions):
        return Categorical(logits=self.head(self.attention(self.embed(entities), positions)))


def reinforce(net, steps, batch=256, entities=48):
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
    for step in range(steps):
        features = torch.randn(batch, entities, 16).cuda()
        positions = torch.randint(0, 24, (batch, entities, 2)).cuda()
        policy = net(features, positions)
        actions = policy.sample()
        advantages = torch.randn(batch, 1).cuda()
        loss = -(policy.log_prob(actions) * advantages).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for row in reinforce(RogueNet().cuda(), 4):
        print(*row)
