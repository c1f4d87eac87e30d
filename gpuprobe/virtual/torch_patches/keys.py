"""Two dispatcher keys of PyTorch that nothing else uses, and the Python kernels behind them.

A virtual device's tensors are CPU or meta tensors, so torch would never pick a CUDA kernel for
them. But a dispatch key may be added to every call of a thread. `DEVICE` carries the kernels that
handle ``device=`` arguments and the functions that take another path on CUDA; `CAST` those of
``autocast("cuda")``. Both are autocast keys of backends (Graphcore's IPU, and out-of-tree
backends) that have no kernels in PyTorch's own builds; they rank above autograd, so that what a
kernel does is differentiated like the program's own code, and they are seen from C++ code as well
as from Python.

Source: the order of keys in ``c10/core/DispatchKey.h``, the thread's included and excluded keys
in ``c10/core/impl/LocalDispatchKeySet.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._ops

from gpuprobe.patching import Patches

DEVICE = "AutocastIPU"
CAST = "AutocastPrivateUse1"

_SETS = {
    name: torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in (DEVICE, CAST)
}
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.Negative
)
_MODES = (
    _SETS[DEVICE]
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
)
_Guard = torch._C._ExcludeDispatchKeyGuard
_functorch: Any = torch._C._functorch


@contextmanager
def above() -> Iterator[None]:
    """The opposite of `below`, for parts of an operator that a dispatch mode runs one by one."""
    tls: Any = torch._C
    before = tls._dispatch_tls_is_dispatch_key_excluded(DEVICE)
    tls._dispatch_tls_set_dispatch_key_excluded(DEVICE, False)
    try:
        yield
    finally:
        tls._dispatch_tls_set_dispatch_key_excluded(DEVICE, before)


def passed_by() -> bool:
    """Whether this thread's calls pass by the `DEVICE` kernels. Torch has them do so within the
    ``__torch_dispatch__`` of a class (``pythonFallback`` in
    ``aten/src/ATen/core/PythonFallbackKernel.cpp``).
    """
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(DEVICE)
    return excluded


def below() -> Any:
    """A context in which this thread's calls pass by the `DEVICE` kernels."""
    return _Guard(_SETS[DEVICE])


def below_modes() -> Any:
    """`below`, for calls that dispatch modes are not to see either."""
    return _Guard(_MODES)


def for_kernel() -> Any:
    """`below`, for an operator of complex numbers that a dispatch mode runs. There torch passes by
    the keys of conjugate and negative views as well, which are resolved before a mode is called.
    But kernels that are made of other operators make such views of their own (``linalg_pinv``):
    without those keys, their results would be wrong without a word.
    """
    tls: Any = torch._C
    excluded = (tls._dispatch_tls_local_exclude_set() | _SETS[DEVICE]) - _VIEWS
    return tls._ForceDispatchKeyGuard(tls._dispatch_tls_local_include_set(), excluded)


def below_cast() -> Any:
    """A context in which this thread's calls pass by the `CAST` kernels."""
    return _Guard(_SETS[CAST])


def transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work in this thread."""
    return _functorch.peek_interpreter_stack() is not None


@contextmanager
def single_level() -> Iterator[None]:
    """Plain autograd functions may be applied within: a transform of ``torch.func`` has taken its
    own level off where a kernel is called.
    """
    before = _functorch.get_single_level_autograd_function_allowed()
    _functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        _functorch.set_single_level_autograd_function_allowed(before)


def include(key: str) -> None:
    """Send this thread's calls through the key's kernels."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)


def exclude(key: str) -> None:
    """Undo `include`: torch excludes autocast keys by default."""
    torch._C._dispatch_tls_set_dispatch_key_included(key, False)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def pass_by(patches: Patches) -> None:
    """Have higher-order operators (``flex_attention``, ``cond``) pass both keys by: they have no
    kernels for them, and no fallback either.
    """
    original = torch._ops._compute_keyset

    def compute(args: Any, kwargs: Any, keys: Any) -> Any:
        for name in (DEVICE, CAST):
            keys = keys.remove(getattr(torch._C.DispatchKey, name))
        return original(args, kwargs, keys)

    patches.set(torch._ops, "_compute_keyset", compute)


@functools.cache
def schemas(namespace: str) -> tuple[Any, ...]:
    """The schemas of torch's own operators: there are thousands, and sessions come often."""
    found = torch._C._jit_get_all_schemas()
    return tuple(schema for schema in found if schema.name.startswith(f"{namespace}::"))


class Kernels:
    """The kernels registered while a virtual device exists. `close` removes every one."""

    def __init__(self) -> None:
        self._aten = torch.library.Library("aten", "IMPL")
        self._any = torch.library.Library("_", "IMPL")
        for key in (DEVICE, CAST):
            self._any.fallback(torch.library.fallthrough_kernel, key)

    def add(self, name: str, kernel: Callable[..., Any], key: str) -> None:
        """Register ``kernel`` for ``name`` (``op`` or ``op.overload``) under ``key``."""
        if key == "Meta":
            # `Library.impl` does not let operators that can be taken apart have one.
            self._aten.m.impl(name, key, kernel, False)
        else:
            self._aten.impl(name, kernel, key)

    def close(self) -> None:
        self._aten._destroy()
        self._any._destroy()
