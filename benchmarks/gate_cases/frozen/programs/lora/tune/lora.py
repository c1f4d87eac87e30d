"""Low-rank adapters."""

import math

from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, in_dim, out_dim, rank, alpha, dropout=0.0):
        super().__init__()
        self.weight = nn.Linear(in_dim, out_dim, bias=False).weight
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()
        self.lora_a = nn.Linear(in_dim, rank, bias=False)
        self.lora_b = nn.Linear(rank, out_dim, bias=False)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        out = nn.functional.linear(x, self.weight)
        return out + self.scaling * self.lora_b(self.lora_a(self.dropout(x)))


def get_adapter_params(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def set_trainable_params(model, adapter_params):
    for name, param in model.named_parameters():
        param.requires_grad_(name in adapter_params)
