"""Which tokens go to which expert."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Router(nn.Module):
    def __init__(self, hidden, num_experts, top_k):
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.top_k = top_k
        self.num_experts = num_experts

    def forward(self, x):
        logits = self.gate(x.float())
        probs = F.softmax(logits, dim=-1)
        weights, experts = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts


def load_balancing_loss(logits, experts, num_experts):
    probs = F.softmax(logits, dim=-1).mean(0)
    share = F.one_hot(experts.flatten(), num_experts).float().mean(0)
    return num_experts * (probs * share).sum()


def z_loss(logits):
    return torch.logsumexp(logits, dim=-1).pow(2).mean()
