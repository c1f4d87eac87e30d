"""The dispatch mode of a virtual device: every operator below autograd, its memory and its place.

New storages get the place that the call asked for, else that of its inputs; tensors in different
places are refused as CUDA refuses them. What an operator does beyond allocating its results is in
the lowering table (`gpuprobe.virtual.lowering`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import (
    PLAIN_ON_HOST,
    PLAIN_WITHOUT_MEMORY,
    is_meta_and_sparse,
    keys_of,
    storage_key,
    tensors_in,
)
from gpuprobe.virtual import boundary, frames, unknown
from gpuprobe.virtual.accuracy import in_compared_types
from gpuprobe.virtual.dispatch import available, waits
from gpuprobe.virtual.dispatch.calls import Call, OperatorRow
from gpuprobe.virtual.dispatch.facts import OperatorFacts, facts_of, on_sparse
from gpuprobe.virtual.dispatch.refusals import two_places
from gpuprobe.virtual.dispatch.shapes import OnShapes
from gpuprobe.virtual.generators import drawn_by
from gpuprobe.virtual.kernels import host, nearest, philox
from gpuprobe.virtual.machine import HOST, Machine, is_meta, parts
from gpuprobe.virtual.operators.running import Extensions
from gpuprobe.virtual.reads import known
from gpuprobe.virtual.torch_patches import keys

_Tensor = torch.Tensor
_fake_mode = torch._C._get_dispatch_mode
_FAKE: Final = torch._C._TorchDispatchModeKey.FAKE
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class DispatchMode(TorchDispatchMode):
    """Pushed in every thread that uses the virtual machine."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        # By this, Dynamo of older versions tells whether it compiles inside a mode.
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __init__(self, machine: Machine, rows: Mapping[str, OperatorRow]) -> None:
        super().__init__()
        self.machine = machine
        self._rows = rows
        self._facts: dict[Any, OperatorFacts] = {}
        self._shapes = OnShapes(self)
        self._extensions = Extensions(machine, self._above)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        machine = self.machine
        local = machine.local
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            if isinstance(func, torch._ops.HigherOrderOperator):
                return self._in_parts(func, args, kwargs)
            facts = self._facts[func] = facts_of(func, self._rows)
        if machine.closed or _fake_mode(_FAKE) is not None:
            # Shapes that torch itself works out (DTensor, compilers): no memory of any device's.
            return func(*args, **kwargs)
        if facts.view and self._is_only_view(args, types):
            return self.run(func, args, kwargs)
        if machine.many_streams or machine.observer is not None:
            machine.leaves_used(args, kwargs)
        if types and _unwraps_first(types):
            return NotImplemented  # its parts come back here
        if kwargs and not local.inside and _names_device(kwargs) and keys.passed_by():
            return self._above(func, args, kwargs)
        if facts.collective:
            return self._collective(facts, func, args, kwargs)
        result = self._run(facts, func, args, kwargs)
        equal = facts.equal and (facts.of_any_type or in_compared_types(args, result))
        if not equal and not local.paused:
            self._note(func, (args, kwargs, result))
        return result

    def _note(self, func: Any, tensors: Any) -> None:
        """A call of an operator that is not known to allocate what CUDA's does."""
        machine = self.machine
        given = {id(t): t for t in tensors_in(tensors) if machine.place_of(t) >= 0}
        if given:
            machine.called.note(
                str(func), sum(t.numel() * t.element_size() for t in given.values())
            )

    def _collective(
        self, facts: OperatorFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        machine = self.machine
        run = functools.partial(self._run, facts, func, args, kwargs)
        known = machine.reductions
        with nullcontext() if known is None else known.functional(func, args, kwargs):
            result = machine.in_flight.run(func, args, kwargs, run)
        if machine.traffic is not None:
            apart = machine.stream(machine.local.device) != 0
            machine.traffic.note(func, args, kwargs, result, apart)
        return result

    def _is_only_view(self, args: tuple[Any, ...], types: Any) -> bool:
        """Whether a view of an argument is all that there is to be made: it takes no memory, lies
        where its argument does, and what is known of that is known of it.
        """
        machine, local = self.machine, self.machine.local
        if types or not args or not machine.unwatched or local.new_place is not None:
            return False
        tensor = args[0]
        keys = keys_of(tensor)
        if keys in PLAIN_WITHOUT_MEMORY:
            return not (local.paused or local.standing_in)
        if keys not in PLAIN_ON_HOST:
            return False
        tag = machine.tag_of(tensor)
        return tag is None or not tag.lost

    def _run(
        self, facts: OperatorFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Where the arguments lie, and what is to be done there."""
        machine, local = self.machine, self.machine.local
        if local.paused:  # a part of something that is charged as a whole
            if not machine.shapes:
                return self.for_device(func, args, kwargs)
            _, _, *kinds = self._places(args, kwargs)
            return self._shapes.run(facts, func, args, kwargs, (HOST, HOST), kinds)
        if facts.composite:  # inference mode hands composite operators over whole
            return self._above(func.decompose, args, kwargs)

        device, host, *kinds = self._places(args, kwargs)
        place = local.new_place
        if facts.devices and not machine.shapes:  # those of FSDP up to torch 2.8
            args = tuple(
                torch.device("cpu") if at in facts.devices else given
                for at, given in enumerate(args)
            )
        if device >= 0 and facts.parts is not None:
            result = self._above(facts.parts, args, kwargs)
            if result is not NotImplemented:
                return result
        if facts.extension is not None and device >= 0:
            return self._of_extension(facts, func, args, kwargs, (device, place), kinds)
        if place is None:
            if device >= 0:
                self._check_places(facts, func, args, kwargs, device, host)
            place = device
        if machine.shapes or (local.standing_in and kinds[0]):
            return self._shapes.run(facts, func, args, kwargs, (device, place), kinds)
        if device >= 0 or place >= 0:
            if kinds[2]:
                facts = on_sparse(facts)
            return self.on_device(facts, func, args, kwargs, device, place)
        return self.on_host(facts, func, args, kwargs)

    def _of_extension(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: tuple[int, int | None],
        kinds: Sequence[bool],
    ) -> Any:
        """An operator of another package's, which may take tensors in several places."""
        machine = self.machine
        device, place = places[0], places[0] if places[1] is None else places[1]
        valueless = machine.shapes or (machine.local.standing_in and kinds[0])

        def usual() -> Any:
            if valueless:
                return self._shapes.run(facts, func, args, kwargs, (device, place), kinds)
            return self.on_device(facts, func, args, kwargs, device, place)

        extension = facts.extension
        assert extension is not None
        return self._extensions.run(extension, func, args, kwargs, device, valueless, usual)

    def _above(self, code: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run Python code whose operators come back here."""
        with self, keys.above():
            return code(*args, **kwargs)

    def on_host(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        make: Callable[[], Any] | None = None,
    ) -> Any:
        """Run an operator on host tensors. ``make``: makes the result instead of the kernel."""
        machine = self.machine
        local = machine.local
        if make is not None:
            result = make()
        else:
            run = functools.partial(self._draw, HOST) if facts.draws else self.run
            result = run(func, args, kwargs)
        if local.new_place is not None:
            self._track_results(result, local.new_place, facts, None)
        elif machine.shapes:
            self._track_host_results(args, result, facts)
        if local.fresh:
            self._freshness(args, result)
        if machine.observer is not None:
            machine.observer.host_op(func, args, kwargs, result)
        return result

    def _in_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A higher-order operator (``flex_attention``, ``cond``): its eager form, in Python."""
        if func.name() == "cond":  # its eager form refuses to run under a mode
            chosen, otherwise, operands = args[1:4]
            return self._above(chosen if args[0] else otherwise, operands, {})
        keys_of = torch._C.DispatchKey
        kernel = func.py_kernels.get(keys_of.CompositeExplicitAutograd)
        kernel = kernel or func.py_kernels.get(keys_of.CUDA)
        if kernel is None:
            raise unknown.not_modelled(f"the higher-order operator {func}")
        return self._above(kernel, args, kwargs)

    def on_device(
        self,
        facts: OperatorFacts,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: int,
        place: int,
        make: Callable[[], Any] | None = None,
    ) -> Any:
        """Run an operator of which arguments or results lie on a device, with what it takes of
        memory. ``make``: what makes the result instead of the kernel.
        """
        machine = self.machine
        row = facts.row
        index = place if place >= 0 else device
        capture = None if machine.local.standing_in else machine.capture
        if capture is not None:
            capture.about_to_run(func, args, kwargs)
        if row is None:
            result = self._made(facts, func, args, kwargs, place, index, make)
            self._track_results(result, place, facts, None)
        else:
            stream = machine.stream(index)
            call = Call(machine, machine.devices[index], stream, func, args, kwargs)
            try:
                if row.before is not None:
                    row.before(call)
                source = row.reuse(call) if row.reuse is not None else None
                there = place if source is None else HOST  # memory that is reused is there
                result = self._made(facts, func, args, kwargs, there, index, make)
                call.result = result
                self._track_results(result, place, facts, source)
                if row.after is not None:
                    row.after(call)
            finally:
                call.release()
        machine.queued(index)
        if machine.meter is not None:
            machine.meter(func, args, kwargs, result)
        if capture is not None:
            capture.note(func, args, kwargs, result)
        if machine.observer is not None and not facts.declares_accesses:
            machine.observer.device_op(func, args, kwargs, result, index)
        if machine.sync_debug_mode or machine.unwaited:
            waits.report(machine, func, args, kwargs, result)
        return result

    def _made(
        self,
        facts: OperatorFacts,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: int,
        index: int,
        make: Callable[[], Any] | None,
    ) -> Any:
        """What the host's kernel makes for ``place``. Raises torch.OutOfMemoryError where it is
        more than that device has left, if possible before the host is asked for it.
        """
        machine = self.machine
        if make is not None:
            return make()
        if func in host.TABLE:
            func = functools.partial(host.TABLE[func], func)
        run = functools.partial(self._draw, index) if facts.draws else self.for_device
        if place < 0 or facts.writes:
            return run(func, args, kwargs)
        device = machine.devices[place]
        if available.may_not_fit(device, args):
            available.require(device, machine.stream(place), self.run, func, args, kwargs)
        try:
            return run(func, args, kwargs)
        except RuntimeError as error:
            if available.HOST_FULL not in str(error):
                raise
            failure = error
        available.require(device, machine.stream(place), self.run, func, args, kwargs)
        raise failure

    def _draw(self, place: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run`, with random numbers from the generator of ``place``."""
        if place < 0:
            with self.machine.generators.draw(place, (*args, *kwargs.values())):
                return self.run(func, args, kwargs)
        generators = self.machine.generators
        given = (*args, *kwargs.values())
        with generators.draw(place, given):
            result = self.for_device(func, args, kwargs)
        if self.machine.cuda_numbers:
            self.run(philox.redraw, (self.machine, place, given, func, args, result), {})
        model = self.machine.devices[place].model
        generators.advance(place, given, drawn_by(func, args, result, model))
        return result

    def for_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run`, with what CUDA has and the host lacks."""
        try:
            return self.run(func, args, kwargs)
        except RuntimeError as error:
            missing = None
            if nearest.lacking(error) is None:
                missing = boundary.of_kernel(func, error)
                if missing is None:
                    raise
            failure = error
        try:
            if missing is None:
                return self.run(functools.partial(nearest.instead, func, failure), args, kwargs)
        except RuntimeError as error:
            missing = boundary.of_kernel(func, error)
            if missing is None:
                raise
        finally:
            del failure  # its traceback has this frame: both would keep the tensors alive
        raise missing

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The host's kernel."""
        local = self.machine.local
        before, local.inside = local.inside, True
        try:
            given = [item.dtype.is_complex for item in args if isinstance(item, _Tensor)]
            with keys.for_kernel() if True in given else keys.below():
                return func(*args, **kwargs)
        finally:
            local.inside = before

    @contextmanager
    def below(self) -> Iterator[None]:
        """What torch does within is not the program's. Meta kernels are often Python code: what
        they ask of tensors must be answered as if there were no virtual device.
        """
        local = self.machine.local
        before, local.inside = local.inside, True
        try:
            with keys.below():
                yield
        finally:
            local.inside = before

    # -- places

    def _places(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Any | None, bool, bool, bool]:
        """The device of the arguments (-1: none), one host tensor that is not a scalar, whether
        any has no memory, whether the values of any are unknown, and whether any is sparse.
        """
        device = -1
        host = None
        meta = some_unknown = sparse = False
        tag_of = self.machine.tag_of
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, _Tensor):
                items: Any = (value,)
            elif type(value) is list or type(value) is tuple:
                items = value
            else:
                continue
            for tensor in items:
                if not isinstance(tensor, _Tensor):
                    continue
                tag = tag_of(tensor)
                empty, of_parts = is_meta_and_sparse(tensor)
                if of_parts:
                    sparse = True
                if empty:
                    meta = True
                    if tag is None or tag.values is None or of_parts:
                        some_unknown = some_unknown or not known.is_known(self.machine, tensor)
                elif tag is not None and tag.lost:
                    some_unknown = True
                if tag is None or tag.place < 0:
                    if host is None and tensor.dim():
                        host = tensor
                elif device < 0:
                    device = tag.place
                elif device != tag.place and host is None:
                    host = tensor  # on another device: as wrong as on the host
        return device, host, meta, some_unknown, sparse

    def _check_places(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: int,
        host: Any | None,
    ) -> None:
        """Refuse what CUDA refuses of tensors of which one lies on ``device``, and have what C++
        code made for this very call follow it there.
        """
        if host is not None and not facts.mixed:
            self._same_place(func, args, kwargs, device)
        if facts.fills:
            if self.machine.local.fresh:
                self._follow(args[0], device)
        elif facts.refusal is not None or (facts.in_place and not facts.mixed):
            self._refuse(facts, func, args, kwargs, device)

    def _same_place(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: int
    ) -> None:
        """Refuse tensors in two places, in torch's words. Tensors that C++ code made for this
        very call follow it to the device.
        """
        machine = self.machine
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, _Tensor):
                    continue
                tag = machine.tag_of(tensor)
                if tag is not None and tag.place == device:
                    continue
                if (tag is None or tag.place == HOST) and not tensor.dim():
                    continue
                if (tag is None or tag.place == HOST) and self._joins(tensor, device):
                    continue
                other = -1 if tag is None else tag.place
                raise two_places(device, other, func._schema.name.removeprefix("aten::"))

    def _joins(self, tensor: Any, device: int) -> bool:
        """Whether a host tensor is one that C++ code made for this very call: it follows the
        others to their device.
        """
        machine = self.machine
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return True
        if (
            (machine.tags.get(storage._cdata) is None and is_meta(tensor))
            or machine.fresh(storage._cdata, frames.instruction())
            or frames.in_engine()
        ):
            machine.track(storage, device)
            return True
        return False

    def _refuse(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: int,
    ) -> None:
        """What else CUDA refuses, of tensors of which one lies on ``device``."""
        name = func._schema.name.removeprefix("aten::")
        place = self.machine.place_of
        written = kwargs.get("out", args[0])
        if facts.in_place and isinstance(written, _Tensor) and not written.dim():
            # A number on the host is read from a device, but not written to from there.
            if place(written) < 0 and not self._joins(written, device):
                raise two_places(device, -1, name)
        elif facts.refusal is not None:
            for item in (args[0], *args[2:3]):  # what is indexed, and what is put there
                if isinstance(item, _Tensor) and item.dim() and place(item) < 0:
                    self._joins(item, device)
            facts.refusal(place, name, args)

    def _follow(self, target: Any, device: int) -> None:
        """Memory that C++ code made for the call at hand "like a device's tensor", and that it
        fills with one: `Machine.fresh`.
        """
        machine = self.machine
        if machine.tag_of(target) is not None or not target.dim():
            return
        storage = target.untyped_storage()
        if machine.fresh(storage._cdata, frames.instruction()):
            machine.track(storage, device)

    def _track_host_results(self, args: tuple[Any, ...], result: Any, facts: OperatorFacts) -> None:
        """Results of host tensors are host tensors. What has no place yet gets one with its
        first use: C++ code makes tensors "like this one", which may be a device's.
        """
        for tensor in tensors_in(args):
            if self.machine.tag_of(tensor) is not None or not is_meta(tensor):
                self._track_results(result, HOST, facts, None)
                return

    def _freshness(self, args: tuple[Any, ...], result: Any) -> None:
        """What is made of tensors made in this very instruction is so too (`Machine.fresh`)."""
        fresh = self.machine.local.fresh
        if any(storage_key(tensor) in fresh for tensor in tensors_in(args)):
            fresh.update(storage_key(tensor) for tensor in tensors_in(result))

    def _track_results(self, result: Any, place: int, facts: OperatorFacts, source: Any) -> None:
        if type(result) is _Tensor:
            self._track_result(result, place, source, facts.in_place)
        elif isinstance(result, (tuple, list)):
            stay = facts.host_results
            for at, item in enumerate(result):
                if isinstance(item, _Tensor):
                    self._track_result(
                        item,
                        HOST if at in stay else place,
                        source if at == 0 else None,
                        facts.in_place,
                    )
                elif isinstance(item, (list, tuple)):
                    for inner in item:
                        if isinstance(inner, _Tensor):
                            self._track_result(inner, place, None, facts.in_place)
        elif isinstance(result, _Tensor):
            self._track_result(result, place, source, facts.in_place)

    def _track_result(self, tensor: Any, place: int, source: Any, in_place: bool) -> None:
        machine = self.machine
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:  # it has no memory of its own
                self._track_result(getattr(tensor, name), place, None, False)
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            for part in parts(tensor):
                self._track_result(part, place, None, False)
            return
        known = machine.tags.get(storage._cdata)
        if known is None:
            if in_place:
                return  # an argument, written to: it stays where it is
            if place == HOST and not is_meta(tensor):
                return  # ordinary host memory: nobody asks about it
            instead = None if source is None else machine.tag_of(source)
            machine.track(storage, place, instead=instead, charged=not tensor._is_zerotensor())
        elif known.nbytes != storage.nbytes():
            machine.resized(known, storage)


def take_higher_order(patches: Patches) -> None:
    """Have higher-order operators call the mode, which early versions (2.6) do of modes alone that
    each of them knows.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    kind = torch._ops.HigherOrderOperator
    original = kind.dispatch

    def dispatch(operator: Any, /, key: Any, *args: Any, **kwargs: Any) -> Any:
        if DispatchMode not in operator.python_key_table:
            operator.python_key_table[DispatchMode] = lambda mode, *args, **kwargs: (
                mode.__torch_dispatch__(operator, (), args, kwargs)
            )
        return original(operator, key, *args, **kwargs)

    patches.set(kind, "dispatch", dispatch)


def _names_device(kwargs: dict[str, Any]) -> bool:
    """Whether a call names a CUDA device that its kernel would look for."""
    device = kwargs.get("device")
    return device is not None and device.type == "cuda"


def _unwraps_first(types: Any) -> bool:
    """Whether one of the classes of an operator's tensors takes it apart by itself."""
    for kind in types:
        if kind not in _PLAIN:
            handler = getattr(kind, "__torch_dispatch__", None)
            if handler is not None and handler is not torch._C._disabled_torch_dispatch_impl:
                return True
    return False
