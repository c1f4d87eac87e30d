"""Changes to a training run, made without editing its source, that suggestions estimate.

Each patches torch before the program runs, in a process that only runs this estimate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from gpuprobe.errors import UsageError


def apply(change: str) -> None:
    """Apply ``bf16``, ``checkpoint``, ``accumulate``, ``fused``, ``8bit`` or ``offload``, or
    several, separated by ``+``. A setting of the allocator (``expandable``) needs no change.
    """
    for part in change.split("+"):
        if part not in ("", "expandable"):
            _CHANGES[part]()


def _outermost(around: Callable[[nn.Module, Callable[[], object]], object]) -> None:
    """Call ``around`` for every module that is not called by another module."""
    original = nn.Module.__call__
    depth = 0

    @functools.wraps(original)
    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        nonlocal depth
        depth += 1
        try:
            if depth > 1:
                return original(module, *args, **kwargs)
            return around(module, lambda: original(module, *args, **kwargs))
        finally:
            depth -= 1

    nn.Module.__call__ = call


def _bf16() -> None:
    def around(module: nn.Module, run: Callable[[], object]) -> object:
        if torch.is_autocast_enabled("cuda"):
            raise UsageError("autocast is on already")
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters()):
            raise UsageError("the model is in half precision already")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return run()

    _outermost(around)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks of the outermost lists that have several blocks of one class."""
    for child in module.children():
        blocks = list(child.children())
        if (
            isinstance(child, (nn.ModuleList, nn.Sequential))
            and len(blocks) > 1
            and len({type(block) for block in blocks}) == 1
            and all(any(True for _ in block.parameters()) for block in blocks)
        ):
            yield from blocks
        else:
            yield from _repeated(child)


def _checkpoint() -> None:
    from torch.utils import checkpoint as module

    checkpoint = module.checkpoint

    def on_already(*_: object, **__: object) -> NoReturn:
        raise UsageError("activation checkpointing is on already")

    module.checkpoint = on_already  # what the program calls; its imports come later
    prepared: set[int] = set()
    found = 0

    def wrap(block: nn.Module) -> None:
        original = block.forward

        def forward(*args: object, **kwargs: object) -> object:
            if not torch.is_grad_enabled() or not block.training:
                return original(*args, **kwargs)
            return checkpoint(original, *args, use_reentrant=False, **kwargs)

        block.forward = forward

    def around(module: nn.Module, run: Callable[[], object]) -> object:
        nonlocal found
        if id(module) not in prepared:
            prepared.add(id(module))
            for block in _repeated(module):
                found += 1
                wrap(block)
            if not found and any(True for _ in module.parameters()):
                raise UsageError("the model has no list of equal blocks")
        return run()

    _outermost(around)


def _accumulate() -> None:
    """Skip every second call of ``step`` and ``zero_grad``."""
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def init(optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        original(optimizer, *args, **kwargs)
        _every_second(optimizer, "step", first=False)
        _every_second(optimizer, "zero_grad", first=True)

    torch.optim.Optimizer.__init__ = init


def _every_second(optimizer: torch.optim.Optimizer, name: str, *, first: bool) -> None:
    """Make only every second call of a method count: the ``first`` one and the third, or the second
    and the fourth.
    """
    original = getattr(type(optimizer), name)
    count = 0

    @functools.wraps(original)
    def method(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        return original(self, *args, **kwargs) if (count % 2 == 1) == first else None

    setattr(optimizer, name, MethodType(method, optimizer))


def _fused() -> None:
    import inspect

    def wrap(kind: Any) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
            if type(optimizer) is not kind:  # called by the subclass's __init__
                original(optimizer, *args, **kwargs)
                return
            if kwargs.get("fused"):
                raise UsageError("fused already")
            kwargs.pop("foreach", None)
            original(optimizer, *args, **{**kwargs, "fused": True})

        kind.__init__ = init

    for name in ("Adam", "AdamW", "SGD", "Adagrad"):
        kind = getattr(torch.optim, name)
        if "fused" in inspect.signature(kind.__init__).parameters:
            wrap(kind)


def _eight_bit() -> None:
    """Make ``Adam`` and ``AdamW`` those of bitsandbytes, with a state of 8 bits."""
    _refuse_optimizers(("8bit",), "the optimizer's state has 8 bits already")
    for original, name in ((torch.optim.Adam, "Adam8bit"), (torch.optim.AdamW, "AdamW8bit")):
        original.__new__ = staticmethod(functools.partial(_new_of_eight_bits, original, name))


def _new_of_eight_bits(original: type, name: str, kind: type, *args: object, **rest: Any) -> object:
    if kind is not original:  # a subclass has its own step
        return object.__new__(kind)
    # Not earlier: it initialises CUDA, and the program has not selected its GPU yet.
    optimizers = import_module("bitsandbytes.optim")
    rest = {key: value for key, value in rest.items() if key not in _ONLY_TORCH}
    kind = getattr(optimizers, name)
    _allowed.add(kind)
    return kind(*args, **rest)


_allowed: set[type] = set()
"""Optimizers that a change makes."""


def _refuse_optimizers(names: Sequence[str], why: str) -> None:
    """Raise UsageError where the program makes an optimizer whose class has one of these in its
    name.
    """
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def init(optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        kind = type(optimizer)
        if kind not in _allowed and any(name in kind.__name__ for name in names):
            raise UsageError(why)
        original(optimizer, *args, **kwargs)

    torch.optim.Optimizer.__init__ = init


_ONLY_TORCH = ("foreach", "fused", "capturable", "differentiable", "maximize")


def _offload() -> None:
    """Keep the optimizer's state in the host's memory, and step there: the GPU's memory is that of
    a step without parameters, as gradients and parameters are copied one at a time.
    """
    _refuse_optimizers(("Offload", "CPU"), "the optimizer is on the CPU already")
    original = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def init(optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        original(optimizer, *args, **kwargs)
        step = type(optimizer).step

        @functools.wraps(step)
        def stepped(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
            groups = [(group, group["params"]) for group in self.param_groups]
            for group, _ in groups:
                group["params"] = []
            try:
                return step(self, *args, **kwargs)
            finally:
                for group, parameters in groups:
                    group["params"] = parameters

        optimizer.step = MethodType(stepped, optimizer)

    torch.optim.Optimizer.__init__ = init


_CHANGES = {
    "bf16": _bf16,
    "checkpoint": _checkpoint,
    "accumulate": _accumulate,
    "fused": _fused,
    "8bit": _eight_bit,
    "offload": _offload,
}
