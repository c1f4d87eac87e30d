"""How many bytes each category holds at the end of every step, nearly for nothing.

`tensors.walk` asks every tensor for its storage: exact, and 2 to 3 µs a tensor. From one step to
the next the tensors of a training program hardly ever move, so `TensorSums` checks in three
ways:

* At a step whose *signature* is that of the step before, nothing: the signature is what the
  allocators say (on CUDA any growth shows there), how much state the optimizers hold, and
  whether the first parameter has a gradient.
* Otherwise, in the first steps, and then at one in eight, in sixteen and so on: at where the
  tensors are (address and size), in a few C loops, against where they were at the last full walk.
* Where a parameter, a buffer or a piece of state is not where it was: at every tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gpuprobe.model.memory import Category
from gpuprobe.model.run.session import KnownTensors
from gpuprobe.model.values import Unavailable
from gpuprobe.sampler.interruptions import from_program
from gpuprobe.sampler.tracing.tensors import PLAIN, Known, category_sums, known_tensors, walk

FIRST_STEPS = 8
"""Steps at whose end the sums are always checked: what is allocated late is allocated here."""

INTERVAL = 8
"""Steps between the first two checks after those. A check costs 2 to 3 µs a tensor: twice as many
steps pass before the next as before one that found nothing new."""

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
    """The sums of one recorder. It holds no tensor: only addresses and sizes."""

    def __init__(self) -> None:
        self._count = 0
        self._next = FIRST_STEPS  # the step that is checked whatever its signature is
        self._interval = INTERVAL
        self._signature: tuple[Any, ...] = ()
        self._seen: tuple[Any, ...] | None = None  # the places at the last full walk
        self._fixed: Sums = {}  # without gradients
        self._fixed_addresses: frozenset[int] = frozenset()  # of the storages in these sums
        self._sums: Sums = {}
        self._allocated: dict[str, int | Unavailable] = {}
        self._result: tuple[KnownTensors, ...] | None = None
        self.walks = 0
        """How often every tensor was asked."""
        self.checks = 0
        """How often their places were."""

    def take(
        self,
        models: Iterable[Any],
        optimizers: Iterable[Any],
        allocated: dict[str, int | Unavailable],
        *,
        may_skip: bool = True,
    ) -> tuple[KnownTensors, ...]:
        """What `tensors.known_tensors` says of a walk made now. ``allocated``: bytes by device.
        ``may_skip=False``: check, whatever the signature says.
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

    @staticmethod
    def of_walk(
        found: Mapping[int, Known], allocated: Mapping[str, int | Unavailable]
    ) -> tuple[KnownTensors, ...]:
        """The same, from a walk that is made anyway."""
        return known_tensors(category_sums(found), allocated)

    def _check(self, models: list[Any], optimizers: list[Any]) -> bool:
        """Whether the sums are others than before."""
        self.checks += 1
        sums = None
        places = _Places.of(models, optimizers)
        if places is not None:
            if places.fixed != self._seen:
                self._fix(models, optimizers)
                self._seen = places.fixed
            try:
                sums = self._with_gradients(places.gradients)
            except (RuntimeError, NotImplementedError) as error:  # one of torch.func's wrappers
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

    def _fix(self, models: list[Any], optimizers: list[Any]) -> None:
        self.walks += 1
        found = walk(models, optimizers, gradients=False)
        self._fixed = category_sums(found)
        self._fixed_addresses = frozenset(known.address for known in found.values())

    def _with_gradients(self, gradients: list[Any]) -> Sums | None:
        """The fixed sums and these; None where a gradient shares a storage with something else."""
        storages = {}
        for gradient in gradients:
            storage = gradient.untyped_storage()
            storages[storage.data_ptr()] = (gradient.device, storage.nbytes())
        storages.pop(0, None)  # no bytes
        if not self._fixed_addresses.isdisjoint(storages):
            return None
        by_device: dict[Any, int] = {}
        for device, nbytes in storages.values():
            by_device[device] = by_device.get(device, 0) + nbytes
        sums = {device: dict(by_category) for device, by_category in self._fixed.items()}
        for device, nbytes in by_device.items():
            sums.setdefault(str(device), {})[Category.GRADIENT] = nbytes
        return sums


def _signature(
    models: list[Any], optimizers: list[Any], allocated: dict[str, int | Unavailable]
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
    # Only whether there is one: reading the gradient of what is no leaf would warn.
    graded = first is not None and first.is_leaf and first.grad is not None
    return (len(models), sizes, graded, dict(allocated))


class _Places:
    """Where every tensor is that the walk would find."""

    __slots__ = ("fixed", "gradients")

    def __init__(self, fixed: tuple[Any, ...], gradients: list[Any]) -> None:
        self.fixed = fixed
        """Addresses and sizes of parameters, buffers and optimizer state. The devices are left
        out: two devices share no address."""
        self.gradients = gradients
        """The gradients themselves: on a CPU they are somewhere else in every step."""

    @classmethod
    def of(cls, models: list[Any], optimizers: list[Any]) -> _Places | None:
        """None where a tensor has no address of its own (sparse, a wrapper subclass)."""
        found = _held_by(models, optimizers)
        if found is None:
            return None
        parameters, others, buffers = found
        held = [tensor for tensor in others if tensor.__class__ in _TENSORS]
        try:
            with torch._C.DisableTorchFunction():
                gradients = _gradients_of(parameters)
                if gradients is None:
                    return None
                return cls(
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


def _held_by(models: list[Any], optimizers: list[Any]) -> tuple[list[Any], list[Any], int] | None:
    """The parameters; buffers and what the optimizers' state holds; how many of those are buffers.
    None where something among them is for the walk to go through.
    """
    parameters: list[Any] = []
    others: list[Any] = []
    modules: list[Any] = models.copy()
    met = set(map(id, modules))
    for module in modules:  # grows while it is gone through
        if module._parameters:
            parameters += module._parameters.values()
        if module._buffers:
            others += module._buffers.values()
        for child in module._modules.values():
            if id(child) not in met and child is not None:
                met.add(id(child))
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
    # A state may hold numbers, and things that hold tensors in turn (LBFGS): the walk's part.
    if set(map(type, parameters)) <= _TENSORS and set(map(type, others)) <= _KNOWN_TYPES:
        return parameters, others, buffers
    return None


def _gradients_of(parameters: list[Any]) -> list[Any] | None:
    if not all(map(_is_leaf, parameters)):  # reading their .grad would warn
        return None
    gradients = [g for g in map(_grad, parameters) if g is not None]
    if not set(map(type, gradients)) <= _TENSORS:
        return None
    return gradients if all(g.layout is torch.strided for g in gradients) else None
