"""Values of tensors without memory: what a program reads, where it depends on nothing unknown.

With ``compute="shapes"`` tensors on a device are meta tensors: shapes, and no memory. Whole
numbers, truth values and small tensors nevertheless have values, in host memory that belongs to
the tag of their storage (`Tag.values`) and is charged to no device: operators on them run twice,
once on shapes, which decides about memory, and once on the values. So what is allocated does not
depend on which values are known. A value is unknown where it depends on one that is, or on more
of floating point than `ValueLimits` allow.

On the host, tensors are ordinary CPU tensors where their values are known, but for parameters:
torch does not turn one kind of tensor into the other in place, as ``module.to("cuda")`` must. A
CPU tensor that unknown values were written into is `Tag.lost`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpuprobe.torch_support.tensors import (
    is_meta,
    is_sparse,
    of_parts,
    parts,
    storage_key,
    tensors_in,
)
from gpuprobe.virtual.machine import Machine

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_aten: Final = torch.ops.aten
_empty = torch.empty
_empty_strided = torch.empty_strided
_Storage = torch.UntypedStorage
_is_conj = torch.Tensor.is_conj
_is_neg = torch.Tensor.is_neg


def is_known(machine: Machine, tensor: Any) -> bool:
    """Whether a tensor has values: always, unless it has no memory or is `Tag.lost`."""
    if is_sparse(tensor):
        return all(is_known(machine, part) for part in parts(tensor))
    tag = machine.keeper_of(tensor)
    if is_meta(tensor):
        return tag is not None and tag.values is not None and tensor.layout is torch.strided
    return tag is None or not tag.lost


def has_values(machine: Machine, tensor: Any) -> bool:
    """Whether values are kept for a tensor without memory."""
    tag = machine.keeper_of(tensor)
    return tag is not None and tag.values is not None


def window(tensor: Any, values: Any) -> Any:
    """A CPU tensor like ``tensor``, over other memory."""
    made = _empty(0, dtype=tensor.dtype, device=_CPU)
    _aten.set_.source_Storage_storage_offset(
        made, values, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if _is_conj(tensor):
        made = torch._conj(made)
    return torch._neg_view(made) if _is_neg(tensor) else made


def kept_window(tag: Any, tensor: Any) -> Any:
    """`window` on the values of a tensor, which its tag keeps for the next call: loops that write
    element by element name the same tensor each time.
    """
    looks = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tag.window is None or tag.window[0] != looks:
        tag.window = looks, window(tensor, tag.values)
    return tag.window[1]


def values_of(machine: Machine, tensor: Any) -> Any:
    """The CPU tensor with the values of one that `is_known`: itself, or a window on them, which
    shares its memory with those of other tensors exactly where they share storages. Of one that
    is not: a tensor of its shape, with any values.
    """
    if not is_meta(tensor):
        return tensor
    if is_sparse(tensor):
        return of_parts(tensor, [values_of(machine, part) for part in parts(tensor)], _CPU)
    tag = machine.keeper_of(tensor)
    if tag is None or tag.values is None:
        return _empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU)
    return window(tensor, tag.values)


def with_values(machine: Machine, value: Any) -> Any:
    """The arguments of one call, made for the CPU: tensors without memory replaced by their
    values.
    """
    if isinstance(value, torch.Tensor):
        return values_of(machine, value)
    if type(value) is list or type(value) is tuple:
        return type(value)([with_values(machine, item) for item in value])
    if isinstance(value, torch.device):
        return _CPU
    return value


def shape_only(value: Any, stores: dict[int, Any] | None = None) -> Any:
    """A result with every tensor replaced by one of its shape without memory. Tensors that share
    a storage still do. ``stores``: storages without memory, by the keys of those to replace.
    """
    return _shape_only(value, {} if stores is None else stores)


def _shape_only(value: Any, stores: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if is_sparse(value):
            return of_parts(value, [_shape_only(item, stores) for item in parts(value)], _META)
        if value.layout is not torch.strided:
            return value
        key = storage_key(value)
        nbytes = value.untyped_storage().nbytes()
        store = stores.get(key)
        if store is None:
            store = stores[key] = _Storage(nbytes, device="meta")
        made = _empty(0, dtype=value.dtype, device="meta")
        return _aten.set_.source_Storage_storage_offset(
            made, store, value.storage_offset(), value.size(), value.stride()
        )
    if isinstance(value, (list, tuple)):
        made = [_shape_only(item, stores) for item in value]
        return type(value)(made)
    return value


def all_known(machine: Machine, value: Any) -> bool:
    """Whether every tensor among some arguments is known."""
    return all(is_known(machine, tensor) for tensor in tensors_in(value))


def may_have_values(machine: Machine, result: Any) -> bool:
    """Whether the tensors of a result are small enough to be computed."""
    for tensor in tensors_in(result):
        if is_sparse(tensor):
            if not may_have_values(machine, parts(tensor)):
                return False
            continue
        if tensor.layout is not torch.strided:
            return False
        if is_meta(tensor) and not machine.limits.allow(
            tensor.dtype, tensor.untyped_storage().nbytes()
        ):
            return False
    return True


def learn(machine: Machine, result: Any, found: Any, given: Any) -> None:
    """Keep the values ``found`` for the tensors of ``result``, whose storages are new.

    ``given``: the CPU tensors that they were computed from, whose memory they may share.
    """
    taken: set[int] | None = None
    for tensor, values in zip(tensors_in(result), tensors_in(found), strict=False):
        if is_sparse(tensor):
            learn(machine, parts(tensor), parts(values), given)
            continue
        if not is_meta(tensor) or tensor.layout is not torch.strided:
            continue
        if is_traceable_wrapper_subclass(tensor):
            continue  # what it wraps has values, or not
        tag = machine.keeper_of(tensor)
        if tag is not None and tag.values is not None:
            continue
        if tensor.size() != values.size() or tensor.dtype != values.dtype:
            continue
        if taken is None:
            taken = {storage_key(item) for item in tensors_in(given)}
        own, storage = tensor.untyped_storage(), values.untyped_storage()
        if (
            tensor.stride() != values.stride()
            or tensor.storage_offset() != values.storage_offset()
            or storage.nbytes() != own.nbytes()
            or storage._cdata in taken
        ):
            storage = _Storage(own.nbytes())
            window(tensor, storage).copy_(values)
        taken.add(storage._cdata)
        if tag is None:
            machine.keep_values(own, storage)
        else:
            tag.values = storage


def learn_indices(machine: Machine, result: Any, found: Any) -> None:
    """Keep what is known of sparse tensors whose values are not: which elements they have."""
    for tensor, computed in zip(tensors_in(result), tensors_in(found), strict=False):
        if is_sparse(tensor):
            learn(machine, parts(tensor)[1:], parts(computed)[1:], ())


def forget(machine: Machine, tensor: Any) -> None:
    """Unknown values were written into a tensor: nothing that shares its memory is known."""
    if is_sparse(tensor):  # its elements are where they were, or were written too
        tensor = parts(tensor)[0]
    tag = machine.keeper_of(tensor)
    if is_meta(tensor):
        if tag is not None:
            drop(tag)
    elif tensor.layout is torch.strided:
        if tag is None:
            tag = machine.track(tensor.untyped_storage(), machine.place_of(tensor))
        tag.lost = True


def drop(tag: Any) -> None:
    """Nothing is known any more of a storage without memory."""
    tag.values = tag.window = None


def is_whole(tensor: Any) -> bool:
    """Whether a tensor covers all of its storage, each place of it once."""
    return bool(
        tensor.layout is torch.strided
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        and _dense(tensor)
    )


def _dense(tensor: Any) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def renew(machine: Machine, tensor: Any) -> bool:
    """Make room for the values of a tensor that is about to be overwritten with known ones.
    Returns whether they will be known.
    """
    tag = machine.keeper_of(tensor)
    if tag is None:
        return not is_meta(tensor)
    if not is_meta(tensor):
        if tag.lost and is_whole(tensor):
            tag.lost = False
        return not tag.lost
    if tag.values is None:
        if not is_whole(tensor) or not machine.limits.allow(tensor.dtype, tag.nbytes):
            return False
        tag.values = _Storage(tag.nbytes)
    return True


def without_memory(machine: Machine, tensor: Any) -> Any:
    """A meta tensor on the host for a CPU tensor. Its values are in the same memory, where they
    are few enough to be known.
    """
    storage = tensor.untyped_storage()
    tag = machine.tags.get(storage._cdata)
    nbytes = storage.nbytes()
    store = _Storage(nbytes, device="meta")
    made = _empty(0, dtype=tensor.dtype, device="meta")
    _aten.set_.source_Storage_storage_offset(
        made, store, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    found = machine.track(store, machine.place_of(tensor))
    lost = tag is not None and tag.lost
    if not lost and machine.limits.allow(tensor.dtype, nbytes):
        found.values = storage
    return made


def with_memory(machine: Machine, tensor: Any) -> Any:
    """A CPU tensor for a meta tensor of the host: over its values, or `Tag.lost`. Memory that
    nobody writes to is not taken from the machine.
    """
    if is_known(machine, tensor):
        return values_of(machine, tensor)
    made = _empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_CPU)
    machine.track(made.untyped_storage(), machine.place_of(tensor)).lost = True
    return made


def count_true(mask: Any) -> int:
    return int(_aten.count_nonzero.default(mask).item())


def positions(mask: Any) -> list[Any]:
    """What a mask selects, as indices without values: one for each of its dimensions."""
    count = count_true(mask)
    return [_empty((count,), dtype=torch.long, device="meta") for _ in range(mask.dim())]


def selected(tensor: Any, mask: Any) -> Any:
    """What ``masked_select`` selects with a known mask, without values."""
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    times = math.prod(shape) // max(1, mask.numel())
    return _empty((count_true(mask) * times,), dtype=tensor.dtype, device="meta")
