"""The memory and parts of a tensor, beyond torch's Python methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

_keys = torch._C._dispatch_keys
# The bit of a tensor's dispatch keys by which one without memory differs from one on the host.
_WITHOUT_MEMORY: Final = (
    _keys(torch.empty(0, device="meta")).raw_repr()
    & ~_keys(torch.empty(0, device="cpu")).raw_repr()
)

ADDRESS_SPACE: Final = 1 << 47
"""Bytes: user space of x86-64 and AArch64 Linux with addresses of 48 bits."""


def spans_memory(nbytes: int) -> bool:
    """Whether a storage of that size is one of the simulated GPU's, which owns no memory: tensors
    on the CPU are windows on it.
    """
    return nbytes > ADDRESS_SPACE // 2


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory. A mode (``with torch.device(...)``) or a subclass may handle
    ``Tensor.is_meta`` as one of torch's functions.
    """
    return bool(_keys(tensor).raw_repr() & _WITHOUT_MEMORY)


def is_without_gaps(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are contiguous, in any order of its dimensions, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


_functorch: Any = torch._C._functorch
_COMPRESSED: Final = {
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of a tensor without its own storage: a sparse one's values and indices, or the
    tensor that a transform of ``torch.func`` has wrapped. Empty if it has no parts.
    """
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return (_functorch.get_unwrapped(tensor),)
    layout = tensor.layout
    if layout is torch.strided:
        return ()
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        if layout is torch.sparse_coo:
            return tensor._values(), tensor._indices()
        if layout in _COMPRESSED:
            return tensor.values(), *(part(tensor) for part in _COMPRESSED[layout])
    return ()


def tensors_in(value: object, depth: int = -1) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and values of dicts at any depth; or ``depth`` levels deep, for
    values that the program has made.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage as long as it is alive; 0 for layouts without storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def size_of(tensor: torch.Tensor) -> int:
    """The bytes of memory that a strided tensor's elements take: of an expanded dimension one."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
        elif not size:
            return 0
    return count
