"""Answer many questions about one document: its keys and values are computed once."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, cache, start):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keys, values = cache
        keys[:, :, start : start + length] = k
        values[:, :, start : start + length] = v
        end = start + length
        attended = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end])
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Reader(nn.Module):
    def __init__(self, vocabulary=3000, width=256, heads=8, layers=6):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def new_cache(self, length):
        shape = (1, self.heads, length, self.size)
        device = self.head.weight.device
        return [
            (torch.empty(shape, device=device), torch.empty(shape, device=device))
            for _ in self.attention
        ]

    def forward(self, ids, cache, start):
        x = self.embed(ids)
        for attention, mlp, layer in zip(self.attention, self.mlp, cache):
            x = x + attention(x, layer, start)
            x = x + mlp(x)
        return self.head(x[:, -1])


class DocumentSession:
    def __init__(self, model, document, room):
        self.model, self.used = model, document.shape[1]
        self.cache = model.new_cache(self.used + room)
        for start in range(0, self.used, 512):
            model(document[:, start : start + 512], self.cache, start)

    def answer(self, question, tokens=4):
        start, ids, words = self.used, question, []
        for _ in range(tokens):
            logits = self.model(ids, self.cache, start)
            start += ids.shape[1]
            ids = logits.argmax(-1, keepdim=True)
            words.append(ids.item())
        return words


@torch.inference_mode()
def main():
    torch.manual_seed(0)
    model = Reader().cuda().eval()
    document = torch.randint(0, 3000, (1, 4096), device="cuda")
    session = DocumentSession(model, document, room=64)
    for number in range(4):
        question = torch.randint(0, 3000, (1, 24), device="cuda")
        print(number, session.answer(question))


if __name__ == "__main__":
    main()
