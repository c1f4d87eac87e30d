"""Finetuning ViT-L/16 in nine ways: the scripts of "Optimizing PyTorch memory usage". The pictures
are zeros of the size that the scripts make of them, four batches of training, the weights are what
they are at first.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

import torch
from figures import figure, source, stand_in


def loaders(batch_size: int, num_workers: int = 0, **rest: Any) -> tuple[Any, Any, Any]:
    def of(batches: int, last: int) -> Any:
        sizes = [batch_size] * batches + ([last] if last else [])
        data = [(torch.zeros(n, 3, 224, 224), torch.zeros(n, dtype=torch.long)) for n in sizes]
        return torch.utils.data.DataLoader(data, batch_size=None)

    return of(4, 0), of(2, 5000 % batch_size), of(2, 10000 % batch_size)


def main(script: str) -> None:
    folder = source("rasbt+pytorch-memory-optim", ".")
    import torchvision

    plain = torchvision.models.vit_l_16
    torchvision.models.vit_l_16 = functools.partial(plain, weights=None)
    torchvision.models.vit_l_16 = lambda weights=None: plain(weights=None)
    stand_in("watermark", watermark=lambda **rest: "")
    stand_in("local_utilities", get_dataloaders_cifar10=loaders)
    os.chdir(os.environ["BLIND_WORK"])
    runpy.run_path(str(folder / script), run_name="__main__")
    figure("reserved", torch.cuda.max_memory_reserved())


if __name__ == "__main__":
    main(sys.argv[1])
