"""``tensor[key]`` and ``tensor[key] = value`` with numbers and slices, without the operators.

Programs read and fill tensors element by element in loops: a mask, a table, the steps of a
sequence. C++ code makes two to five operators of each such line (``applySlicing`` and ``copy_to``
in ``torch/csrc/autograd/python_variable_indexing.cpp``): views, which have no memory of their own,
and a ``copy_`` or ``fill_`` that allocates nothing where both tensors lie in one place. So only
autograd has to know of them, and where values are `known`, they are written.

What is watched takes the usual way: under a hazard watch, while a graph is captured, where a
budget counts operators, within other modes and transforms of ``torch.func``. So do indices that
are tensors or masks, copies from place to place, and what is sparse, nested or has a lazy
conjugate.
"""

from __future__ import annotations

from types import EllipsisType, NoneType
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import PLAIN_ON_HOST, PLAIN_WITHOUT_MEMORY, keys_of
from gpuprobe.virtual.machine import Machine, Tag
from gpuprobe.virtual.reads import known
from gpuprobe.virtual.torch_patches.keys import below_modes

_Tensor: Final = torch.Tensor
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_NUMBERS: Final = (bool, int, float, complex)
_PARTS: Final = (int, slice, NoneType, EllipsisType)
_ENDS: Final = (int, NoneType)
_modes = torch._C._len_torch_dispatch_stack
_function_modes: Any = torch._C._len_torch_function_stack
_transform: Any = torch._C._functorch.peek_interpreter_stack
_get = torch._C.TensorBase.__getitem__
_set = torch._C.TensorBase.__setitem__


def install(machine: Machine, patches: Patches) -> None:
    """Replace both methods of ``torch.Tensor``."""
    local = machine.local
    original_get, original_set = _Tensor.__getitem__, _Tensor.__setitem__

    def unwatched() -> bool:
        """Whether nobody is to be told of operators."""
        return (
            machine.unwatched
            and not machine.closed
            and _modes() == 1
            and not _function_modes()
            and not local.inside
            and not local.paused
            and not local.standing_in
            and local.new_place is None
            and _transform() is None
            and forward_ad._current_level < 0
            and (machine.tracing is None or not machine.tracing.under_way())
        )

    def getitem(tensor: Any, key: Any) -> Any:
        if type(tensor) in _PLAIN and _is_basic(key) and unwatched():
            keys = keys_of(tensor)
            if keys in PLAIN_WITHOUT_MEMORY or (
                keys in PLAIN_ON_HOST and not _is_lost(machine, tensor)
            ):
                with below_modes():
                    return _get(tensor, key)
        return original_get(tensor, key)

    def setitem(tensor: Any, key: Any, value: Any) -> None:
        if not (
            type(tensor) in _PLAIN
            and _is_basic(key)
            and (type(value) in _NUMBERS or type(value) in _PLAIN)
            and unwatched()
            and assigned(tensor, key, value)
        ):
            if type(value) in _NUMBERS and _transform() is not None and not _is_basic(key):
                # C++ code makes a tensor of the number, like this one. A transform (`vmap`) has
                # made another of it by the time that it is assigned.
                value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
            original_set(tensor, key, value)

    def assigned(tensor: Any, key: Any, value: Any) -> bool:
        """Whether it was done here."""
        keys = keys_of(tensor)
        if (keys not in PLAIN_WITHOUT_MEMORY and keys not in PLAIN_ON_HOST) or (
            tensor.is_inference()  # it has no version to be counted
        ):
            return False
        tag = machine.tag_of(tensor)
        given: Tag | None = None
        if type(value) not in _NUMBERS:
            given = machine.tag_of(value)
            if keys_of(value) != keys or _place(given) != _place(tag):
                return False
            if given is not None and given.lost:
                return False
        if keys in PLAIN_ON_HOST:
            if tag is not None and tag.lost:
                return False
            with below_modes():
                _set(tensor, key, value)
            return True
        if tag is None or (given is None and type(value) not in _NUMBERS):
            return False
        return _assigned(tag, tensor, key, given, value)

    patches.set(_Tensor, "__getitem__", getitem)
    patches.set(_Tensor, "__setitem__", setitem)


def _is_basic(key: Any) -> bool:
    """Whether a key makes a view, without values of a tensor."""
    kind = type(key)
    if kind is int:
        return True
    for part in key if kind is tuple else (key,):
        kind = type(part)
        if kind not in _PARTS:
            return False
        if kind is slice and not (
            type(part.start) in _ENDS and type(part.stop) in _ENDS and type(part.step) in _ENDS
        ):
            return False
    return True


def _is_lost(machine: Machine, tensor: Any) -> bool:
    tag = machine.tag_of(tensor)
    return tag is not None and tag.lost


def _place(tag: Tag | None) -> int:
    """Of all that lies on the host, -1."""
    return -1 if tag is None else max(tag.place, -1)


def _assigned(tag: Tag, tensor: Any, key: Any, given: Tag | None, value: Any) -> bool:
    """Assign to a tensor without memory, of which values may be `known`. Returns whether that was
    done: not where a tensor of which nothing is known may be overwritten as a whole.
    """
    unknown = given is not None and given.values is None
    if tag.values is None:
        with below_modes():
            if not unknown and _nbytes(_get(tensor, key)) == tag.nbytes:
                return False
            _set(tensor, key, value)
        return True
    recorded = torch.is_grad_enabled() and (
        tensor.requires_grad or (given is not None and value.requires_grad)
    )
    with below_modes():
        if unknown or recorded:
            _set(tensor, key, value)
        if unknown:
            known.drop(tag)
            return True
        _set(
            known.kept_window(tag, tensor),
            key,
            value if given is None else known.kept_window(given, value),
        )
    if not recorded:
        increment_version(tensor)
    return True


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
