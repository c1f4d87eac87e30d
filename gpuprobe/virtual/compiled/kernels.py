"""Operators of compiled graphs that the host is to compute in another way than its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch._inductor.inductor_prims

_aten = torch.ops.aten


def native_dropout(tensor: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """As the host's ``dropout`` draws and rounds."""
    if train is False or not 0.0 < p < 1.0:
        return _aten.native_dropout.default(tensor, p, train)
    mask = torch.empty_like(tensor).bernoulli_(1 - p)
    return tensor * mask.div(1 - p), mask.bool()


def random(size: Any, seed: Any, mode: str, *, align_dtype: Any = None) -> Any:
    """``inductor_random``: the same numbers for the same seed."""
    generator = torch.Generator().manual_seed(int(seed))
    return getattr(torch, mode)(size, generator=generator, dtype=torch.float32)


def randint(low: int, high: int, size: Any, seed: Any) -> Any:
    """``inductor_randint``."""
    generator = torch.Generator().manual_seed(int(seed))
    return torch.randint(low, high, size, generator=generator)


ON_HOST: Final[dict[Any, Callable[..., Any]]] = {
    torch.ops.prims.inductor_random.default: random,
    torch.ops.prims.inductor_randint.default: randint,
    _aten.native_dropout.default: native_dropout,
}
"""By the operator that a graph calls."""
