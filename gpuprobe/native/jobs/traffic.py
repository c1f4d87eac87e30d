"""What a rank sends, as torch's dispatcher sees it: collectives of Python and of C++ code (DDP's
reducer), in the backward pass too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.torch_support.traffic import OPERATORS, Traffic

_KEY = "BackendSelect"
"""A dispatch key of every call, above all kernels of collectives, that has no kernel for them:
``default_included_set`` in ``c10/core/DispatchKeySet.h``."""


class _Depth(threading.local):
    calls = 0


def install(patches: Patches, sent: Traffic) -> None:
    """Note the outermost collective of each call in ``sent``."""
    from torch.distributed import _functional_collectives  # noqa: F401 - it defines operators

    depth = _Depth()
    after: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for space, names in OPERATORS.items():
        library = torch.library.Library(space, "IMPL")
        patches.add(library._destroy)
        for name in names:
            packet = getattr(getattr(torch.ops, space), name, None)
            if packet is not None:  # some versions of torch lack it
                library.impl(
                    name, _noting(packet.default, sent, depth, after), _KEY, with_keyset=True
                )


def _noting(func: Any, sent: Traffic, depth: _Depth, after: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        depth.calls += 1
        try:
            found = func.redispatch(keys & after, *args, **kwargs)
        finally:
            depth.calls -= 1
        if not depth.calls:
            first = next(tensors_in((args, found)), None)
            on_host = first is not None and first.device.type == "cpu"
            sent.note(func, args, kwargs, found, on_host)
        return found

    return kernel
