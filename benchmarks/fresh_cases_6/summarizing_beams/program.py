"""Summaries by beam search: the decoder reads the article through cross-attention."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x):
        return x.view(x.shape[0], -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)

    def remember(self, memory):
        return self.split(self.k(memory)), self.split(self.v(memory))

    def forward(self, x, cached):
        keys, values = cached
        attended = F.scaled_dot_product_attention(self.split(self.q(x)), keys, values)
        return self.out(attended.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.cross = CrossAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, cached):
        x = x + self.cross(self.norm_1(x), cached)
        return x + self.mlp(self.norm_2(x))


class Summarizer(nn.Module):
    def __init__(self, vocabulary=4000, width=256, heads=8, layers=4):
        super().__init__()
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def step(self, tokens, caches):
        x = self.embed(tokens[:, -1:])
        for layer, cached in zip(self.decoder, caches):
            x = layer(x, cached)
        return self.head(x[:, -1]).log_softmax(-1)


@torch.no_grad()
def beam_search(model, articles, beams, length):
    batch = articles.shape[0]
    memory = model.encoder(model.embed(articles))
    memory = memory.repeat_interleave(beams, dim=0)
    caches = [layer.cross.remember(memory) for layer in model.decoder]
    del memory
    tokens = torch.zeros(batch * beams, 1, dtype=torch.long, device=articles.device)
    scores = torch.zeros(batch, beams, device=articles.device)
    for _ in range(length):
        log_probs = model.step(tokens, caches).view(batch, beams, -1)
        total = (scores.unsqueeze(-1) + log_probs).flatten(1)
        scores, picks = total.topk(beams, dim=1)
        rows = picks // model.vocabulary + torch.arange(batch, device=picks.device)[:, None] * beams
        chosen = (picks % model.vocabulary).view(-1, 1)
        tokens = torch.cat([tokens[rows.view(-1)], chosen], dim=1)
    return tokens.view(batch, beams, -1)[:, 0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--beams", type=int, default=8)
    parser.add_argument("--articles", type=int, default=4)
    parser.add_argument("--length", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Summarizer().cuda().eval()
    for _ in range(2):
        articles = torch.randint(0, 4000, (args.articles, 512), device="cuda")
        print(beam_search(model, articles, args.beams, args.length).shape)


if __name__ == "__main__":
    main()
