"""Recurrent networks, a recommender, and plain layers of exact sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .language import token_loss, tokens
from .training import Work
from .vision import labels, noise


class LanguageLSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, depth, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.tokens(ids)))
        return self.head(self.dropout(hidden))


def lstm(
    *, vocabulary: int = 10000, width: int = 650, depth: int = 2, batch: int, length: int
) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        ids = tokens(vocabulary, batch, length + 1, seed=step)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    model = LanguageLSTM(vocabulary, width, depth, 0.5)
    return Work(model, data, lambda model, ids, next_ids: token_loss(model(ids), next_ids))


class SpeechGRU(nn.Module):
    """Two directions over frames, then connectionist temporal classification."""

    def __init__(self, features: int, width: int, depth: int, symbols: int) -> None:
        super().__init__()
        self.gru = nn.GRU(features, width, depth, batch_first=True, bidirectional=True)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.gru(x)
        return self.head(self.norm(hidden))


def gru(
    *,
    features: int = 80,
    width: int = 512,
    depth: int = 3,
    symbols: int = 64,
    batch: int,
    length: int,
) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        wanted = tokens(symbols - 1, batch, length // 8, seed=step) + 1
        return noise(batch, length, features, seed=step), wanted

    def loss(model: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
        scores = model(x).float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        wanted_lengths = torch.full((x.shape[0],), wanted.shape[1], dtype=torch.long)
        return F.ctc_loss(scores, wanted, lengths, wanted_lengths)

    return Work(SpeechGRU(features, width, depth, symbols), data, loss)


class Recommender(nn.Module):
    """DLRM style: one table per kind of category, pairwise products, two small networks."""

    def __init__(
        self, rows: tuple[int, ...], width: int, numbers: int, sparse: bool, bags: bool
    ) -> None:
        super().__init__()
        if bags:
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(count, width, mode="sum", sparse=sparse) for count in rows
            )
        else:
            self.tables = nn.ModuleList(nn.Embedding(count, width, sparse=sparse) for count in rows)
        self.bottom = nn.Sequential(
            nn.Linear(numbers, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU()
        )
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU()
        )
        self.out = nn.Linear(256, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(numbers)
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        found = [part.sum(1) if part.dim() == 3 else part for part in found]
        parts = torch.stack([x, *found], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        row, column = torch.tril_indices(parts.shape[1], parts.shape[1], -1, device=x.device)
        return self.out(self.top(torch.cat((x, products[:, row, column]), 1))).squeeze(1)


def recommender(
    *,
    rows: tuple[int, ...] = (1_000_000, 500_000, 200_000, 50_000, 10_000, 1_000, 100, 10),
    width: int = 64,
    batch: int,
    hot: int = 4,
    sparse: bool = False,
    bags: bool = False,
) -> Work:
    def data(step: int) -> tuple[Tensor, ...]:
        kinds = [tokens(count, batch, hot, seed=step + i) for i, count in enumerate(rows)]
        return noise(batch, 13, seed=step), torch.stack(kinds, 1), labels(2, batch, step).float()

    model = Recommender(rows, width, 13, sparse, bags)
    return Work(
        model,
        data,
        lambda model, x, kinds, y: F.binary_cross_entropy_with_logits(model(x, kinds), y),
    )


def mlp(*, width: int, depth: int = 3, batch: int, extra: int = 0) -> Work:
    """Layers whose activations have exactly ``batch * width + extra`` times 4 bytes (``extra``
    is added to the last dimension by a padding), to meet the allocator's thresholds.
    """

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.gelu(layer(x))
            return F.pad(x.flatten(), (0, extra)).tanh().sum()

    def data(step: int) -> tuple[Tensor, ...]:
        return (noise(batch, width, seed=step),)

    return Work(Padded(), data, lambda model, x: model(x))
