"""Pretrain a bidirectional encoder: predict the words that were masked."""

import torch
import torch.nn.functional as F
from torch import nn

MASK, SPECIAL = 4, 5


class MaskedBatches:
    """Batches of token ids in which a share of the tokens is masked, with the places of these."""

    def __init__(self, vocabulary, length, share=0.15):
        self.vocabulary, self.length, self.share = vocabulary, length, share

    def batch(self, size):
        labels = torch.randint(SPECIAL, self.vocabulary, (size, self.length))
        chosen = torch.zeros(labels.shape, dtype=torch.bool)
        count = int(self.share * self.length)
        for row in chosen:
            row[torch.randperm(self.length)[:count]] = True
        ids = labels.masked_fill(chosen, MASK)
        return ids, labels, chosen

    def __call__(self, size, batches):
        for _ in range(batches):
            yield self.batch(size)


class Encoder(nn.Module):
    def __init__(self, vocabulary, width=192, layers=3, length=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids):
        return self.layers(self.embed(ids) + self.place)


class LanguageHead(nn.Module):
    def __init__(self, vocabulary, width=192):
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, hidden):
        return self.decoder(self.transform(hidden))


class MaskedModel(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.encoder = Encoder(vocabulary)
        self.head = LanguageHead(vocabulary)

    def forward(self, ids, labels, chosen):
        hidden = self.encoder(ids)
        scores = self.head(hidden)
        scores = scores[chosen]
        return F.cross_entropy(scores, labels[chosen])


def pretrain(model, batches, steps, device="cuda"):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    total = 0.0
    for ids, labels, chosen in batches(size=16, batches=steps):
        ids, labels, chosen = ids.to(device), labels.to(device), chosen.to(device)
        loss = model(ids, labels, chosen)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


def main(vocabulary=12000):
    torch.manual_seed(0)
    model = MaskedModel(vocabulary).cuda()
    print(pretrain(model, MaskedBatches(vocabulary, length=128), steps=4))


if __name__ == "__main__":
    main()
