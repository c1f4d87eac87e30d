"""Tensors on the device that processes send each other: whether their values are known goes along.

They are one memory. A process that writes values there which it does not compute notes that: the
others read what the memory held.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch.multiprocessing import reductions

from gpuprobe.patching import Patches

_KINDS: Final = (torch.Tensor, torch.nn.Parameter)

_knowledge: Any = None
"""Of this process, while its values are computed as far as they are affordable."""


def follow(knowledge: Any, patches: Patches) -> None:
    """Send whether tensors are known, and take it over for those that are received."""
    global _knowledge
    before: Callable[[Any], Any] = reductions.reduce_tensor
    _knowledge = knowledge

    def reduce_tensor(tensor: Any) -> Any:
        known = not tensor.is_cuda or knowledge.known(tensor)
        rebuild, arguments = before(tensor)
        if not tensor.is_cuda:
            return rebuild, arguments
        knowledge.share(tensor)
        return received, (known, rebuild, arguments)

    def register(function: Callable[[Any], Any]) -> None:
        for kind in _KINDS:
            ForkingPickler.register(kind, function)

    register(reduce_tensor)
    patches.add(lambda: register(before))
    patches.add(_end)


def _end() -> None:
    global _knowledge
    _knowledge = None


def received(known: bool, rebuild: Callable[..., Any], arguments: Any) -> Any:
    """The tensor that another process has sent."""
    tensor = rebuild(*arguments)  # the first use of the GPU begins to compute values here
    if _knowledge is not None:
        _knowledge.share(tensor)
        if known:
            _knowledge.learn(tensor)
        else:
            _knowledge.forget_silently(tensor)
    return tensor
