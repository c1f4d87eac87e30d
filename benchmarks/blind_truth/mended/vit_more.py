"""``vit.py`` with twelve batches of training, so that gradients of four batches are accumulated and
applied again, and without torchmetrics' check of the labels, which reads values.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import vit


def loaders(batch_size: int, num_workers: int = 0, **rest: Any) -> tuple[Any, Any, Any]:
    def of(batches: int, last: int) -> Any:
        sizes = [batch_size] * batches + ([last] if last else [])
        data = [(torch.zeros(n, 3, 224, 224), torch.zeros(n, dtype=torch.long)) for n in sizes]
        return torch.utils.data.DataLoader(data, batch_size=None)

    return of(12, 0), of(2, 5000 % batch_size), of(2, 10000 % batch_size)


if __name__ == "__main__":
    vit.loaders = loaders
    name = "torchmetrics.functional.classification.stat_scores"
    scores: Any = importlib.import_module(name)
    scores._multiclass_stat_scores_tensor_validation = lambda *rest: None
    accuracy: Any = importlib.import_module("torchmetrics.classification.stat_scores")
    accuracy._multiclass_stat_scores_tensor_validation = lambda *rest: None
    vit.main(*sys.argv[1:])
