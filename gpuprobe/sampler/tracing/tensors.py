"""Which bytes belong to parameters, gradients, optimizer state and buffers.

The tensors that a model and its optimizers hold are walked at step edges. Every storage is
counted once, views and tied weights included; where one storage plays two roles, the first of
parameter, gradient, optimizer state, buffer or kept state wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from gpuprobe.model.memory import Category
from gpuprobe.model.run.session import KnownTensors
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.torch_support.compiled_modules import unwrapped
from gpuprobe.torch_support.tensors import tensors_in

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes whose tensors have a storage of their own, if their layout is strided."""

MOST_NESTED = 4
"""Lists and dicts inside one another in which tensors of the program are searched."""

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Known(NamedTuple):
    """One storage that was recognised. ``address`` is its data pointer, ``nbytes`` its size,
    ``module`` the dotted name of the module whose parameter or buffer it is, or belongs to.
    """

    device: str
    address: int
    nbytes: int
    category: Category
    module: str = ""


def walk(
    models: Iterable[Any], optimizers: Iterable[Any], *, gradients: bool = True
) -> dict[int, Known]:
    """Every storage held by these modules and optimizers, by its identity (``_cdata``).
    ``gradients=False`` leaves those out that are nothing but gradients.
    """
    found: dict[int, Known] = {}
    parameters: dict[int, tuple[Any, str]] = {}
    buffers: list[tuple[Any, str, bool]] = []  # tensor, module, whether it is kept state
    optimizers = list(optimizers)
    for model in models:
        for name, module in named_modules(model):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters.setdefault(id(parameter), (parameter, name))
            buffers.extend(
                (held, name, STATE_NAMES.fullmatch(key) is not None)
                for key, held in module._buffers.items()
                if held is not None
            )
            buffers.extend(
                (held, name, True)
                for key, held in vars(module).items()
                if isinstance(held, torch.Tensor) and STATE_NAMES.fullmatch(key)
            )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameters.setdefault(id(parameter), (parameter, ""))
    for parameter, name in parameters.values():
        _note(found, parameter, Category.PARAMETER, name)
    for parameter, name in parameters.values() if gradients else ():
        if parameter.is_leaf and parameter.grad is not None:
            _note(found, parameter.grad, Category.GRADIENT, name)
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            _, name = parameters.get(id(parameter), (None, ""))
            for tensor in tensors_in(state, MOST_NESTED):
                _note(found, tensor, Category.OPTIMIZER_STATE, name)
    for buffer, name, state in buffers:
        _note(found, buffer, Category.KV_CACHE if state else Category.BUFFER, name)
    return found


def modules_of(root: Any) -> Iterator[tuple[str, Any]]:
    """What ``root.named_modules()`` gives, also where a class has a method of its own of that name:
    it may do anything.
    """
    met: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        yield path, module
        waiting += [
            (f"{path}.{name}" if path else name, child)
            for name, child in reversed(list(module._modules.items()))
            if child is not None
        ]


def named_modules(root: Any) -> Iterator[tuple[str, Any]]:
    """The modules below ``root`` by the names they have in recordings, ``Class.dotted.path``. A
    compiled module has the name of the one that it was made of.
    """
    title = type(unwrapped(root)).__name__
    for path, module in modules_of(root):
        parts = [part for part in path.split(".") if part and part != "_orig_mod"]
        yield ".".join((title, *parts)), module


STATE_NAMES = re.compile(
    r"past_key_values?|layer_past|(.*_)?(kv|k|v|key|value)_?caches?|caches?(_[kv]|_params)?|"
    r"(ssm|conv|recurrent|hidden)_states?_cache|inference_params"
)
"""Arguments, results and attributes in which a model keeps state from call to call, by the names
that transformers, gpt-fast, Llama, Mamba and others give them."""

_OBJECTS = re.compile(r"cache|state|params|output|batch|inputs|layer", re.IGNORECASE)
"""In the names of the classes whose attributes are looked at; others may hold half the program."""

_CONTAINERS = (list, tuple, set, frozenset)
_PLAIN_VALUES = (str, bytes, int, float, complex, bool, type(None), type, torch.nn.Module)


def passed_tensors(values: Any, depth: int = 6) -> Iterator[tuple[Any, bool]]:
    """The tensors in what a model is called with, or returns; and of each whether it is kept state
    by what holds it: a name of `STATE_NAMES`, or an object such as transformers' ``Cache``.
    """
    met: set[int] = set()
    waiting: list[tuple[Any, bool, int]] = [(values, False, depth)]
    while waiting and len(met) < 2_000:
        value, state, left = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value, state
        elif isinstance(value, _PLAIN_VALUES) or not left or id(value) in met:
            continue
        elif isinstance(value, _CONTAINERS):
            met.add(id(value))
            waiting += [(item, state, left - 1) for item in value]
        elif isinstance(value, Mapping):
            met.add(id(value))
            waiting += [(i, state or _names_state(name), left - 1) for name, i in value.items()]
        elif (kind := _OBJECTS.search(type(value).__name__)) and hasattr(value, "__dict__"):
            met.add(id(value))
            keeps = state or kind.group().lower() == "cache"
            waiting += [
                (i, keeps or _names_state(name), left - 1) for name, i in vars(value).items()
            ]


def _names_state(name: Any) -> bool:
    return isinstance(name, str) and STATE_NAMES.fullmatch(name) is not None


def category_sums(found: Mapping[int, Known]) -> dict[str, dict[Category, int]]:
    """The bytes of what `walk` found, by device and category."""
    sums: dict[str, dict[Category, int]] = {}
    for known in found.values():
        by_category = sums.setdefault(known.device, {})
        by_category[known.category] = by_category.get(known.category, 0) + known.nbytes
    return sums


def known_tensors(
    named_bytes: Mapping[str, Mapping[Category, int]], allocated: Mapping[str, int | Unavailable]
) -> tuple[KnownTensors, ...]:
    """`category_sums` as records. ``allocated``: bytes by device, for the rest that no known
    tensor explains.
    """
    sums = dict(named_bytes)
    for device, total in allocated.items():
        if not isinstance(total, Unavailable):
            sums.setdefault(device, {})
    unknown = Unavailable("the total is unknown")
    result = []
    for device, by_category in sorted(sums.items()):
        total = allocated.get(device, unknown)
        named = sum(by_category.values())
        if not isinstance(total, Unavailable) and named > total:
            total = Unavailable("there are tensors that were never counted, from another thread")
        result.append(
            KnownTensors(
                device=device,
                by_category={c: Bytes(n) for c, n in sorted(by_category.items())},
                rest=total if isinstance(total, Unavailable) else Bytes(total - named),
            )
        )
    return tuple(result)


def _note(found: dict[int, Known], tensor: Any, category: Category, module: str) -> None:
    if (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not _is_wrapped(tensor)
    ):
        _note_plain(found, tensor, category, module)
        return
    for plain in plain_tensors(tensor):
        _note_plain(found, plain, category, module)


def _note_plain(found: dict[int, Known], tensor: Any, category: Category, module: str) -> None:
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in found:
        nbytes = storage.nbytes()
        if nbytes:
            found[key] = Known(str(tensor.device), storage.data_ptr(), nbytes, category, module)


def plain_tensors(tensor: Any) -> Iterator[Any]:
    """The strided tensors with real storage that make up ``tensor``.

    A sparse tensor is its indices and values; a wrapper subclass (DTensor, quantised weights)
    is what it wraps, and so is what ``torch.func`` hands to a function, or a functional tensor,
    which torch.compile keeps to compare views; a meta or fake tensor has no memory at all.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(tensor, FakeTensor) or torch.nn.parameter.is_lazy(tensor):
        return
    if _is_wrapped(tensor):
        yield from plain_tensors(torch._C._functorch.get_unwrapped(tensor))
    elif torch._is_functional_tensor(tensor):
        yield from plain_tensors(torch._from_functional_tensor(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
                yield from plain_tensors(part)
    elif tensor.layout is torch.strided:
        if not tensor.is_meta:
            yield tensor
    elif tensor.layout is torch.sparse_coo:
        # _indices/_values: the public ones refuse tensors that are not coalesced.
        yield from plain_tensors(tensor._indices())
        yield from plain_tensors(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
