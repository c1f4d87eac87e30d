"""When an event of CUDA ends."""

from __future__ import annotations

from typing import Any, Final

import torch

_NAME: Final = "_gpuprobe_lifetime"


class _Lifetime:
    """An attribute of an event, which ends with it."""

    __slots__ = ("__weakref__",)


def _leaves_references() -> bool:
    """Whether a weak reference to an event of CUDA outlives it: those of torch 2.10 to 2.12 are
    freed without clearing it, so that the next use of it, by the garbage collector too, reads freed
    memory (`torch.Event` can be referenced weakly from 2.10 on, and the destructor of its subclass
    `torch._C._CudaEventBase` does it from 2.13 on).
    """
    major, minor = map(int, torch.__version__.split(".")[:2])
    return (2, 10) <= (major, minor) <= (2, 12)


_LEAVES_REFERENCES: Final = _leaves_references()


def lifetime_of(event: Any) -> Any:
    """What can be referenced weakly to learn when an event ends: itself, or an attribute of it. The
    same object each time. Raises TypeError where there is neither: a `torch.Event` before 2.10.
    """
    if not _LEAVES_REFERENCES or not isinstance(event, torch.cuda.Event):
        return event
    found = event.__dict__.get(_NAME)
    if found is None:
        found = event.__dict__[_NAME] = _Lifetime()
    return found
