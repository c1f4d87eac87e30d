"""The backward pass in place: what the engine does out of place while a mode watches it."""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from gpuprobe.virtual.dispatch.calls import Call, OperatorRow


def at_its_end(call: Call, tensor: Any, references: int) -> bool:
    """Whether nobody but this call holds the tensor's memory: one tensor has it, densely.

    Counted are the storage's owners (this tensor, and the Python object of the storage that the
    virtual machine's weak reference made), and the tensor's: ``references`` is how many a tensor
    has that only the engine holds, seen from here.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    tag = call.machine.tags.get(storage._cdata)
    if tag is None or tag.block is None:
        return False
    if torch._C._storage_Use_Count(storage._cdata) > 2:
        return False
    # Python code of the program's own may still hold the tensor itself.
    if sys.getrefcount(tensor) > references:
        return False
    return bool(tensor.numel() * tensor.element_size() == storage.nbytes())


# The argument tuple, this module's parameters and variables, and getrefcount's own argument.
_SUMMED: Final = 7
_FIRST: Final = 4


def _in_backward() -> bool:
    return torch._C._current_autograd_node() is not None


def _sum(call: Call) -> Any:
    """``InputBuffer::accumulate``: the older gradient first, then the new one."""
    if not _in_backward() or call.kwargs.get("alpha", 1) != 1 or len(call.args) < 2:
        return None
    first, second = call.args[:2]
    if not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return None
    for tensor in (first, second):
        if at_its_end(call, tensor, _SUMMED):
            return tensor
    return None


def _note_zeros(call: Call) -> None:
    """Remember which node of the backward pass made them."""
    node = torch._C._current_autograd_node()
    if node is not None:
        tag = call.machine.tag_of(call.result)
        if tag is not None:
            tag.zeroed = node._sequence_nr()


def into_first(call: Call) -> Any:
    """Formulas that write into the zeros they just made, not those that change a gradient."""
    node = torch._C._current_autograd_node()
    if node is None or not call.args:
        return None
    tag = call.machine.tag_of(call.args[0])
    if tag is None or tag.zeroed != node._sequence_nr():
        return None
    return call.args[0] if at_its_end(call, call.args[0], _FIRST) else None


_FORMULA: Final = "torch/csrc/autograd/FunctionsManual.cpp: areAnyTensorSubclassLike"

ROWS: Final = (
    OperatorRow(
        "add.Tensor",
        "gradients are accumulated in place, into the first one without other references",
        "torch/csrc/autograd/input_buffer.cpp: accumulate",
        reuse=_sum,
    ),
    *(
        OperatorRow(
            name,
            "in the backward pass: into the zeros that the same formula made",
            _FORMULA,
            reuse=into_first,
        )
        for name in ("scatter.src", "scatter_add", "index_add", "put")
    ),
    *(
        OperatorRow(
            name,
            "no extra memory: zeros made by the backward pass are kept",
            _FORMULA,
            _note_zeros,
        )
        for name in ("zeros", "new_zeros", "zeros_like")
    ),
)
