"""The experts, and how tokens are brought to them."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from moe.router import Router


class Experts(nn.Module):
    """The weights of all experts in three tensors."""

    def __init__(self, num_experts, hidden, intermediate):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden, intermediate) * 0.02)
        self.w2 = nn.Parameter(torch.randn(num_experts, intermediate, hidden) * 0.02)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden, intermediate) * 0.02)

    def forward(self, x):
        gate = F.silu(torch.bmm(x, self.w1))
        return torch.bmm(gate * torch.bmm(x, self.w3), self.w2)


class MoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.num_experts = cfg["num_experts"]
        self.top_k = cfg["top_k"]
        self.capacity_factor = cfg["capacity_factor"]
        self.router = Router(cfg["hidden_size"], self.num_experts, self.top_k)
        self.experts = Experts(self.num_experts, cfg["hidden_size"], cfg["intermediate_size"])

    def capacity(self, tokens):
        return math.ceil(self.capacity_factor * tokens * self.top_k / self.num_experts)

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, 1)
        logits, weights, experts = self.router(x)
        capacity = self.capacity(len(x))
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = F.one_hot(chosen, self.num_experts).cumsum(0)
        place = counts.gather(1, chosen[:, None]).squeeze(1) - 1
        slot = torch.where(place < capacity, chosen * capacity + place, -1)[order]
        token = (order // self.top_k)[slot >= 0]
        part = weights.flatten()[order][slot >= 0]
        slot = slot[slot >= 0]
        buffer = x.new_zeros(self.num_experts * capacity, shape[-1])
        buffer = buffer.index_copy(0, slot, x[token])
        out = self.experts(buffer.view(self.num_experts, capacity, -1)).flatten(0, 1)
        out = torch.zeros_like(x).index_add(0, token, out[slot] * part[:, None].to(out.dtype))
        return out.view(shape), logits, experts
