"""Runs Triton kernels that a program launches in Triton's interpreter: their values, computed on
the host.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from gpuprobe.patching import Patches

JIT: Final = "triton.runtime.jit"


class _Local(threading.local):
    interpreting = False


_local = _Local()


def interpret(kernel: Any, grid: Any, given: Mapping[str, Any]) -> None:
    """Run a kernel, a ``triton.JITFunction``, on tensors of the CPU. ``given``: its arguments by
    name. Raises what the interpreter raises.
    """
    from triton.runtime.interpreter import InterpretedFunction

    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    given = {
        name: _scalar(value) if type(value) is float and name not in constants else value
        for name, value in given.items()
    }
    before, _local.interpreting = _local.interpreting, True
    try:
        with _language_restored(), _device_functions(kernel):
            InterpretedFunction(kernel.fn).run(grid=grid, warmup=False, **given)
    finally:
        _local.interpreting = before


def _scalar(value: float) -> Any:
    """The tensor that a ``float`` argument becomes in a kernel; the interpreter passes it
    unchanged.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


def patch_helpers(patches: Patches) -> None:
    """Interpret kernels' helpers within a kernel that is interpreted. Triton must be imported."""
    jit: Any = sys.modules[JIT]
    call: Callable[..., Any] = jit.JITFunction.__call__

    @functools.wraps(call)
    def called(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not _local.interpreting:
            return call(kernel, *args, **kwargs)
        from triton.runtime import interpreter

        scope = interpreter._patch_lang(kernel.fn)  # which a call of the interpreter's leaves so
        try:
            with _device_functions(kernel):
                return interpreter.InterpretedFunction(kernel.fn)(*args, **kwargs)
        finally:
            if scope is not None:  # early versions restore nothing
                scope.restore()

    patches.set(jit.JITFunction, "__call__", called)


def _device_function(function: Any, *args: Any) -> Any:
    import triton.language as tl

    if function.__name__ == "tanh":
        return 2 * tl.sigmoid(2 * args[0]) - 1
    found = getattr(tl.math, function.__name__, None)
    if found is None:
        raise NotImplementedError(f"libdevice.{function.__name__}")
    return found(*args)


@contextmanager
def _device_functions(kernel: Any) -> Iterator[None]:
    """CUDA's libdevice within ``kernel``: the interpreter does not have it, so that its functions
    return None (Triton 3.7, ``triton/language/extra/libdevice.py``).
    """
    names = kernel.fn.__globals__
    before = {
        name: value
        for name, value in names.items()
        if getattr(value, "__module__", "").startswith("triton.language.extra")
    }
    for name, value in before.items():
        names[name] = functools.partial(_device_function, value)
    try:
        yield
    finally:
        names.update(before)


@contextmanager
def _language_restored() -> Iterator[None]:
    """Restore what the interpreter replaces in ``triton.language`` and leaves there (Triton 3.2 and
    3.5, ``_patch_lang`` in ``triton/runtime/interpreter.py``): otherwise no kernel could be
    compiled.
    """
    language: Any = sys.modules["triton.language"]
    core = language.core
    owners = [language, core, language.math]
    owners += [
        kind
        for kind in vars(core).values()
        if isinstance(kind, type) and kind.__module__ == core.__name__
    ]
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in zip(owners, before, strict=True):
            for name, value in list(vars(owner).items()):
                if name not in attributes:
                    delattr(owner, name)
                elif value is not attributes[name]:
                    setattr(owner, name, attributes[name])
