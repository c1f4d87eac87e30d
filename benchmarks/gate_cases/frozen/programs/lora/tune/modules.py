"""The transformer that is finetuned."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tune.lora import LoRALinear


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x_normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x_normed * self.scale


def linear(cfg, name, in_dim, out_dim):
    if name in cfg.lora_attn_modules:
        return LoRALinear(in_dim, out_dim, cfg.lora_rank, cfg.lora_alpha)
    return nn.Linear(in_dim, out_dim, bias=False)


class MultiHeadAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        dim = cfg.embed_dim
        self.num_heads = cfg.num_heads
        self.q_proj = linear(cfg, "q_proj", dim, dim)
        self.k_proj = linear(cfg, "k_proj", dim, dim)
        self.v_proj = linear(cfg, "v_proj", dim, dim)
        self.output_proj = linear(cfg, "output_proj", dim, dim)

    def forward(self, x, *, mask=None):
        b, s, d = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output_proj(out.transpose(1, 2).reshape(b, s, d))


class FeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden = 4 * cfg.embed_dim
        kind = LoRALinear if cfg.apply_lora_to_mlp else None
        more = (cfg.lora_rank, cfg.lora_alpha)
        dim = cfg.embed_dim
        self.w1 = kind(dim, hidden, *more) if kind else nn.Linear(dim, hidden, bias=False)
        self.w2 = kind(hidden, dim, *more) if kind else nn.Linear(hidden, dim, bias=False)
        self.w3 = kind(dim, hidden, *more) if kind else nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.sa_norm = RMSNorm(cfg.embed_dim)
        self.attn = MultiHeadAttention(cfg)
        self.mlp_norm = RMSNorm(cfg.embed_dim)
        self.mlp = FeedForward(cfg)

    def forward(self, x, mask):
        h = x + self.attn(self.sa_norm(x), mask=mask)
        return h + self.mlp(self.mlp_norm(h))


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, cfg.embed_dim)
        self.layers = nn.ModuleList(TransformerLayer(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.embed_dim)
        self.output = nn.Linear(cfg.embed_dim, cfg.vocab_size, bias=False)
        self.activation_checkpointing = False
        self.num_output_chunks = 0
        causal = torch.ones(cfg.max_seq_len, cfg.max_seq_len, dtype=torch.bool).tril()
        self.register_buffer("causal_mask", causal, persistent=False)

    def set_num_output_chunks(self, num_output_chunks):
        self.num_output_chunks = num_output_chunks

    def forward(self, tokens):
        seq_len = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        mask = self.causal_mask[None, None, :seq_len, :seq_len]
        for layer in self.layers:
            if self.activation_checkpointing and self.training:
                h = checkpoint(layer, h, mask, use_reentrant=False)
            else:
                h = layer(h, mask)
        h = self.norm(h)
        if self.num_output_chunks > 0:
            return [self.output(chunk) for chunk in h.chunk(self.num_output_chunks, dim=1)]
        return self.output(h)
