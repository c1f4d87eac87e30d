"""What values cost, which is known before they are computed, and what may be spent."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Final

import psutil
import torch
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpuprobe.clocks import process_time
from gpuprobe.errors import CostMeasured, ProgramFailed, TooLarge
from gpuprobe.model.text import human_bytes
from gpuprobe.native.process import Runtime
from gpuprobe.native.values.arguments import Args, Kwargs
from gpuprobe.native.values.attention import KEYED
from gpuprobe.native.values.counts import COUNTS
from gpuprobe.native.values.plans import OperatorPlan
from gpuprobe.torch_support.callers import place_now
from gpuprobe.torch_support.tensors import tensors_in

MEMORY: Final = 16 << 30
"""Bytes that tensors may take on the device at a time; at most half of this machine's available
memory, which holds them."""

OPERATIONS: Final = 2e13
"""Floating-point operations of a whole run: about five minutes on two cores, at the 30 to 80
billion a second that fp32 matrix products reach there."""

_OF_ONE_ELEMENT: Final = 10
"""Operations counted for an element of a result without a known formula: element-wise kernels are
bound by memory, and take about as long."""

AT_ONCE_MEMORY: Final = 256 << 20
"""Bytes on a device up to which ``--compute auto`` computes all values as the program runs."""

AT_ONCE_OPERATIONS: Final = 3e11
"""Floating-point operations up to which it does: about five seconds on two cores."""

OF_ONE_CALL: Final = 3e10
"""Floating-point operations of one operator up to which `shapes` computes it: about half a
second."""

KNOWN: Final = 4 << 30
"""Bytes of values that `shapes` keeps at a time; at most a quarter of this machine's available
memory. Unknown values take none."""

TEMPORARY: Final = 1 << 30
"""Bytes that the CPU may take for an operator in addition to its arguments and results on the
device."""

PER_SECOND: Final = 5e10
"""Floating-point operations a second that times are estimated with: fp32 matrix products reach 30
to 80 billion on two cores."""

HOUR: Final = 3600.0

LARGE: Final = 1 << 30
"""Bytes of a program's tensors from which its first step is measured before `real` computes it."""

MEASURING: Final = 30.0
"""Seconds of processor time after which a program without an optimizer's step is measured."""


_CGROUP: Final = Path("/sys/fs/cgroup")
_RESERVE: Final = 512 << 20
"""Bytes of this machine's memory that a program's tensors on the CPU must leave."""


def available_memory() -> int:
    """Bytes of this machine's memory that a process can still take: also within the limit of its
    control group (Linux: ``memory.max``, without what its files can give up).
    """
    available = int(psutil.virtual_memory().available)
    try:
        most = int((_CGROUP / "memory.max").read_text())
        held = int((_CGROUP / "memory.current").read_text())
        files = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return min(available, most - held + int(files.get("inactive_file", 0)))
    except (OSError, ValueError):  # no limit ("max"), or another system
        return available


def ensure_on_host(nbytes: int) -> None:
    """Check that a new tensor on the CPU fits in this machine's memory, before the kernel ends the
    process. Raises ProgramFailed.
    """
    available = available_memory()
    if nbytes + _RESERVE <= available:
        return
    raise ProgramFailed(
        "this machine does not have enough memory for a tensor that the program creates on the "
        f"CPU at {place_now()}: it needs another {human_bytes(nbytes)}, and "
        f"{human_bytes(max(0, available))} are available",
        hint='create it on the GPU, where it takes none: with torch.device("cuda"): model = '
        'Model(); or with torch.device("meta"), then model.to_empty(device="cuda")',
    )


def affordable_memory() -> int:
    """Bytes of tensors that may be computed without a request: `MEMORY`, and at most half of what
    this machine has available.
    """
    return min(MEMORY, available_memory() // 2)


def known_memory() -> int:
    """Bytes of values that `shapes` keeps at a time."""
    return min(KNOWN, available_memory() // 4)


_COPIES_OF_SCORES: Final = 6


def temporary_memory(plan: OperatorPlan, args: Args, kwargs: Kwargs) -> int:
    """Bytes that the CPU takes for an operator in addition to its arguments and results on the
    device: the scores of attention with dropout, which CUDA's kernels never have as a whole, and
    the results of operators that count elements, which are computed before there are any on the
    device.
    """
    if plan.name in COUNTS:
        given = next(tensors_in(args), None)
        return 0 if given is None else 8 * given.numel() * max(1, given.dim())
    if plan.name not in KEYED:
        return 0
    names = [argument.name for argument in plan.func._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if not named.get("dropout_p"):
        return 0
    query, key = named["query"], named["key"]
    rows = query.numel() // max(1, query.size(-1))
    return 4 * _COPIES_OF_SCORES * int(rows) * max(key.shape[1:-1])


@functools.cache
def flop_formulas() -> Mapping[Any, Callable[..., float]]:
    """The functions in ``torch/utils/flop_counter.py``, by operator.

    That module imports Triton, to recognise its kernels, which takes a second of processor time. As
    long as the program has not imported Triton, they are those of a copy that has no such import.
    """
    name = "torch.utils.flop_counter"
    if "triton" in sys.modules or name in sys.modules:
        original: Any = importlib.import_module(name)
        return dict(original.flop_registry)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    copied: Any = importlib.util.module_from_spec(spec)
    copied.__builtins__ = {**vars(builtins), "__import__": _without_triton}
    spec.loader.exec_module(copied)
    return dict(copied.flop_registry)


def _without_triton(name: str, *args: Any, **kwargs: Any) -> object:
    """``__import__`` of a module whose use of Triton is the class of its kernels."""
    if name.partition(".")[0] == "triton":
        return SimpleNamespace(JITFunction=NoneType)
    return builtins.__import__(name, *args, **kwargs)


def operations_of(func: OpOverload, args: Args, kwargs: Kwargs, result: object) -> float:
    """Floating-point operations of an operator, from the shapes of its arguments and its result."""
    formula = flop_formulas().get(getattr(func, "_overloadpacket", None))
    if formula is not None:
        if func._overloadname.startswith("dtype"):
            # addmm(…, out_dtype): by its place the formulas take it for the result's shape.
            args = tuple(one for one in args if not isinstance(one, torch.dtype))
        # Formulas of torch assert what they cover: attention whose heads share keys, they do not.
        with contextlib.suppress(AssertionError):
            return float(formula(*args, **kwargs, out_val=result))
    return float(_OF_ONE_ELEMENT * sum(tensor.numel() for tensor in tensors_in(result)))


class Cost:
    """What the values of a run cost so far, computed or not."""

    def __init__(self, runtime: Runtime) -> None:
        self.operations = 0.0
        self._runtime = runtime
        self._outside: dict[int, int] = {}

    def add(self, func: OpOverload, args: Args, kwargs: Kwargs, result: object) -> float:
        """Count an operator that has run on the device, before its values are computed. Returns
        its operations.
        """
        operations = operations_of(func, args, kwargs, result)
        self.operations += operations
        return operations

    def memory(self) -> int:
        """Bytes that torch's allocator holds on the fullest device."""
        most = 0
        for device in range(torch._C._cuda_getDeviceCount()):
            used = self._runtime.used(device)  # a microsecond; torch's statistics take thirty
            # What is outside the allocator grows: a context, libraries.
            if device not in self._outside or used - self._outside[device] > AT_ONCE_MEMORY:
                self._outside[device] = used - torch.cuda.memory_reserved(device)
            most = max(most, used - self._outside[device])
        return most

    @property
    def seconds(self) -> float:
        """About how long computing takes on two cores."""
        return self.operations / PER_SECOND


def too_large(cost: Cost, peak: int) -> str:
    """Why values that cost this much, of tensors that take ``peak`` bytes, are not computed without
    a request; "" if they are.
    """
    memory = affordable_memory()
    if peak > memory:
        return (
            f"its tensors need {human_bytes(peak)}, and this machine computes at most "
            f"{human_bytes(memory)}"
        )
    if cost.operations > OPERATIONS:
        return (
            f"it needs {cost.operations:.1e} floating-point operations, about "
            f"{_minutes(cost.seconds)}"
        )
    return ""


class Budget:
    """Raises `TooLarge` in the program once it has done more than it may."""

    def __init__(
        self, runtime: Runtime, memory: int | None = None, operations: float = OPERATIONS
    ) -> None:
        self.cost = Cost(runtime)
        self._memory = affordable_memory() if memory is None else memory
        self._operations = operations
        self.measuring = 0.0
        """When computing stopped to measure the cost of a step, 0 for never."""
        self.guessed = False
        """Whether the program has read a value that was therefore not computed."""

    def allows(self, call: Any, result: object) -> bool:
        """Count an operator that has run on the device, before its values are computed. Whether
        they are.
        """
        if self._needed(call) > self._memory:
            raise self._beyond_memory()
        self.cost.add(call.plan.func, call.args, call.kwargs, result)
        if self.cost.operations > self._operations:
            raise self._beyond_operations()
        return True

    def end(self) -> None:
        """The program has ended, or reads a size while its cost is measured."""

    def read(self) -> None:
        """The program reads a value while its cost is measured."""

    def affords(self, operations: float, nbytes: int, *, counted: bool) -> bool:
        """Whether something is computed of which all that it costs is known before."""
        if self.cost.memory() + nbytes > self._memory:
            raise self._beyond_memory()
        if self.cost.operations + operations > self._operations:
            raise self._beyond_operations()
        if not counted:
            self.cost.operations += operations
        return not self.measuring

    def _beyond_memory(self) -> TooLarge:
        return TooLarge(f"its tensors need more than {human_bytes(self._memory)}")

    def _beyond_operations(self) -> TooLarge:
        return TooLarge(f"it needs more than {self._operations:.0e} floating-point operations")

    def _needed(self, call: Any) -> int:
        return self.cost.memory() + temporary_memory(call.plan, call.args, call.kwargs)


class Requested(Budget):
    """What ``--compute real`` may spend: this machine's memory, and an hour.

    ``measure``: a program whose tensors take more than `LARGE` runs its first step without values
    (or what it does in `MEASURING` seconds), so that its cost is known. Beyond the bounds that
    raises `TooLarge`, else `CostMeasured`: it must then start again. Until then a value that it
    reads is what the memory holds, mostly zero: no measurement that ends at the first line of a log
    would know what an optimizer takes. ``on_measure`` is called as it begins.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        measure: bool = False,
        on_measure: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(runtime, available_memory(), HOUR * PER_SECOND)
        self._measure = measure
        self._on_measure = on_measure

    def allows(self, call: Any, result: object) -> bool:
        memory = self._needed(call)
        if self._measure and not self.measuring and memory > LARGE:
            self.measuring = process_time()
            self._on_measure()
            register_optimizer_step_post_hook(lambda *_: self._conclude("first step"))
        self.cost.add(call.plan.func, call.args, call.kwargs, result)
        if not self.measuring:
            if memory > self._memory or self.cost.operations > self._operations:
                raise self._refusal("beginning", memory)
            return True
        if process_time() - self.measuring > MEASURING:
            self._conclude("beginning")
        return False

    def end(self) -> None:
        """Raises what the end of the first step would."""
        if self.measuring:
            self._conclude("beginning")

    def read(self) -> None:
        self.guessed = True
        if process_time() - self.measuring > MEASURING:  # a loop that waits for a value
            self._conclude("beginning")

    def _conclude(self, what: str) -> None:
        peak = max(
            torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())
        )
        if peak > self._memory or self.cost.seconds > HOUR:
            raise self._refusal(what, peak)
        raise CostMeasured(
            f"{human_bytes(peak)}, and about {_minutes(self.cost.seconds)} of computing for its "
            f"{what}"
        )

    def _beyond_memory(self) -> TooLarge:
        return self._refusal("beginning")

    _beyond_operations = _beyond_memory

    def _refusal(self, what: str, peak: int = 0) -> TooLarge:
        return TooLarge(
            f"its tensors take {human_bytes(max(peak, self.cost.memory()))}, and this machine has "
            f"{human_bytes(self._memory)} available; its {what} takes about "
            f"{_minutes(self.cost.seconds)} of computing"
        )


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return "a minute" if minutes == 1 else f"{minutes:,} minutes"
