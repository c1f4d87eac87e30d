"""A decoder with experts."""

import torch.nn as nn
import torch.nn.functional as F

from moe.experts import MoE
from moe.router import load_balancing_loss, z_loss


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden = cfg["hidden_size"]
        self.heads = cfg["num_heads"]
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.LayerNorm(hidden)
        self.moe = MoE(cfg)

    def attention(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, t, c))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        out, logits, experts = self.moe(self.norm2(x))
        return x + out, logits, experts


class MoEForCausalLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg["vocab_size"], cfg["hidden_size"])
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg["num_layers"]))
        self.norm = nn.LayerNorm(cfg["hidden_size"])
        self.lm_head = nn.Linear(cfg["hidden_size"], cfg["vocab_size"], bias=False)
        self.num_experts = cfg["num_experts"]
        self.router_logits = []

    def forward(self, tokens, labels, aux_coef=0.0, z_coef=0.0):
        self.router_logits.clear()
        x = self.embed(tokens)
        aux = x.new_zeros(())
        for layer in self.layers:
            x, logits, experts = layer(x)
            self.router_logits.append(logits)
            aux = aux + aux_coef * load_balancing_loss(logits, experts, self.num_experts)
            aux = aux + z_coef * z_loss(logits)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) + aux
