"""Which bytes belong to parameters, gradients, optimizer state and buffers, at the end of each
step.

`walk` visits the tensors that models and their optimizers hold. Every storage is counted once,
views and tied weights included; if one storage has two roles, the first of parameter, gradient,
optimizer state, buffer or kept state wins. A walk is exact, and takes 2 to 3 µs a tensor. From one
step to the next the tensors of a training program hardly ever move, so `TensorSums` checks at three
levels:

* If the *signature* of a step equals that of the step before, nothing: the signature is what the
  allocators report (on CUDA any growth shows there), how much state the optimizers hold, and
  whether the first parameter has a gradient.
* Otherwise, in the first steps, and then in one of eight, of sixteen and so on: where the tensors
  are (address and size), in a few C loops, compared with the last full walk.
* If a parameter, a buffer or a piece of state has moved: every tensor.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gpuprobe.model.memory import Category
from gpuprobe.model.run.session import KnownTensors
from gpuprobe.model.values import Bytes, Unavailable
from gpuprobe.sampler.failures import from_program
from gpuprobe.torch_support.compiled_code import unwrapped
from gpuprobe.torch_support.tensors import tensors_in

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes whose tensors have their own storage, if their layout is strided."""

MOST_NESTED = 4
"""Depth of nested lists and dicts in which tensors of the program are searched."""

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class Known(NamedTuple):
    """One storage that was recognised. ``address`` is its data pointer, ``nbytes`` its size,
    ``module`` the dotted name of the module whose parameter or buffer it is, or whose gradient or
    state.
    """

    device: str
    address: int
    nbytes: int
    category: Category
    module: str = ""


def walk(
    models: Iterable[Module], optimizers: Iterable[Optimizer], *, gradients: bool = True
) -> dict[int, Known]:
    """Every storage held by these modules and optimizers, by its identity (``_cdata``).
    ``gradients=False`` leaves out those that are only gradients.
    """
    found: dict[int, Known] = {}
    optimizers = list(optimizers)
    modules = [pair for model in models for pair in named_modules(model)]
    parameters = _parameters(modules, optimizers)
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
    for tensor, name, category in _buffers(modules):
        _note(found, tensor, category, name)
    return found


class RepeatedWalk:
    """The result of `walk` at each step, from the last one if only gradients are others, and that
    one itself if none is: the places of all are read in a few C loops. The keys of what has not
    moved may be those of earlier storages.
    """

    def __init__(self) -> None:
        self._places: tuple[Any, ...] | None = None
        self._fixed: dict[int, Known] = {}
        self._names: dict[int, str] = {}  # of parameters, by their id
        self._gradients: tuple[Any, ...] | None = None  # places of those in `_walked`
        self._walked: Mapping[int, Known] = {}

    def take(
        self, models: Iterable[Module], optimizers: Iterable[Optimizer]
    ) -> Mapping[int, Known]:
        models, optimizers = list(models), list(optimizers)
        places = _Places.of(models, optimizers)
        if places is None:
            return walk(models, optimizers)
        fixed = (places.modules, places.fixed)
        if fixed != self._places:
            self._fixed = walk(models, optimizers, gradients=False)
            modules = [pair for model in models for pair in named_modules(model)]
            self._names = {key: name for key, (_, name) in _parameters(modules, optimizers).items()}
            self._places, self._gradients = fixed, None
        now = _places_of_gradients(places)
        if now is None or now != self._gradients:
            self._walked = self._with_gradients(places, models, optimizers)
            self._gradients = now
        return self._walked

    def _with_gradients(
        self, places: _Places, models: list[Module], optimizers: list[Optimizer]
    ) -> Mapping[int, Known]:
        gradients: dict[int, Known] = {}
        for parameter in places.parameters:
            name = self._names.get(id(parameter))
            if name is None:  # another object, at the same place
                self._places = None
                return walk(models, optimizers)
            if parameter.grad is not None:
                _note(gradients, parameter.grad, Category.GRADIENT, name)
        if not self._fixed.keys().isdisjoint(gradients):
            return walk(models, optimizers)
        return self._fixed | gradients


def _places_of_gradients(places: _Places) -> tuple[Any, ...] | None:
    """Which parameters have gradients, and where; None if that is more than an address."""
    graded = [parameter for parameter in places.parameters if parameter.grad is not None]
    try:
        storages = list(map(torch.Tensor.untyped_storage, places.gradients))
        addresses = list(map(torch.UntypedStorage.data_ptr, storages))
        sizes = list(map(torch.UntypedStorage.nbytes, storages))
    except (RuntimeError, NotImplementedError) as error:  # inside torch.func
        if from_program(error):
            raise
        return None
    return list(map(id, graded)), addresses, sizes


def _parameters(
    modules: list[tuple[str, Module]], optimizers: list[Optimizer]
) -> dict[int, tuple[Tensor, str]]:
    """Each parameter and the name of its module, "" if only an optimizer holds it; by its id."""
    found: dict[int, tuple[Tensor, str]] = {}
    for name, module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, name))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.setdefault(id(parameter), (parameter, ""))
    return found


def _buffers(modules: list[tuple[str, Module]]) -> Iterator[tuple[Tensor, str, Category]]:
    """Buffers and state that modules keep in attributes, with the name of the module."""
    for name, module in modules:
        for key, held in module._buffers.items():
            if held is not None:
                is_state = STATE_NAMES.fullmatch(key)
                yield held, name, Category.KV_CACHE if is_state else Category.BUFFER
        for key, held in vars(module).items():
            if isinstance(held, torch.Tensor) and STATE_NAMES.fullmatch(key):
                yield held, name, Category.KV_CACHE


def modules_of(root: Module) -> Iterator[tuple[str, Module]]:
    """The result of ``root.named_modules()``, also for a class that has its own method of that
    name: that may do anything.
    """
    visited: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield path, module
        waiting += [
            (f"{path}.{name}" if path else name, child)
            for name, child in reversed(list(module._modules.items()))
            if child is not None
        ]


def named_modules(root: Module) -> Iterator[tuple[str, Module]]:
    """The modules below ``root`` by the names they have in recordings, ``Class.dotted.path``. A
    compiled module has the name of the module that was compiled.
    """
    title = type(unwrapped(root)).__name__
    for path, module in modules_of(root):
        parts = [part for part in path.split(".") if part and part != "_orig_mod"]
        yield ".".join((title, *parts)), module


STATE_NAMES = re.compile(
    r"past_key_values?|layer_past|(.*_)?(kv|k|v|key|value)_?caches?|caches?(_[kv]|_params)?|"
    r"(ssm|conv|recurrent|hidden)_states?_cache|inference_params"
)
"""Arguments, results and attributes in which a model keeps state from call to call, by their names
in transformers, gpt-fast, Llama, Mamba and others."""

_OBJECTS = re.compile(r"cache|state|params|output|batch|inputs|layer", re.IGNORECASE)
"""Part of the names of classes whose attributes are searched; others may hold half the program."""

_CONTAINERS = (list, tuple, set, frozenset)
_PLAIN_VALUES = (str, bytes, int, float, complex, bool, type(None), type, torch.nn.Module)


_DEEPEST = 6
"""Containers within containers that are searched."""


def passed_tensors(values: object) -> Iterator[tuple[Tensor, bool]]:
    """The tensors in a model's arguments or result; and for each whether its holder keeps it as
    state: a name of `STATE_NAMES`, or an object such as transformers' ``Cache``.
    """
    visited: set[int] = set()
    waiting: list[tuple[object, bool, int]] = [(values, False, _DEEPEST)]
    while waiting and len(visited) < 2_000:
        value, state, left = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield value, state
        elif isinstance(value, _PLAIN_VALUES) or not left or id(value) in visited:
            continue
        elif isinstance(value, _CONTAINERS):
            visited.add(id(value))
            waiting += [(item, state, left - 1) for item in value]
        elif isinstance(value, Mapping):
            visited.add(id(value))
            waiting += [(i, state or _names_state(name), left - 1) for name, i in value.items()]
        elif (kind := _OBJECTS.search(type(value).__name__)) and hasattr(value, "__dict__"):
            visited.add(id(value))
            keeps = state or kind.group().lower() == "cache"
            waiting += [
                (i, keeps or _names_state(name), left - 1) for name, i in vars(value).items()
            ]


def _names_state(name: object) -> bool:
    return isinstance(name, str) and STATE_NAMES.fullmatch(name) is not None


def category_sums(found: Mapping[int, Known]) -> dict[str, dict[Category, int]]:
    """The bytes that `walk` found, by device and category."""
    sums: dict[str, dict[Category, int]] = {}
    for known in found.values():
        by_category = sums.setdefault(known.device, {})
        by_category[known.category] = by_category.get(known.category, 0) + known.nbytes
    return sums


def known_tensors(
    named_bytes: Mapping[str, Mapping[Category, int]], allocated: Mapping[str, int | Unavailable]
) -> tuple[KnownTensors, ...]:
    """`category_sums` as records. ``allocated``: bytes by device; the rest belongs to no known
    tensor.
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


def _note(found: dict[int, Known], tensor: Tensor, category: Category, module: str) -> None:
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


def _note_plain(found: dict[int, Known], tensor: Tensor, category: Category, module: str) -> None:
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in found:
        nbytes = storage.nbytes()
        if nbytes:
            found[key] = Known(str(tensor.device), storage.data_ptr(), nbytes, category, module)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The strided tensors with real storage that make up ``tensor``.

    A sparse tensor is its indices and values; a wrapper subclass (DTensor, quantised weights) is
    what it wraps, and so is what ``torch.func`` passes to a function, or a functional tensor, which
    torch.compile keeps to compare views; a meta or fake tensor has no memory at all.
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
        # _indices/_values: the public methods refuse tensors that are not coalesced.
        yield from plain_tensors(tensor._indices())
        yield from plain_tensors(tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


FIRST_STEPS = 8
"""Steps at whose end the sums are always checked: they include late allocations."""

INTERVAL = 8
"""Steps between the first two checks after those. A check costs 2 to 3 µs a tensor: after one that
found nothing new, twice as many steps pass before the next."""

LONGEST = 128
"""Steps that may pass without a check."""

_address = torch.Tensor.data_ptr
_nbytes = operator.attrgetter("nbytes")
_is_leaf = operator.attrgetter("is_leaf")
_grad = operator.attrgetter("grad")
_TENSORS = frozenset(PLAIN)
_KNOWN_TYPES = _TENSORS | {type(None), int, float, bool, str}

Sums = dict[str, dict[Category, int]]


class TensorSums:
    """The sums of one recorder. It holds no tensor, only addresses and sizes."""

    def __init__(self) -> None:
        self._count = 0
        self._next = FIRST_STEPS  # the step that is checked with any signature
        self._interval = INTERVAL
        self._signature: tuple[Any, ...] = ()
        self._places: tuple[Any, ...] | None = None  # at the last full walk
        self._fixed: Sums = {}  # without gradients
        self._fixed_addresses: frozenset[int] = frozenset()  # the storages in these sums
        self._sums: Sums = {}
        self._allocated: dict[str, int | Unavailable] = {}
        self._result: tuple[KnownTensors, ...] | None = None
        self._walked: Mapping[int, Known] | None = None
        self._sums_of_walk: Sums = {}
        self.walks = 0
        """How often every tensor was visited."""
        self.checks = 0
        """How often their places were checked."""

    def take(
        self,
        models: Iterable[Module],
        optimizers: Iterable[Optimizer],
        allocated: dict[str, int | Unavailable],
        *,
        may_skip: bool = True,
    ) -> tuple[KnownTensors, ...]:
        """The result of `known_tensors` for a walk made now. ``allocated``: bytes by device.
        ``may_skip=False``: check with any signature.
        """
        models, optimizers = list(models), list(optimizers)
        signature = _signature(models, optimizers, allocated)
        same = signature == self._signature
        due = not may_skip or self._count < FIRST_STEPS or self._count >= self._next
        if due or not same:
            self._signature = signature
            changed = self._check(models, optimizers)
            if self._count >= FIRST_STEPS:
                longer = min(2 * self._interval, LONGEST)
                self._interval = longer if same and not changed else INTERVAL
                self._next = self._count + self._interval
        self._count += 1
        if self._result is None or allocated != self._allocated:
            self._allocated = allocated
            self._result = known_tensors(self._sums, allocated)
        return self._result

    def of_walk(
        self, found: Mapping[int, Known], allocated: Mapping[str, int | Unavailable]
    ) -> tuple[KnownTensors, ...]:
        """The same, from a walk that is needed anyway."""
        if found is not self._walked:
            self._walked, self._sums_of_walk = found, category_sums(found)
        return known_tensors(self._sums_of_walk, allocated)

    def _check(self, models: list[Module], optimizers: list[Optimizer]) -> bool:
        """Compute the sums again. True if they differ from those before."""
        self.checks += 1
        sums = None
        places = _Places.of(models, optimizers)
        if places is not None:
            if places.fixed != self._places:
                self._fix(models, optimizers)
                self._places = places.fixed
            try:
                sums = self._with_gradients(places.gradients)
            except (RuntimeError, NotImplementedError) as error:  # a wrapper of torch.func
                if from_program(error):
                    raise
                sums = None
        if sums is None:
            self.walks += 1
            sums = category_sums(walk(models, optimizers))
        if sums == self._sums:
            return False
        self._sums, self._result = sums, None
        return True

    def _fix(self, models: list[Module], optimizers: list[Optimizer]) -> None:
        self.walks += 1
        found = walk(models, optimizers, gradients=False)
        self._fixed = category_sums(found)
        self._fixed_addresses = frozenset(known.address for known in found.values())

    def _with_gradients(self, gradients: list[Tensor]) -> Sums | None:
        """The fixed sums with gradients; None if a gradient shares a storage with another
        tensor.
        """
        storages = {}
        for gradient in gradients:
            storage = gradient.untyped_storage()
            storages[storage.data_ptr()] = (gradient.device, storage.nbytes())
        storages.pop(0, None)  # storages without bytes
        if not self._fixed_addresses.isdisjoint(storages):
            return None
        by_device: dict[torch.device, int] = {}
        for device, nbytes in storages.values():
            by_device[device] = by_device.get(device, 0) + nbytes
        sums = {device: dict(by_category) for device, by_category in self._fixed.items()}
        for device, nbytes in by_device.items():
            sums.setdefault(str(device), {})[Category.GRADIENT] = nbytes
        return sums


def _signature(
    models: list[Module], optimizers: list[Optimizer], allocated: dict[str, int | Unavailable]
) -> tuple[Any, ...]:
    first = None
    sizes = []
    for optimizer in optimizers:
        sizes.append(len(optimizer.state))
        for group in optimizer.param_groups:
            parameters = group["params"]
            sizes.append(len(parameters))
            if first is None and parameters:
                first = parameters[0]
    # Only whether it exists: reading the gradient of a tensor that is not a leaf would warn.
    graded = first is not None and first.is_leaf and first.grad is not None
    return (len(models), sizes, graded, dict(allocated))


class _Places:
    """The places of all tensors that a walk would find."""

    __slots__ = ("fixed", "gradients", "modules", "parameters")

    def __init__(
        self,
        parameters: list[Tensor],
        modules: tuple[list[Any], ...],
        fixed: tuple[Any, ...],
        gradients: list[Tensor],
    ) -> None:
        self.parameters = parameters
        self.modules = modules
        """What the names of modules depend on: the models with their names, and of each module,
        breadth first, how many it contains, under which names, and which."""
        self.fixed = fixed
        """Addresses and sizes of parameters, buffers and optimizer state. Without the devices: no
        address is on two devices."""
        self.gradients = gradients
        """The gradients themselves: on a CPU their addresses change in every step."""

    @classmethod
    def of(cls, models: list[Module], optimizers: list[Optimizer]) -> _Places | None:
        """None if a tensor has no address (sparse, a wrapper subclass)."""
        found = _held_by(models, optimizers)
        if found is None:
            return None
        parameters, others, buffers, modules = found
        held = [tensor for tensor in others if tensor.__class__ in _TENSORS]
        try:
            with torch._C.DisableTorchFunction():
                gradients = _gradients_of(parameters)
                if gradients is None:
                    return None
                return cls(
                    parameters,
                    modules,
                    (
                        buffers,
                        list(map(_address, parameters)),
                        list(map(_nbytes, parameters)),
                        list(map(_address, held)),
                        list(map(_nbytes, held)),
                    ),
                    gradients,
                )
        except (RuntimeError, NotImplementedError) as error:  # sparse, or inside torch.func
            if from_program(error):
                raise
            return None


def _held_by(
    models: list[Module], optimizers: list[Optimizer]
) -> tuple[list[Tensor], list[Any], int, tuple[list[Any], ...]] | None:
    """The parameters; buffers and the values in the optimizers' state; how many of those are
    buffers; and `_Places.modules`. None if the walk has to visit one of them.
    """
    parameters: list[Tensor] = []
    others: list[Any] = []
    modules: list[Module] = models.copy()
    roots = [(id(model), type(unwrapped(model)).__name__) for model in models]
    counts: list[int] = []
    names: list[str] = []
    children: list[int] = []
    visited = set(map(id, modules))
    for module in modules:  # grows during the iteration
        if module._parameters:
            parameters += module._parameters.values()
        if module._buffers:
            others += module._buffers.values()
        counts.append(len(module._modules))
        names += module._modules
        children += map(id, module._modules.values())
        for child in module._modules.values():
            if id(child) not in visited and child is not None:
                visited.add(id(child))
                modules.append(child)
    buffers = len(others)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
        for state in optimizer.state.values():
            if state.__class__ is not dict:
                return None
            others += state.values()
    once = dict(zip(map(id, parameters), parameters, strict=True))
    once.pop(id(None), None)  # an unset parameter
    parameters = list(once.values())
    # A state may hold numbers, and objects that hold tensors (LBFGS): only the walk finds those.
    if set(map(type, parameters)) <= _TENSORS and set(map(type, others)) <= _KNOWN_TYPES:
        return parameters, others, buffers, (roots, counts, names, children)
    return None


def _gradients_of(parameters: list[Tensor]) -> list[Tensor] | None:
    if not all(map(_is_leaf, parameters)):  # reading their .grad would warn
        return None
    gradients = [g for g in map(_grad, parameters) if g is not None]
    if not set(map(type, gradients)) <= _TENSORS:
        return None
    return gradients if all(g.layout is torch.strided for g in gradients) else None
