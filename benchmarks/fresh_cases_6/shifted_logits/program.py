"""Fine-tune a small causal language model in half precision."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocabulary: int = 16000
    width: int = 128
    heads: int = 4
    layers: int = 3
    context: int = 256


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class CausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.tokens(input_ids)
        x = x + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        loss = None
        if labels is not None:
            loss = causal_loss(logits, labels, self.config.vocabulary)
        return loss, logits


def causal_loss(logits, labels, vocabulary, ignore_index=-100):
    logits = logits.float()
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
    shift_logits = shift_logits.view(-1, vocabulary)
    return F.cross_entropy(shift_logits, shift_labels.view(-1), ignore_index=ignore_index)


def examples(count, config, batch=4):
    for _ in range(count):
        ids = torch.randint(0, config.vocabulary, (batch, config.context))
        yield ids, ids.clone()


def finetune(model, config, steps=4, device="cuda"):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step, (ids, labels) in enumerate(examples(steps, config)):
        loss, _ = model(ids.to(device), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    config = Config()
    finetune(CausalLM(config).cuda().half(), config)
