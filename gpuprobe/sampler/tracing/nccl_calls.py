"""Calls by which one process moves tensors between its GPUs with NCCL, as `torch.nn.DataParallel`
does. They are no operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from gpuprobe.patching import Patches


class NcclCall(NamedTuple):
    """What a call has read, overwritten and returned: tensors, and lists of them."""

    name: str
    read: object
    overwritten: object
    made: object


_INPUTS_AND_OUTPUTS: Final = (
    "_nccl_all_reduce",
    "_nccl_reduce",
    "_nccl_all_gather",
    "_nccl_reduce_scatter",
)
"""Functions of `torch._C` whose first two arguments these are."""


def _in_place(name: str, arguments: tuple[Any, ...], _: object) -> NcclCall:
    tensors, root = arguments[:2]
    others = [one for number, one in enumerate(tensors) if number != root]
    return NcclCall(name, tensors[root], others, ())


def _into(name: str, arguments: tuple[Any, ...], _: object) -> NcclCall:
    return NcclCall(name, arguments[0], arguments[1], ())


def _returned(name: str, arguments: tuple[Any, ...], result: object) -> NcclCall:
    return NcclCall(name, arguments[0], (), result)


_CALLS: Final[Mapping[str, Callable[[str, tuple[Any, ...], object], NcclCall]]] = {
    **dict.fromkeys(_INPUTS_AND_OUTPUTS, _into),
    "_nccl_broadcast": _in_place,
    "_broadcast_out": _into,
    "_broadcast": _returned,
    "_broadcast_coalesced": _returned,
}


def follow_nccl_calls(patches: Patches, report: Callable[[NcclCall], None]) -> None:
    """Until ``patches`` are undone, ``report`` each call when it has returned."""
    for name, described in _CALLS.items():
        if hasattr(torch._C, name):
            patches.set(torch._C, name, _reporting(name, described, report))


def _reporting(
    name: str,
    described: Callable[[str, tuple[Any, ...], object], NcclCall],
    report: Callable[[NcclCall], None],
) -> Callable[..., Any]:
    original = getattr(torch._C, name)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if len(arguments) > 1:  # as torch passes them
            report(described(name.removeprefix("_"), arguments, result))
        return result

    return call
