"""CPU tensors over the memory of tensors on the device, which is memory of this process."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from gpuprobe.torch_support.tensors import ADDRESS_SPACE

_BEGIN: Final = 1 << 12
CPU: Final = torch.device("cpu")
_as_strided = torch.as_strided
_make = torch._C._construct_storage_from_data_pointer


class Aliases:
    """Makes CPU tensors at given addresses.

    They are windows on one storage that spans the address space, so that making one costs one
    call and keeps nothing alive: it is valid as long as the memory is. Its storage is never
    resized.
    """

    def __init__(self) -> None:
        self._space = _make(_BEGIN, CPU, ADDRESS_SPACE - _BEGIN)
        self._bases: dict[torch.dtype, tuple[Any, int]] = {}

    def _base(self, dtype: torch.dtype) -> tuple[Any, int]:
        found = torch.empty(0, dtype=dtype, device=CPU)
        found.set_(self._space, 0, (0,), (1,))
        self._bases[dtype] = found, found.element_size()
        return self._bases[dtype]

    def of(self, tensor: Tensor) -> Any:
        """The CPU tensor of the same bytes, shape and strides. Call it below autograd."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            return self._without_data(tensor)
        if not address:
            if tensor._is_zerotensor():
                return torch.zeros((), dtype=tensor.dtype, device=CPU).expand(tensor.size())
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU
            )
        dtype = tensor.dtype
        base, size = self._bases.get(dtype) or self._base(dtype)
        made = _as_strided(base, tensor.size(), tensor.stride(), (address - _BEGIN) // size)
        if tensor.is_conj():
            made = torch._conj(made)
        return torch._neg_view(made) if tensor.is_neg() else made

    def exact(self, tensor: Tensor) -> Any:
        """Like `of`, on a CPU storage that begins and ends where the tensor's storage does."""
        storage = tensor.untyped_storage()
        if tensor.layout is not torch.strided or not storage.nbytes():
            return self.of(tensor)
        made = torch.empty(0, dtype=tensor.dtype, device=CPU)
        return made.set_(
            _make(storage.data_ptr(), CPU, storage.nbytes()),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )

    def _without_data(self, tensor: Tensor) -> Any:
        layout = tensor.layout
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                self.of(tensor._indices()),
                self.of(tensor._values()),
                tensor.size(),
                device=CPU,
                check_invariants=False,
                is_coalesced=tensor.is_coalesced(),
            )
        if layout in COMPRESSED:
            outer, inner = compressed_indices(tensor)
            return torch.sparse_compressed_tensor(
                self.of(outer),
                self.of(inner),
                self.of(tensor.values()),
                tensor.size(),
                dtype=tensor.dtype,
                layout=layout,
                device=CPU,
                check_invariants=False,
            )
        raise NotImplementedError(f"a tensor of layout {layout}")


COMPRESSED: Final = frozenset(
    {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def compressed_indices(tensor: Tensor) -> tuple[Any, Any]:
    """The two index tensors of a compressed sparse tensor."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def parts_of(tensor: Tensor) -> tuple[Any, ...]:
    """The tensors that hold the data of one: itself, or the indices and values of a sparse one."""
    layout = tensor.layout
    if layout is torch.strided:
        return (tensor,)
    if layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if layout in COMPRESSED:
        return (*compressed_indices(tensor), tensor.values())
    return ()
