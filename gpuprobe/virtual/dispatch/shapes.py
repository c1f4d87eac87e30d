"""Operators with ``compute="shapes"``: run on shapes, and on the values that are `known`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from gpuprobe.errors import NotModelled
from gpuprobe.torch_support.tensors import is_sparse, tensors_in
from gpuprobe.virtual import unknown, values
from gpuprobe.virtual.dispatch import layout, waits
from gpuprobe.virtual.dispatch.facts import OperatorFacts, on_sparse
from gpuprobe.virtual.dispatch.shape_cache import ShapeCache
from gpuprobe.virtual.generators import drawn_by
from gpuprobe.virtual.kernels import host, philox
from gpuprobe.virtual.machine import Machine, is_meta
from gpuprobe.virtual.reads import bounds, known

_Tensor = torch.Tensor
_NOTHING: Final = object()
_MASKS: Final = (torch.bool, torch.uint8)
# Operators on what a sparse tensor is made of, which need no elements.
_OF_PARTS: Final = frozenset(
    {
        "_coalesced_",
        "_dimI",
        "_dimV",
        "_indices",
        "_nnz",
        "_values",
        "alias",
        "ccol_indices",
        "col_indices",
        "crow_indices",
        "dense_dim",
        "detach",
        "detach_",
        "empty_like",
        "indices",
        "is_coalesced",
        "row_indices",
        "sparse_dim",
        "values",
    }
)
# In torch's errors for an operator, or a type of an operator, that the CPU lacks.
_LACKING: Final = ("not implemented for", "Could not run 'aten::")


class Mode(Protocol):
    """What runs operators, and keeps account of their memory: `DispatchMode`."""

    machine: Machine

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def for_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def below(self) -> AbstractContextManager[None]: ...
    def on_host(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        make: Callable[[], Any] | None = None,
    ) -> Any: ...
    def on_device(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: int,
        place: int,
        make: Callable[[], Any] | None = None,
    ) -> Any: ...


class OnShapes:
    """What a dispatch mode does where results have shapes, and values only if they are known."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._machine = mode.machine
        self._cache = ShapeCache()

    def run(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: tuple[int, int],
        kinds: Sequence[bool],
    ) -> Any:
        """``places``: of the arguments, and of what is made. ``kinds``: whether any argument has
        no memory, whether any is unknown, and whether any is sparse.
        """
        machine, mode = self._machine, self._mode
        device, place = places
        meta, some_unknown, sparse = kinds
        if sparse:
            facts = on_sparse(facts)
        if some_unknown and (facts.like or self._overwritten(facts, args, kwargs)):
            some_unknown = False
        if not (meta or some_unknown) and device < 0 and place < 0:
            result = mode.on_host(facts, func, args, kwargs)
            if "device" in kwargs and is_meta_result(result):
                self._learn(facts, func, args, kwargs, result, device)
            return result
        if (device >= 0 or place >= 0) and machine.capture is not None:
            some_unknown = True  # what a graph computes, it computes when it is replayed
        if meta and facts.collective and (machine.ranks == 1 or _receives(facts, args)):
            some_unknown = True
        index = place if place >= 0 else device
        make: Callable[[], Any] | None
        if sparse and facts.name not in _OF_PARTS:
            make, found = self._of_elements(facts, func, args, kwargs, index, some_unknown)
        else:
            make, found = self._by_values(facts, func, args, kwargs, index, (meta, some_unknown))
        if make is None:
            if found is not _NOTHING:
                if device >= 0:
                    machine.queued(device)
                if machine.observer is not None and device >= 0:
                    machine.observer.device_op(func, args, kwargs, found, device)
                if (machine.sync_debug_mode or machine.unwaited) and device >= 0:
                    waits.report(machine, func, args, kwargs, found)
                return found
            make = functools.partial(self._shaped, facts, func, args, kwargs, some_unknown, index)
        if machine.local.paused:
            result = make()
        elif device >= 0 or place >= 0:
            result = mode.on_device(facts, func, args, kwargs, device, place, make)
        else:
            result = mode.on_host(facts, func, args, kwargs, make)
        if facts.moves:
            machine.moved(args[0])
        elif some_unknown:
            self._forget(facts, func, args, kwargs, result, index)
            if sparse and found is not _NOTHING:
                known.learn_indices(machine, result, found)
        elif found is not _NOTHING:
            known.learn(machine, result, found, ())
        else:
            self._learn(facts, func, args, kwargs, result, index)
        if facts.draws and index >= 0 and not machine.local.paused:
            model = machine.devices[index].model
            by = drawn_by(func, args, result, model)
            machine.generators.advance(index, (*args, *kwargs.values()), by)
        return _written_to(facts, args, kwargs, result)

    # -- sparse tensors

    def _of_elements(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int,
        some_unknown: bool,
    ) -> tuple[Callable[[], Any], Any]:
        """As `_by_values`, for an operator on sparse tensors. Which elements its result has is
        found by the CPU's kernel: torch's rules for tensors without memory have hardly any for
        sparse ones.
        """
        written = _arguments(facts, args, kwargs)
        if written and not any(map(is_sparse, written)):
            return (lambda: written[0]), _NOTHING
        if some_unknown and (dense := values.of_sparse(facts.name, args)) is not None:
            return functools.partial(self._empty, *dense), _NOTHING
        stores: dict[int, Any] = {}
        with self._mode.below():
            given = values.with_elements(self._machine, args, stores)
            named = values.with_elements(self._machine, kwargs, stores)
        found = self._compute(facts, func, given, named, index)
        if found is _NOTHING:
            raise unknown.no_shape_rule(func)
        device = kwargs.get("device")
        if not some_unknown and device is not None and device.type == "cpu":
            return (lambda: found), found  # a copy to the host
        with self._mode.below():
            made = known.shape_only(found, stores)
            for tensor in written:
                tensor.data = made
        return (lambda: made), found

    def _empty(self, size: Any, dtype: torch.dtype) -> Any:
        with self._mode.below():
            return torch.empty(size, dtype=dtype, device="meta")

    # -- shapes

    def _shaped(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        some_unknown: bool,
        index: int,
    ) -> Any:
        """The result without values."""
        if facts.draws:  # a generator of the other kind is refused; nothing is drawn
            self._machine.generators.draw(index, (*args, *kwargs.values()))

        def run() -> Any:
            named = {name: values.without_values(value) for name, value in kwargs.items()}
            # Meta kernels that are decompositions refuse any generator.
            if isinstance(named.get("generator"), torch._C.Generator):
                named["generator"] = None
            if facts.by_shape is not None:
                return facts.by_shape(*args, **named)
            given = _without_memory(facts, args)
            made = func(*given, **named)
            return layout.like_arguments(given, named, made) if facts.iterated else made

        try:
            return self._mode.run(self._cache.result, (facts, func, args, kwargs, run), {})
        except NotImplementedError as error:
            if "Meta" not in str(error):
                raise
            if not some_unknown:
                found = self._compute(facts, func, args, kwargs, index)
                if found is not _NOTHING:
                    return known.shape_only(found)
            raise unknown.no_shape_rule(func) from None

    def _by_values(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int,
        kinds: Sequence[bool],
    ) -> tuple[Callable[[], Any] | None, Any]:
        """For operators of which only values tell the result, or its shape: what makes the
        result without its values; and the values, or what takes the place of a result.
        """
        machine = self._machine
        meta, some_unknown = kinds
        if not some_unknown:
            device = kwargs.get("device")
            if meta and device is not None and device.type == "cpu":  # a copy to the host
                return functools.partial(self._compute, facts, func, args, kwargs, index), _NOTHING
            if facts.needs_values and meta and not facts.in_place:
                found = self._compute(facts, func, args, kwargs, index)
                if found is _NOTHING or not any(True for _ in tensors_in(found)):
                    return None, found
                with self._mode.below():
                    made = known.shape_only(found)
                return (lambda: made), found
            return None, _NOTHING
        if not facts.needs_values:
            return None, _NOTHING
        counted = self._counted(facts, func, args, kwargs)
        if counted is not None:
            return counted, _NOTHING
        if machine.unknown_as_nan and machine.capture is None:
            with self._mode.below():
                largest = bounds.largest(machine, func, args, kwargs)
            if largest is not None:
                return largest, _NOTHING
        found = unknown.answer(machine, func, args)
        return None, _NOTHING if found is unknown.NO_ANSWER else found

    def _counted(
        self, facts: OperatorFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """A result whose shape depends on known masks, of unknown values. None where it does not,
        or a mask is unknown.
        """
        machine = self._machine
        name = facts.name
        if name == "masked_select" and known.is_known(machine, args[1]):
            with self._mode.below():
                made = known.selected(args[0], known.values_of(machine, args[1]))
            return lambda: made
        if not name.strip("_").startswith("index"):
            return None
        masks = [item for item in args[1] if isinstance(item, _Tensor) and item.dtype in _MASKS]
        if not masks:
            return None
        if not known.all_known(machine, masks):
            if name in ("index_put_", "_index_put_impl_"):  # whatever is written, it is this
                return lambda: args[0]
            if not machine.unknown_as_nan or machine.capture is not None:
                return None
            if name == "index_put":
                return lambda: values.shape_of(args[0])
            bounds.note(machine, "a mask selects every element")
        indices: list[Any] = []
        with self._mode.below():
            for item in args[1]:
                if not (isinstance(item, _Tensor) and item.dtype in _MASKS):
                    indices.append(item)
                elif known.is_known(machine, item):
                    indices.extend(known.positions(known.values_of(machine, item)))
                else:
                    indices.extend(bounds.all_positions(item))
            given = tuple([values.without_values(item) for item in (args[0], indices, *args[2:])])
        return functools.partial(self._mode.run, func, given, kwargs)

    # -- values

    def _compute(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int,
    ) -> Any:
        """The result of the CPU's kernel on known values; `_NOTHING` where the CPU has none."""
        machine = self._machine
        with self._mode.below():
            given = known.with_values(machine, args)
            named = {name: known.with_values(machine, value) for name, value in kwargs.items()}
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if "device" in named:
            named["device"] = torch.device("cpu")
        run = self._mode.for_device if index >= 0 else self._mode.run
        if index >= 0 and func in host.TABLE:
            func = functools.partial(host.TABLE[func], func)
        try:
            if facts.draws and not machine.local.paused:
                drawn_with = (*args, *kwargs.values())
                with machine.generators.draw(index, drawn_with):
                    found = run(func, given, named)
                if index >= 0 and machine.cuda_numbers:
                    numbers = (machine, index, drawn_with, func, given, found)
                    self._mode.run(philox.redraw, numbers, {})
                return found
            return run(func, given, named)
        except NotModelled:
            return _NOTHING
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or any(
                text in str(error) for text in _LACKING
            ):
                return _NOTHING
            raise

    def _learn(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        index: int,
    ) -> None:
        """Compute the values of a call of which all is known that it depends on."""
        machine = self._machine
        if not facts.written and not facts.collective:  # which send what they are given
            if not any(
                is_meta(tensor) and not known.is_known(machine, tensor)
                for tensor in tensors_in(result)
            ):
                return  # views
            if not known.may_have_values(machine, result):
                return
        found = self._compute(facts, func, args, kwargs, index)
        if found is _NOTHING:
            for tensor in _arguments(facts, args, kwargs):
                known.forget(machine, tensor)
            return
        with self._mode.below():
            known.learn(machine, result, found, (args, kwargs))

    def _overwritten(
        self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether all that a call writes to will be known, whatever it was before."""
        if not facts.overwrites or facts.each:
            return False
        written = {at for at, _ in facts.written}
        rest = [item for at, item in enumerate(args) if at not in written]
        names = {name for _, name in facts.written}
        rest += [item for name, item in kwargs.items() if name not in names]
        machine = self._machine
        if not known.all_known(machine, rest):
            return False
        return all(known.renew(machine, item) for item in _arguments(facts, args, kwargs))

    def _forget(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        index: int,
    ) -> None:
        """What a call with unknown arguments has written to is unknown."""
        machine = self._machine
        if facts.each and machine.capture is None:
            self._each(facts, func, args, kwargs, result, index)
            return
        for tensor in _arguments(facts, args, kwargs):
            known.forget(machine, tensor)

    def _each(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        index: int,
    ) -> None:
        """Entry by entry: one that is unknown does not make the others so."""
        machine = self._machine
        count = len(args[0])
        lists = [
            at
            for at, item in enumerate(args)
            if isinstance(item, (list, tuple)) and len(item) == count
        ]
        written = {at for at, _ in facts.written}
        single = [item for at, item in enumerate(args) if at not in lists]
        may = known.all_known(machine, (single, list(kwargs.values())))
        chosen = []
        for entry in range(count):
            read = [args[at][entry] for at in lists if not (facts.overwrites and at in written)]
            ok = may and known.all_known(machine, read)
            if ok and facts.overwrites:
                ok = all(known.renew(machine, args[at][entry]) for at in written)
            if ok:
                chosen.append(entry)
                continue
            for at in written:
                known.forget(machine, args[at][entry])
        if not chosen:
            return
        some = tuple(
            [item[entry] for entry in chosen] if at in lists else item
            for at, item in enumerate(args)
        )
        of_result = [result[entry] for entry in chosen] if isinstance(result, list) else result
        self._learn(facts, func, some, kwargs, of_result, index)


def _receives(facts: OperatorFacts, args: tuple[Any, ...]) -> bool:
    """Whether a collective brings numbers that only another rank has."""
    return "::recv_" in facts.name and any(
        tensor.is_floating_point() for tensor in tensors_in(args[0])
    )


def is_meta_result(result: Any) -> bool:
    return isinstance(result, _Tensor) and is_meta(result)


def _arguments(
    facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The tensors that a call writes to."""
    found: list[torch.Tensor] = []
    for at, name in facts.written:
        found.extend(tensors_in(args[at] if at < len(args) else kwargs.get(name)))
    return found


def _without_memory(facts: OperatorFacts, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without memory; a number that is written to has none either."""
    given = tuple([values.without_values(item) for item in args])
    for at, _ in facts.written:
        item = given[at] if at < len(given) else None
        if isinstance(item, _Tensor) and not item.dim() and not is_meta(item):
            made = values.shape_of(item)
            given = (*given[:at], made, *given[at + 1 :])
    return given


def _written_to(
    facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """The result of an operator that returns what it was given: that itself, where a tensor
    without memory stood in for it.
    """
    if not facts.in_place or not isinstance(result, (_Tensor, tuple)):
        return result
    written = [args[at] if at < len(args) else kwargs.get(name) for at, name in facts.written]
    if isinstance(result, _Tensor):
        return written[0] if len(written) == 1 else result
    return tuple(written) if len(written) == len(result) else result
