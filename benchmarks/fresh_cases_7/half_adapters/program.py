"""Low-rank adapters in float32 on a bfloat16 base: uses more than training all of it."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class LoraLayer(nn.Module):
    def __init__(self, base, r=8):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, r, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(r, base.out_features, bias=False, dtype=torch.float32)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        result = self.base_layer(x)
        x = x.to(self.lora_A.weight.dtype)
        return result + self.lora_B(self.lora_A(x)).to(result.dtype)


class Llama(nn.Module):
    def __init__(self, vocabulary=1000, width=512, depth=6):
        super().__init__()
        kind = torch.bfloat16
        self.embed = nn.Embedding(vocabulary, width, dtype=kind)
        self.up = nn.ModuleList(nn.Linear(width, width, dtype=kind) for _ in range(depth))
        self.lm_head = nn.Linear(width, vocabulary, dtype=kind)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.up:
            x = x + F.silu(layer(x))
        return self.lm_head(x)


def inject(model, r):
    model.requires_grad_(False)
    for i, layer in enumerate(model.up):
        model.up[i] = LoraLayer(layer, r)
    return model


def main():
    torch.manual_seed(0)
    model = inject(Llama(), r=8).cuda()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for step in range(4):
        tokens = torch.randint(0, 1000, (8, 512)).cuda()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())


if __name__ == "__main__":
    main()
