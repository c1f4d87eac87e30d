"""Embeddings of proteins, and the likeliest residue at each position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ESMOutput:
    sequence_logits: torch.Tensor
    embeddings: torch.Tensor | None
    hidden_states: torch.Tensor | None


class UnifiedBlock(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.ffn = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.SiLU())
        self.down = nn.Linear(2 * d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.ffn(x))


class TransformerStack(nn.Module):
    def __init__(self, d_model, n_heads, n_layers):
        super().__init__()
        self.blocks = nn.ModuleList(UnifiedBlock(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        hiddens = []
        for block in self.blocks:
            x = block(x)
            hiddens.append(x)
        return self.norm(x), torch.stack(hiddens)


class ESMC(nn.Module):
    def __init__(self, d_model=320, n_heads=5, n_layers=14):
        super().__init__()
        self.embed = nn.Embedding(64, d_model)
        self.transformer = TransformerStack(d_model, n_heads, n_layers)
        self.sequence_head = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU())
        self.lm = nn.Linear(d_model, 64)

    def forward(self, tokens):
        x, hiddens = self.transformer(self.embed(tokens))
        return ESMOutput(self.lm(self.sequence_head(x)), x, hiddens)


@torch.inference_mode()
def embed(model, proteins, batch_size=4):
    for start in range(0, len(proteins), batch_size):
        output = model(proteins[start : start + batch_size].cuda())
        residues = output.sequence_logits.argmax(-1)
        yield output.embeddings.mean(1).cpu(), residues.cpu()


if __name__ == "__main__":
    torch.manual_seed(0)
    proteins = torch.randint(4, 24, (12, 512))
    for vectors, residues in embed(ESMC().cuda().eval(), proteins):
        print(tuple(vectors.shape), tuple(residues.shape))
