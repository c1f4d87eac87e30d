"""Values of operators on the device: each is run again on the CPU, over the same memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes as _disabled

from gpuprobe.errors import NotModelled
from gpuprobe.native.process import ExchangedCollectives
from gpuprobe.native.values.aliases import CPU, Aliases, parts_of
from gpuprobe.native.values.arguments import Args, Kwargs
from gpuprobe.native.values.attention import KEYED
from gpuprobe.native.values.budget import Budget, ensure_on_host
from gpuprobe.native.values.counts import COALESCING, COUNTS
from gpuprobe.native.values.draws import Apart, Key, generator_of, key_of
from gpuprobe.native.values.exchanges import CapturedCollective, check_captured
from gpuprobe.native.values.plans import MASKED, How, OperatorPlan, masked, plan_of
from gpuprobe.native.values.skipping import BETWEEN, COPYING, INSIDE, Skipping
from gpuprobe.native.values.twins import TWINS
from gpuprobe.torch_support.operator_calls import HANDLED, handled_by

_T = TypeVar("_T")
_Tensor: Final = torch.Tensor
_Device: Final = torch.device
_Generator: Final = torch.Generator
_Exclude = torch._C._ExcludeDispatchKeyGuard
_Plain = torch._C.DisableTorchFunction
_KeySet = torch._C.DispatchKeySet
_ABOVE: Final = (
    _KeySet(torch._C.DispatchKey.AutogradFunctionality)
    | _KeySet(torch._C.DispatchKey.AutogradOther)
    | _KeySet(torch._C.DispatchKey.AutogradNestedTensor)
    | _KeySet(torch._C.DispatchKey.ADInplaceOrView)
    | _KeySet(torch._C.DispatchKey.AutocastCPU)
    | _KeySet(torch._C.DispatchKey.AutocastCUDA)
    | HANDLED
)
"""What a CPU kernel must not pass through: the program's graph, its autocasting and a watch have
had their part with the operator itself."""
_CUDA: Final = _KeySet(torch._C.DispatchKey.CUDA)
_SPARSE: Final = _KeySet(torch._C.DispatchKey.SparseCUDA)
_COMPRESSED: Final = _KeySet(torch._C.DispatchKey.SparseCsrCUDA)
_NARROW: Final = frozenset(
    dtype
    for name in (
        "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if (dtype := getattr(torch, name, None)) is not None
)  # fmt: skip
_NO_KERNEL: Final = (
    "not implemented for",
    "not supported",
    "Unsupported",
    "unsupported",
    "expected",
)
_LAUNCH_ONLY: Final = frozenset({"mode", "embedding_renorm_"})
"""What these read decides how kernels are launched, and nothing else."""


_SIZED: Final = frozenset({How.ANSWER, How.COUNTS})
"""Operators that give the host a size or a decision, which cannot be zero instead."""


class Call:
    """One operator made for the CPU, to be run now or at each replay of a CUDA graph."""

    __slots__ = ("args", "key", "kwargs", "plan", "results", "storages")

    def __init__(self, plan: OperatorPlan, args: list[object], kwargs: Kwargs, key: Key | None):
        self.plan = plan
        self.args = args
        self.kwargs = kwargs
        self.key = key
        self.results: list[Target] = []
        self.storages: list[int] = []
        """The storages that a replay writes, by number, where values may be unknown."""

    def run(self, computing: Computing) -> None:
        """Compute the call, at a replay of the graph that it is in."""
        computing.compute(self)


Recorded: TypeAlias = Call | CapturedCollective
"""What a graph replays."""
Target: TypeAlias = Tensor | list[Tensor | None] | None
"""Where a result of an operator is: a tensor, several, or nothing that has values."""


class Capture:
    """The calls of one CUDA graph, in order."""

    def __init__(self) -> None:
        self.calls: list[Recorded] = []
        self._draws = 0

    def next_key(self) -> Key:
        """A number of the draw: `replayed` puts the generator's state in its place."""
        self._draws += 1
        return 0, self._draws

    def keyed(self, base: Key) -> None:
        """Give the draws of the next replay their keys."""
        for call in self.calls:
            if call.key is not None:
                number = call.key[1] & 0xFFFFFFFF
                call.key = base[0], (base[1] << 32) | number


class _Region(threading.local):
    """Whether a thread runs compiled code."""

    compiled = False


class Computing:
    """Runs operators on CUDA, and on the CPU over the same memory.

    One instance serves all threads; entering is done by `Values`.
    """

    def __init__(self, skipping: Skipping, exchanged: ExchangedCollectives) -> None:
        self.aliases = Aliases()
        self.exchanged = exchanged
        self._region = _Region()
        self.skipping = skipping
        self.capture: Capture | None = None
        """Where calls are kept while a CUDA graph is captured."""
        self.budget: Budget | None = None
        """What may be computed, where that is bounded."""
        self.carrier: Callable[[OpOverload, Args, Kwargs], Callable[..., Any]] | None = None
        """Finds what to call for a collective, in a rank that is alone."""
        self.launches: tuple[Callable[[], int], Callable[[int], int]] | None = None
        """Number the place that calls an operator, and set it, while launches are counted."""
        self._plans: dict[OpOverload, OperatorPlan] = {}
        self._set = skipping.set
        self._reads = skipping.unknown_reads
        self._run: dict[How, Callable[..., object]] = {
            How.WHOLE: self._whole,
            How.PARTS: self._parts,
            How.READS: self._reading,
            How.COUNTS: self._counting,
            How.COPY: self._copying,
            How.EXCHANGE: self._exchanging,
            How.ANSWER: self._answering,
            How.FLATTEN: self._flattening,
        }

    def handle(self, func: OpOverload, args: Args, kwargs: Kwargs, below: object = None) -> object:
        """Run an operator on plain tensors, and compute its values: a handler of
        `gpuprobe.torch_support.operator_calls`.
        """
        launches = self.launches
        if self._region.compiled:
            return self.placed(func, *args, **kwargs)
        plan = self._plans.get(func) or self.plan(func)
        if launches is None:
            return self.operate(plan, func, args, kwargs)
        # `placed`, without its call for each operator
        here, set_place = launches
        before = set_place(here())
        try:
            return self.operate(plan, func, args, kwargs)
        finally:
            set_place(before)

    def placed(self, run: Callable[..., _T], *args: object, **kwargs: object) -> _T:
        """Run what launches kernels: while launches are counted, from the place that calls it."""
        launches = self.launches
        if launches is None:
            return run(*args, **kwargs)
        here, set_place = launches
        before = set_place(here())
        try:
            return run(*args, **kwargs)
        finally:
            set_place(before)

    @contextmanager
    def compiled_region(self) -> Iterator[None]:
        """Operators that this thread calls run, and their values are computed elsewhere."""
        before, self._region.compiled = self._region.compiled, True
        try:
            yield
        finally:
            self._region.compiled = before

    def plan(self, func: OpOverload) -> OperatorPlan:
        """The plan for an operator, made once."""
        found = self._plans.get(func)
        if found is None:
            found = self._plans[func] = plan_of(func)
        return found

    def operate(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        run = self._run.get(plan.how)
        if plan.allocates:
            _check_host(args, kwargs)
        if self.budget is not None and self.budget.measuring:
            self._check_read(plan, args)
        if run is None:
            return func(*args, **kwargs)
        return run(plan, func, args, kwargs)

    def _check_read(self, plan: OperatorPlan, args: Args) -> None:
        """Note that the host may read a value while the cost is measured: it finds what the memory
        holds. End the measurement where that would be a size.
        """
        budget = self.budget
        assert budget is not None
        if plan.how in _SIZED and any(map(_on_cuda, args)):
            budget.end()
        elif plan.how is How.SCALAR or plan.how is How.COPY:
            budget.read()

    def computes(self, tensors: Iterable[object]) -> bool:
        """Whether what does not pass the dispatcher is computed, of these arguments."""
        return self.budget is None or not self.budget.measuring

    def allows(self, operations: float, nbytes: int = 0, *, counted: bool = False) -> bool:
        """Whether something may be computed that costs so much, and takes so many bytes on the
        host. ``counted``: its operators are counted one by one. Raises TooLarge beyond a bound that
        was requested.
        """
        return self.budget is None or self.budget.affords(operations, nbytes, counted=counted)

    def replay(self, calls: Iterable[Recorded]) -> None:
        """Compute the calls of a CUDA graph."""
        for call in calls:
            call.run(self)

    def play(self, collective: CapturedCollective) -> None:
        """Run a collective of a graph."""
        self.exchanged.play(collective.number)

    def written(self, tensor: Tensor) -> None:
        """Values were written to a tensor without an operator."""

    def counted(self, call: Call, result: object) -> None:
        """An operator of a compiled region was computed."""
        if self.budget is not None:
            self.budget.allows(call, result)

    @contextmanager
    def below(self) -> Iterator[None]:
        """Plain tensors: without autograd, autocasting, watches and the program's own modes."""
        with _disabled(), _Plain(), _Exclude(_ABOVE), torch.no_grad():
            yield

    # --- arguments

    def _lower(self, value: Any) -> tuple[Any, bool]:
        """A value among arguments made for the CPU, and whether it was on the device."""
        if isinstance(value, _Tensor):
            if value.is_cuda:
                return self.aliases.of(value), True
            if self.capture is not None and value.device.type == "cpu":
                # A replay reads the memory that it has then.
                return (self.aliases.of(value) if value.dim() else value.clone()), False
            return value, False
        kind = type(value)
        if kind is list or kind is tuple:
            made, any_there = [], False
            for item in value:
                low, there = self._lower(item)
                made.append(low)
                any_there = any_there or there
            return (made if kind is list else tuple(made)), any_there
        if kind is _Device:
            return (CPU, True) if value.type == "cuda" else (value, False)
        return value, False

    def lower(self, plan: OperatorPlan, args: Args, kwargs: Kwargs) -> Call | None:
        """The call made for the CPU, or None for one that has nothing to do with the device."""
        found = False
        made: list[object] = []
        with _Plain(), _Exclude(_ABOVE):
            for value in args:
                if isinstance(value, _Tensor) and value.is_cuda:
                    made.append(
                        self.aliases.exact(value) if plan.whole_storage else self.aliases.of(value)
                    )
                    found = True
                elif type(value) in _SIMPLE:
                    made.append(value)
                else:
                    low, there = self._lower(value)
                    made.append(low)
                    found = found or there
            given: Kwargs = {}
            if kwargs:
                for name, value in kwargs.items():
                    low, there = self._lower(value)
                    given[name] = low
                    found = found or there
                if given.get("pin_memory"):
                    given["pin_memory"] = False
        return Call(plan, made, given, None) if found else None

    def _key(self, plan: OperatorPlan, args: Args, kwargs: Kwargs) -> Key | None:
        if not plan.random and plan.name not in KEYED:
            return None
        if self.capture is not None:
            drawn: Key = self.capture.next_key()
            return drawn
        generator = kwargs.get("generator")
        device = kwargs.get("device")
        for value in args:
            if isinstance(value, _Generator):
                generator = value
            elif isinstance(value, _Tensor) and device is None:
                device = value.device
        if generator is not None and generator.device.type != "cuda":
            return None
        return key_of(generator, device)

    @staticmethod
    def may_read(plan: OperatorPlan) -> bool:
        """Whether the zeros that the host reads are right, or decide no result: linear algebra
        reads that it succeeded.
        """
        name = plan.name
        return name in _LAUNCH_ONLY or name.startswith(
            ("linalg_", "_linalg_", "cholesky", "_cholesky")
        )

    # --- ways

    def _whole(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        call = self.lower(plan, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        if plan.random or plan.name in KEYED:
            call.key = self._key(plan, args, kwargs)
        reads = self._reads()
        out = self.operated(plan, func, args, kwargs)
        if (
            self._reads() != reads
            and not self.may_read(plan)
            and not of_sparse(args, kwargs)  # of these the sizes are compared: see _put
        ):
            raise NotModelled(
                f"{plan.func}: the host reads what its kernels compute, which is unknown",
                hint="report it; compute this operator on the CPU",
            )
        if plan.out:  # out= may have been resized
            key, call = call.key, self.lower(plan, args, kwargs) or call
            call.key = key
        return self.finish(call, out)

    def operated(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator that is computed as a whole: its kernels do nothing."""
        sparse = [item for item in args if _uncoalesced(item)] if plan.name in COALESCING else ()
        for item in sparse:
            self.skipping.answer(self.indices_of(item), 4)
        before = self._set(INSIDE)
        try:
            return func(*args, **kwargs)
        finally:
            self._set(before)
            if sparse:
                self.skipping.forget()

    def indices_of(self, tensor: Tensor) -> int:
        """How many indices of a sparse tensor differ."""
        if self.budget is not None and self.budget.measuring:
            return tensor._nnz()
        with self.below():
            indices = self.aliases.of(tensor._indices())
            place = torch.zeros(indices.size(1), dtype=torch.int64)
            for index, size in zip(indices, tensor.shape, strict=False):
                place.mul_(size).add_(index)
            return place.unique().numel()

    def finish(self, call: Call, out: Any) -> Any:
        """Compute the values of a call whose operator has run, with the result ``out``."""
        if call.plan.fresh:
            call.results = self.targets(call.plan, out)
        if self.capture is not None:
            self.capture.calls.append(call)
        elif self.budget is None or self.budget.allows(call, out):
            out = self.compute(call, out)
        return out

    def targets(self, plan: OperatorPlan, out: Any) -> list[Target]:
        """CPU tensors over the new tensors among results; sparse ones themselves."""
        outs = (
            out if isinstance(out, (tuple, list)) and len(plan.func._schema.returns) > 1 else (out,)
        )
        made: list[Target] = []
        with _Plain(), _Exclude(_ABOVE):
            for i in plan.fresh:
                item = outs[i]
                if isinstance(item, (list, tuple)):
                    made.append([self._target(one) for one in item])
                else:
                    made.append(self._target(item))
        return made

    def _target(self, item: object) -> Tensor | None:
        if not isinstance(item, _Tensor):
            return None
        if item.layout is not torch.strided:
            return item
        return self.aliases.of(item) if item.device.type in ("cuda", "cpu") else None

    def compute(self, call: Call, out: Any = None) -> Any:
        """Run the CPU's kernel of a call and put its results where the operator's are."""
        found = self.found(call)
        plan = call.plan
        if not plan.fresh:
            return out
        many = len(plan.func._schema.returns) > 1
        with _Plain(), _Exclude(_ABOVE):
            for target, i in zip(call.results, plan.fresh, strict=True):
                value = found[i] if many else found
                if type(target) is list:
                    for one, item in zip(target, value or (), strict=False):
                        self._put(plan, one, item)
                elif value is not None and target is not None:
                    replaced = self._put(plan, target, value)
                    if replaced is not None:
                        if many:
                            out = tuple(replaced if j == i else item for j, item in enumerate(out))
                        else:
                            out = replaced
        return out

    def _put(self, plan: OperatorPlan, target: Tensor | None, value: object) -> Tensor | None:
        if not isinstance(value, _Tensor) or target is None:
            return None
        if target.layout is not torch.strided:
            return self._put_sparse(plan, target, value)
        if target.shape != value.shape:
            if target.numel() == value.numel():
                value = value.reshape(target.shape)
            elif not target.numel() or (not value.numel() and plan.how is How.COUNTS):
                return None  # a result that was not requested
            else:
                raise NotModelled(
                    f"{plan.func}: a result of shape {tuple(target.shape)} on CUDA has shape "
                    f"{tuple(value.shape)} on the CPU"
                )
        target.copy_(value)
        return None

    def _put_sparse(self, plan: OperatorPlan, target: Tensor, value: Tensor) -> Tensor | None:
        """Copy a sparse result; where it has another number of elements, return a new tensor."""
        parts, values = parts_of(target), parts_of(value)
        if value.layout is torch.sparse_coo and target.layout is torch.sparse_coo:
            if all(a.shape == b.shape for a, b in zip(parts, values, strict=True)):
                for part, item in zip(parts, values, strict=True):
                    self.aliases.of(part).copy_(item)
                return None
            made = []
            for item in values:
                part = torch.empty(item.shape, dtype=item.dtype, device=target.device)
                self.aliases.of(part).copy_(item)
                made.append(part)
            return torch.sparse_coo_tensor(
                *made,
                value.size(),
                device=target.device,
                check_invariants=False,
                is_coalesced=value.is_coalesced(),
            )
        if len(parts) == len(values) and all(
            a.shape == b.shape for a, b in zip(parts, values, strict=True)
        ):
            for part, item in zip(parts, values, strict=True):
                self.aliases.of(part).copy_(item)
            return None
        raise NotModelled(f"{plan.func}: a sparse result of layout {target.layout}")

    def found(self, call: Call) -> Any:
        """The CPU's results of a call."""
        plan, args, kwargs = call.plan, call.args, call.kwargs
        func = plan.func
        key = call.key
        keyed = KEYED.get(plan.name) if func._overloadname == "default" else None
        if keyed is not None:
            run: Callable[..., Any] = keyed
            args = [key or (0, 0), *args]
            key = None
        else:
            run = TWINS.get(f"{plan.name}.{func._overloadname}", func)
        if self._profiling():
            torch.autograd._enable_record_function(False)
            try:
                return self._guarded(plan, run, args, kwargs, key)
            finally:
                torch.autograd._enable_record_function(True)
        return self._guarded(plan, run, args, kwargs, key)

    @staticmethod
    def _profiling() -> bool:
        return bool(torch._C._autograd._profiler_enabled())

    def _guarded(
        self,
        plan: OperatorPlan,
        run: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        key: Key | None,
    ) -> Any:
        with _Plain(), _Exclude(_ABOVE):
            if key is None:
                return self._attempt(plan, run, args, kwargs)
            if plan.takes_generator:
                generator = generator_of(key)
                given = dict(kwargs)
                positional = [generator if isinstance(v, _Generator) else v for v in args]
                if not any(v is generator for v in positional):
                    given["generator"] = generator
                return self._attempt(plan, run, positional, given)
            with Apart(key):
                return self._attempt(plan, run, args, kwargs)

    def _attempt(
        self, plan: OperatorPlan, run: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> object:
        if plan.in_float32 and _has_narrow(args):
            return _in_float32(plan, run, args, kwargs)
        try:
            return run(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, NotModelled):
                raise
            text = str(error).strip().partition("\n")[0].partition(" This could be")[0] or repr(
                error
            )
            if _has_narrow(args) and any(words in text for words in _NO_KERNEL):
                try:
                    made = _in_float32(plan, run, args, kwargs)
                except (RuntimeError, NotImplementedError):
                    pass
                else:
                    plan.in_float32 = True
                    return made
            raise NotModelled(
                f"{plan.func}: the CPU does not compute its values: {text}",
                hint="use compute='shapes', or the CPU for this operator",
            ) from error

    def _parts(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """The operators that an operator consists of are computed one by one."""
        with handled_by(self.handle):
            return func.redispatch(_keys(args, kwargs), *args, **kwargs)

    def _reading(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        if plan.name in MASKED and not masked(args):
            return self._whole(plan, func, args, kwargs)
        call = self.lower(plan, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        call.key = self._key(plan, args, kwargs)
        before = self._set(BETWEEN)
        capture, self.capture = self.capture, None
        try:
            out = self._parts(plan, func, args, kwargs)
        finally:
            self.capture = capture
            self._set(before)
        if plan.out:
            key, call = call.key, self.lower(plan, args, kwargs) or call
            call.key = key
        return self.finish(call, out)

    def _exchanging(
        self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> object:
        """The runtime carries the values from process to process."""
        if self.carrier is not None:
            func = self.carrier(func, args, kwargs)
        if self.capture is None:
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        captured = self.exchanged.captured()
        if captured:
            check_captured(plan.func)
            self.capture.calls += map(CapturedCollective, captured)
        return out

    def settle(self) -> None:
        """Have the results of collectives in memory: before values are read there that no kernel of
        the same operator waits for.
        """
        if self.exchanged.waiting:
            self.exchanged.settle()

    def _counting(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        call = self.lower(plan, args, kwargs)
        if call is None or self.capture is not None:
            return func(*args, **kwargs)
        self.settle()
        if plan.out:
            # The CPU's kernel would resize a tensor over memory that it does not own.
            given = {
                name: torch.empty(0, dtype=value.dtype, device=CPU)
                if name in plan.written
                else value
                for name, value in call.kwargs.items()
            }
            call.kwargs = given
        found = self.found(call)
        skipping = self.skipping
        for value, size in COUNTS[plan.name](call.args, found):
            skipping.answer(value, size)
        before = self._set(INSIDE)
        reads = self._reads()
        try:
            out = func(*args, **kwargs)
        finally:
            self._set(before)
            skipping.forget()
        if self._reads() != reads:
            raise NotModelled(
                f"{plan.func}: the host reads more than the count that its kernels compute",
                hint="report it; compute this operator on the CPU",
            )
        many = len(plan.func._schema.returns) > 1
        outs = out if many else (out,)
        values = found if many else (found,)
        with _Plain(), _Exclude(_ABOVE):
            for item, value in zip(outs, values, strict=True):
                replaced = self._put(plan, self._target(item), value)
                if replaced is not None and not many:
                    out = replaced
        return out

    def _copying(self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        call = self.lower(plan, args, kwargs)
        if call is None:
            if any(_on_cuda(item) for item in args):
                raise NotModelled(f"{plan.func}: tensors that are not on the device alone")
            return func(*args, **kwargs)
        before = self._set(COPYING)
        try:
            out = func(*args, **kwargs)
        finally:
            self._set(before)
        return self.finish(call, out)

    def _flattening(
        self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> object:
        """The weights become views of the result."""
        self.settle()
        with _Plain(), _Exclude(_ABOVE):
            values = [self.aliases.of(weight).clone() for weight in args[0]]
        before = self._set(INSIDE)
        try:
            out = func(*args, **kwargs)
        finally:
            self._set(before)
        with _Plain(), _Exclude(_ABOVE):
            for weight, value in zip(args[0], values, strict=True):
                self.aliases.of(weight).copy_(value)
        return out

    def _answering(
        self, plan: OperatorPlan, func: OpOverload, args: Args, kwargs: Kwargs
    ) -> object:
        call = self.lower(plan, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        before = self._set(INSIDE)
        try:
            func(*args, **kwargs)  # for its memory
        finally:
            self._set(before)
        return self.found(call)


_LARGE_ON_HOST: Final = 4 << 20
"""Elements of a tensor on the CPU from which its memory is checked: that takes 50 us."""


def _check_host(args: Args, kwargs: Kwargs) -> None:
    """Check, before it is made, that a large tensor on the CPU fits in this machine's memory."""
    first: Any = args[0] if args else None
    given = isinstance(first, _Tensor)
    size = next((item for item in args if type(item) is list), None)
    count = math.prod(size) if size is not None else first.numel() if given else 0
    if count < _LARGE_ON_HOST or kwargs.get("pin_memory"):  # CUDA refuses that itself
        return
    device = kwargs.get("device")
    if device is None:
        device = first.device if given else CPU
    if _Device(device).type == "cpu":
        dtype = kwargs.get("dtype") or (first.dtype if given else torch.get_default_dtype())
        ensure_on_host(count * dtype.itemsize)


_SIMPLE: Final = frozenset({int, float, bool, str, type(None), torch.dtype})


def _on_cuda(item: object) -> bool:
    return isinstance(item, _Tensor) and bool(item.is_cuda)


def _uncoalesced(item: Any) -> bool:
    """Whether an argument is a sparse tensor of the device that may have an index twice."""
    if not isinstance(item, _Tensor) or item.layout is not torch.sparse_coo or not item.is_cuda:
        return False
    return not item.is_coalesced()


def of_sparse(args: Args, kwargs: Kwargs) -> bool:
    """Whether an operator has a sparse argument."""
    return _keys(args, kwargs) is not _CUDA


def _keys(args: Args, kwargs: Kwargs) -> torch._C.DispatchKeySet:
    """The dispatch keys of CUDA's kernels for some arguments."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, _Tensor):
            if item.layout is torch.sparse_coo:
                return _SPARSE
            if item.layout is not torch.strided:
                return _COMPRESSED
    return _CUDA


def _has_narrow(args: Args) -> bool:
    for item in args:
        if isinstance(item, _Tensor):
            if item.dtype in _NARROW or item.dtype is torch.complex32:
                return True
        elif isinstance(item, (list, tuple)) and _has_narrow(item):
            return True
    return False


def _in_float32(plan: OperatorPlan, run: Callable[..., Any], args: Args, kwargs: Kwargs) -> object:
    """Run a CPU function in float32, and round what it writes."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def wide(value: object) -> object:
        if isinstance(value, _Tensor):
            if value.dtype in _NARROW:
                made = value.to(torch.float32)
            elif value.dtype is torch.complex32:
                made = value.to(torch.complex64)
            else:
                return value
            pairs.append((value, made))
            return made
        if isinstance(value, (list, tuple)):
            return type(value)([wide(item) for item in value])
        if isinstance(value, torch.dtype) and value in _NARROW:
            return torch.float32
        return value

    found = run(*[wide(item) for item in args], **{k: wide(v) for k, v in kwargs.items()})
    if plan.written:
        for value, made in pairs:
            value.copy_(made)
    return found
