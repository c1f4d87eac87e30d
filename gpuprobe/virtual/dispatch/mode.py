"""The dispatch mode of a virtual device: every operator below autograd, its memory and its place.

New storages get the place that the call asked for, else that of its inputs; tensors in different
places are refused as CUDA refuses them. What an operator does beyond allocating its results is in
the lowering table (`gpuprobe.virtual.lowering`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpuprobe.virtual import values
from gpuprobe.virtual.dispatch import available
from gpuprobe.virtual.dispatch.calls import Call, Row
from gpuprobe.virtual.dispatch.refusals import refusal, two_places
from gpuprobe.virtual.machine import HOST, Machine, is_meta, parts
from gpuprobe.virtual.torch_patches import keys

__all__ = ["DispatchMode"]

_Tensor = torch.Tensor
_fake_mode = torch._C._get_dispatch_mode
_FAKE: Final = torch._C._TorchDispatchModeKey.FAKE
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Operators that take host tensors next to device ones, as on CUDA. Source: their CUDA kernels'
# checks, in aten/src/ATen/native.
_MIXED = frozenset(
    {
        "copy_",
        "_to_copy",
        "_copy_from",
        "_copy_from_and_resize",
        "index",
        "index_put_",
        "_index_put_impl_",
        "index_put",
        "set_",
        "_pack_padded_sequence",
        "_pad_packed_sequence",
        "_ctc_loss",
        "_cudnn_ctc_loss",
        "_use_cudnn_ctc_loss",
        "tensor_split",
        "record_stream",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_fused_adagrad_",
        "_foreach_copy_",
        "lift_fresh",
    }
)

# Results that stay on the host though the inputs lie on a device: position by operator.
_HOST_RESULTS = {
    "_pack_padded_sequence": (1,),
    # The random state: _efficient_attention_forward in attention.cu. While a graph is captured it
    # lies on the device; that is not counted.
    "_scaled_dot_product_efficient_attention": (2, 3),
}


class DispatchMode(TorchDispatchMode):
    """Pushed in every thread that uses the virtual machine."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, machine: Machine, rows: Mapping[str, Row]) -> None:
        super().__init__()
        self.machine = machine
        self._named_rows = rows
        self._facts: dict[Any, _Facts] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        machine = self.machine
        kwargs = kwargs or {}
        facts = self._facts.get(func)
        if facts is None:
            if isinstance(func, torch._ops.HigherOrderOperator):
                return self._in_parts(func, args, kwargs)
            facts = self._facts[func] = self._learn(func)
        if _fake_mode(_FAKE) is not None:
            # Shapes that torch itself works out (DTensor, compilers): no memory of any device's.
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind not in _PLAIN and _dispatches(kind):
                return NotImplemented  # the subclass unwraps first; its parts come back here
        if machine.closed:
            return func(*args, **kwargs)
        if machine.local.paused:
            if machine.shapes:
                func = facts.by_shape or func
                if facts.by_shape is None and any(is_meta(item) for item in _tensors(args)):
                    args = values.without_values(args)
            return self._run(func, args, kwargs)
        if facts.composite:  # inference mode hands composite operators over whole
            with self, keys.above():
                return func.decompose(*args, **kwargs)

        device, host, meta = self._places(args, kwargs)
        new_place = machine.local.new_place
        if host is not None and device >= 0 and new_place is None and not facts.mixed:
            self._same_place(func, args, kwargs, device)
        if device >= 0 and new_place is None:
            if facts.fills:
                if machine.local.fresh:
                    self._follow(args[0], device)
            elif facts.refusal is not None or (facts.in_place and not facts.mixed):
                self._refuse(facts, func, args, device)
        place = new_place if new_place is not None else device
        given = args
        if machine.shapes and meta:
            if facts.needs_values:
                answer = values.answer(machine, func, args)
                if answer is not values.NO_ANSWER:
                    if machine.observer is not None and device >= 0:
                        machine.observer.device_op(func, args, kwargs, answer, device)
                    return answer
            if facts.by_shape is not None:
                func = facts.by_shape
            else:
                args = values.without_values(args)
            kwargs = {name: values.without_values(value) for name, value in kwargs.items()}
        if device >= 0 or place >= 0:
            return self._on_device(facts, func, args, kwargs, device, place, given is not args)
        run = functools.partial(self._draw, HOST) if facts.draws else self._run
        result = run(func, args, kwargs)
        if place != HOST or new_place is not None:
            self._track_results(result, place, facts, None)
        elif machine.shapes:
            self._track_host_results(args, result, facts)
        if machine.local.fresh:
            self._freshness(args, result)
        if machine.observer is not None:
            machine.observer.host_op(func, args, kwargs, result)
        return result

    def _in_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A higher-order operator (``flex_attention``, ``cond``): its eager form, in Python."""
        if func.name() == "cond":  # its eager form refuses to run under a mode
            chosen, otherwise, operands = args[1:4]
            with self, keys.above():
                return (chosen if args[0] else otherwise)(*operands)
        kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if kernel is None:
            raise values.not_modelled(f"the higher-order operator {func}")
        with self, keys.above():
            return kernel(*args, **kwargs)

    def _on_device(
        self,
        facts: _Facts,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: int,
        place: int,
        copied: bool,
    ) -> Any:
        machine = self.machine
        row = facts.row
        index = place if place >= 0 else device
        if machine.capture is not None:
            machine.capture.about_to_run(func, args, kwargs)
        if row is None:
            result = self._made(facts, func, args, kwargs, place, index)
            self._track_results(result, place, facts, None)
        else:
            call = Call(machine, machine.devices[index], machine.stream(index), func, args, kwargs)
            call.copied = copied
            try:
                if row.before is not None:
                    row.before(call)
                source = row.reuse(call) if row.reuse is not None else None
                there = place if source is None else HOST  # memory that is reused is there
                result = call.result = self._made(facts, func, args, kwargs, there, index)
                self._track_results(result, place, facts, source)
                if row.after is not None:
                    row.after(call)
            finally:
                call.release()
        if machine.capture is not None:
            machine.capture.note(func, args, kwargs, result)
        if machine.observer is not None:
            machine.observer.device_op(func, args, kwargs, result, index)
        return result

    def _made(
        self,
        facts: _Facts,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: int,
        index: int,
    ) -> Any:
        """What the host's kernel makes for ``place``. Raises torch.OutOfMemoryError where it is
        more than that device has left, if possible before the host is asked for it.
        """
        machine = self.machine
        run = functools.partial(self._draw, index) if facts.draws else self._run
        if place < 0 or machine.shapes or facts.writes:
            return run(func, args, kwargs)
        device = machine.devices[place]
        if available.may_not_fit(device, args):
            available.require(device, machine.stream(place), self._run, func, args, kwargs)
        try:
            return run(func, args, kwargs)
        except RuntimeError as error:
            if available.HOST_FULL not in str(error):
                raise
            failure = error
        available.require(device, machine.stream(place), self._run, func, args, kwargs)
        raise failure

    def _draw(self, place: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`_run`, with random numbers from the generator of ``place``."""
        with self.machine.generators.draw(place, (*args, *kwargs.values())):
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The host's kernel. Meta kernels are often Python code: what they ask of tensors must
        be answered as if there were no virtual device.
        """
        local = self.machine.local
        before, local.inside = local.inside, True
        try:
            with keys.below():
                return func(*args, **kwargs)
        except NotImplementedError as error:
            if self.machine.shapes and "Meta" in str(error):
                raise values.no_shape_rule(func) from None
            raise
        finally:
            local.inside = before

    # -- places

    def _places(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Any | None, bool]:
        """The device of the arguments (-1: none), one host tensor that is not a scalar, and
        whether any has no values.
        """
        device = -1
        host = None
        meta = False
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
                if is_meta(tensor):
                    meta = True
                if tag is None or tag.place < 0:
                    if host is None and tensor.dim():
                        host = tensor
                elif device < 0:
                    device = tag.place
                elif device != tag.place and host is None:
                    host = tensor  # on another device: as wrong as on the host
        return device, host, meta

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
            or machine.fresh(storage._cdata, values.instruction())
            or values.in_engine()
        ):
            machine.track(storage, device)
            return True
        return False

    def _refuse(self, facts: _Facts, func: Any, args: tuple[Any, ...], device: int) -> None:
        """What else CUDA refuses, of tensors of which one lies on ``device``."""
        name = func._schema.name.removeprefix("aten::")
        place = self.machine.place_of
        first = args[0]
        if facts.in_place and isinstance(first, _Tensor) and not first.dim():
            # A number on the host is read from a device, but not written to from there.
            if place(first) < 0 and not self._joins(first, device):
                raise two_places(device, -1, name)
        elif facts.refusal is not None:
            for item in (first, *args[2:3]):  # what is indexed, and what is put there
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
        if machine.fresh(storage._cdata, values.instruction()):
            machine.track(storage, device)

    def _track_host_results(self, args: tuple[Any, ...], result: Any, facts: _Facts) -> None:
        """Results of host tensors are host tensors. What has no place yet gets one with its
        first use: C++ code makes tensors "like this one", which may be a device's.
        """
        for tensor in _tensors(args):
            if self.machine.tag_of(tensor) is not None or not is_meta(tensor):
                self._track_results(result, HOST, facts, None)
                return

    def _freshness(self, args: tuple[Any, ...], result: Any) -> None:
        """What is made of tensors made in this very instruction is so too (`Machine.fresh`)."""
        fresh = self.machine.local.fresh
        if any(_storage_key(tensor) in fresh for tensor in _tensors(args)):
            fresh.update(_storage_key(tensor) for tensor in _tensors((result,)))

    def _track_results(self, result: Any, place: int, facts: _Facts, source: Any) -> None:
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

    def _learn(self, func: Any) -> _Facts:
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        overload = schema.overload_name or "default"
        row = self._named_rows.get(f"{name}.{overload}") or self._named_rows.get(name)
        return _Facts(
            row=row if schema.name.startswith("aten::") else None,
            mixed=name in _MIXED or name.startswith("_foreach_"),
            fills=name == "copy_",
            refusal=refusal(name),
            composite=_composite(func),
            draws=torch.Tag.nondeterministic_seeded in func.tags,
            in_place=bool(schema.returns)
            and all(
                item.alias_info is not None and item.alias_info.is_write for item in schema.returns
            ),
            by_shape=values.BY_SHAPE.get(name),
            needs_values=name in values.NEED_VALUES,
            host_results=_HOST_RESULTS.get(name, ()),
            writes=any(
                item.alias_info is not None and item.alias_info.is_write
                for item in schema.arguments
            ),
        )


class _Facts:
    """What the mode needs to know about one operator; looked up once."""

    __slots__ = (
        "by_shape",
        "composite",
        "draws",
        "fills",
        "host_results",
        "in_place",
        "mixed",
        "needs_values",
        "refusal",
        "row",
        "writes",
    )

    def __init__(
        self,
        *,
        row: Row | None,
        mixed: bool,
        fills: bool,
        refusal: Callable[..., None] | None,
        composite: bool,
        draws: bool,
        in_place: bool,
        by_shape: Callable[..., Any] | None,
        needs_values: bool,
        host_results: tuple[int, ...],
        writes: bool,
    ) -> None:
        self.row = row
        self.mixed = mixed
        self.fills = fills
        self.refusal = refusal
        self.composite = composite
        self.draws = draws
        self.in_place = in_place
        self.by_shape = by_shape
        self.needs_values = needs_values
        self.host_results = host_results
        self.writes = writes


def _tensors(values_: Any) -> Iterator[Any]:
    for value in values_:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage_key(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _composite(func: Any) -> bool:
    """Whether an operator is made of others and has no kernel or formula of its own."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    try:
        if not has(name, "CompositeImplicitAutograd"):
            return False
    except RuntimeError:  # `sym_size` and its kin, which the dispatcher does not know
        return False
    return not any(has(name, key) for key in ("CPU", "Meta", "CompositeExplicitAutograd"))


def _dispatches(kind: type) -> bool:
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not None and handler is not torch._C._disabled_torch_dispatch_impl
