"""The memory and parts of a tensor, beyond torch's Python methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

_keys = torch._C._dispatch_keys
# The bit of a tensor's dispatch keys by which one without memory differs from one on the host.
_WITHOUT_MEMORY: Final = (
    _keys(torch.empty(0, device="meta")).raw_repr()
    & ~_keys(torch.empty(0, device="cpu")).raw_repr()
)


_Set: Final = torch._C.DispatchKeySet
_Key: Final = torch._C.DispatchKey
# The bits of sparse layouts: of coordinates, and of compressed rows or columns.
_SPARSE: Final = (_Set(_Key.SparseCPU) | _Set(_Key.SparseCsrCPU)).raw_repr() & ~_Set(
    _Key.CPU
).raw_repr()


def _plain(device: str) -> frozenset[int]:
    kinds = [torch.empty(0, device=device)]
    with torch.inference_mode():
        kinds.append(torch.empty(0, device=device))
    return frozenset(_keys(tensor).raw_repr() for tensor in kinds)


PLAIN_ON_HOST: Final = _plain("cpu")
PLAIN_WITHOUT_MEMORY: Final = _plain("meta")
"""The dispatch keys, as returned by `keys_of`, of tensors that are strided memory, or have none,
and nothing more: not sparse, quantised or nested, no lazy conjugate, no wrapper around another."""


def keys_of(tensor: torch.Tensor) -> int:
    """A tensor's dispatch keys, as a number for comparison."""
    return int(_keys(tensor).raw_repr())


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory. A mode (``with torch.device(...)``) or a subclass may handle
    ``Tensor.is_meta`` as one of torch's functions.
    """
    return bool(_keys(tensor).raw_repr() & _WITHOUT_MEMORY)


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a sparse layout, whatever a subclass returns for ``layout``."""
    return bool(_keys(tensor).raw_repr() & _SPARSE)


def is_meta_and_sparse(tensor: torch.Tensor) -> tuple[int, int]:
    """`is_meta` and `is_sparse` at once, for every operator: 0 means no."""
    keys = _keys(tensor).raw_repr()
    return keys & _WITHOUT_MEMORY, keys & _SPARSE


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


def of_parts(
    tensor: torch.Tensor, made: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """A sparse tensor like ``tensor``, but with other `parts`, which are on ``device``."""
    values, *indices = made
    aten = torch.ops.aten
    if tensor.layout is torch.sparse_coo:
        return aten._sparse_coo_tensor_with_dims_and_tensors.default(
            tensor.sparse_dim(),
            tensor.dense_dim(),
            tensor.size(),
            indices[0],
            values,
            dtype=values.dtype,
            layout=tensor.layout,
            device=device,
            is_coalesced=tensor.is_coalesced(),
        )
    return aten._sparse_compressed_tensor_unsafe.default(
        *indices, values, tensor.size(), dtype=values.dtype, layout=tensor.layout, device=device
    )


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
