"""Operators that torch's C++ code makes of others, where a dispatch mode does not see them: those
whose parts take memory of their own, in Python, so that each part is run and charged by itself.

Most have one kernel for all devices (``CompositeExplicitAutograd`` in ``native_functions.yaml``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

_MEAN, _SUM = 1, 2  # at::Reduction


def binary_cross_entropy_with_logits(
    given: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> Any:
    """Source: ``aten/src/ATen/native/Loss.cpp``."""
    logarithm = torch.nn.functional.logsigmoid(given)
    if pos_weight is not None:
        factor = (pos_weight - 1).mul(target).add_(1)
        logarithm.mul_(factor)
        del factor
    loss = (1 - target).mul_(given).sub_(logarithm)
    if weight is not None:
        loss.mul_(weight)
    if reduction == _MEAN:
        return loss.mean()
    return loss.sum() if reduction == _SUM else loss


def logsumexp(given: Any, dims: Sequence[int], keepdim: bool = False) -> Any:
    """Source: ``logsumexp_out_impl`` in ``aten/src/ATen/native/ReduceOps.cpp``."""
    if not given.is_floating_point() or not given.numel() or not dims:
        return NotImplemented
    largest = torch.amax(given, dims, keepdim=True)
    kept = largest if keepdim else largest.squeeze(tuple(dims))
    kept.masked_fill_(kept.abs() == math.inf, 0)
    result = (given - largest).exp_().sum(dims, keepdim)
    return result.log_().add_(kept)


def euclidean_distances(first: Any, second: Any) -> Any:
    """``_euclidean_dist`` in ``aten/src/ATen/native/Distance.cpp``, as ``cdist`` uses it for many
    rows.
    """
    norms, ones = [], []
    for item in (first, second):
        norms.append(item.pow(2).sum(-1, keepdim=True))
        ones.append(torch.ones_like(norms[-1], memory_format=torch.contiguous_format))
    left = torch.cat([first.mul(-2), norms[0], ones[0]], -1)
    del norms[0], ones[0]  # moved into the list that is concatenated
    right = torch.cat([second, ones[0], norms[0]], -1)
    del norms, ones
    return left.matmul(right.mT).clamp_min_(0).sqrt_()


def roll(given: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """One dimension after the other: ``roll_common`` in
    ``aten/src/ATen/native/TensorTransformations.h``.
    """
    if len(dims) < 2 or len(shifts) != len(dims):
        return NotImplemented
    first = torch.roll(given, shifts[0], dims[0])
    return torch.roll(first, tuple(shifts[1:]), tuple(dims[1:]))


def isinf(given: Any) -> Any:
    """Source: ``aten/src/ATen/native/TensorCompare.cpp``."""
    return given.abs() == math.inf if given.is_floating_point() else NotImplemented


PARTS: Final[dict[str, Callable[..., Any]]] = {
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "logsumexp": logsumexp,
    "_euclidean_dist": euclidean_distances,
    "isinf": isinf,
    "roll": roll,
}
"""Called with the arguments of the operator; NotImplemented: it is run as a whole."""
