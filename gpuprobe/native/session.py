"""The simulated GPUs of this process: torch's own CUDA code over `gpuprobe/native/runtime`."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpuprobe import program_warnings
from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.clocks import time
from gpuprobe.errors import GpuprobeError, TooLate, ValueNeeded
from gpuprobe.file_changes import wrap_torch_writer
from gpuprobe.kept_files import discarded
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.native import hidden, process
from gpuprobe.native.calls import NativeCalls
from gpuprobe.native.launches import NativeLaunches
from gpuprobe.native.names import readable
from gpuprobe.patching import Patches, when_imported
from gpuprobe.torch_support import compile_notes
from gpuprobe.torch_support.engine_reports import add_assumptions, set_call_log, set_launch_counter

if TYPE_CHECKING:
    from gpuprobe.native.values.reads import Reads
    from gpuprobe.native.values.session import Values
    from gpuprobe.torch_support.traffic import Traffic

_CONF: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_COMPILED: Final = (
    "that this is the first process that compiles these graphs: it measures variants of kernels on "
    "copies of tensors; a later one finds the choices in torch's cache, and may need less memory"
)
_MOST_KERNELS: Final = 3
"""Kernels that are named in the assumptions."""

_SMALL: Final = 2**20
_ALL: Final = 2**63
"""Bytes of the buffers up to which collectives compute values."""


@dataclass(frozen=True)
class EngineOptions:
    """The simulated GPUs that a program finds, and the options of the simulation.

    ``gpu`` names entries of the catalogue: ``"2xa100-40gb"``. ``compute``: ``"real"`` computes all
    values on the CPU, ``"shapes"`` those of integers, masks and tensors of up to 1 MiB, ``"auto"``
    all while they cost seconds, then as shapes. ``conf``: allocator settings in place of
    ``PYTORCH_CUDA_ALLOC_CONF``. ``assume``: values for lines that read a value that was not
    computed, as ``FILE:LINE=VALUE``. ``endless``: devices never run out of memory. ``measure``:
    with ``real``, a large program makes its first step without values, to know their cost;
    ``on_measure`` is called as that begins.
    """

    gpu: str = "h100-80gb"
    compute: str = "auto"
    conf: str | None = None
    assume: tuple[str, ...] = ()
    endless: bool = False
    measure: bool = False
    on_measure: Callable[[], None] = lambda: None


class SimulatedRank(Protocol):
    """The distributed job of an estimated run: `gpuprobe.planning.peers.Job`."""

    @property
    def rank(self) -> int:
        """The rank of the run, from 0."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""

    @property
    def peers(self) -> Any:
        """The connection to the other ranks; None if they are not simulated."""


_session: NativeSession | None = None


def active() -> NativeSession | None:
    """The session that this process has started; None outside of one."""
    return _session


def current() -> NativeSession | None:
    """The session of this process; None outside a session. A child of a process on the native
    engine has a session with that one's options from its first use of a GPU.
    """
    global _session
    if _session is None and process.loaded() is not None and not hidden.is_hidden():
        inherited = os.environ.get(process.VALUES)
        given = {} if inherited is None else json.loads(inherited)
        options = EngineOptions(
            compute=given.get("compute", "real"), assume=tuple(given.get("assume", ()))
        )
        _session = NativeSession(options, (), inherits=inherited is not None)
        if given.get("reported"):
            _session.assume_unknown()
        _session.start()
    return _session


def environment_of(options: EngineOptions) -> dict[str, str]:
    """The variables that have programs run on simulated GPUs. Raises EnvironmentUnavailable
    where it does not run, ConfigError for an unknown GPU.
    """
    found = process.environment_with(parse_spec(options.gpu), endless=options.endless)
    found[process.VALUES] = _passed_on(options, reported=True)
    return found


def _passed_on(options: EngineOptions, *, reported: bool) -> str:
    """What other processes compute: the value of `process.VALUES`."""
    return json.dumps({"compute": options.compute, "assume": options.assume, "reported": reported})


class NativeSession:
    """Simulated GPUs of this process, which keeps them to its end: `stop` ends only the computation
    of values.
    """

    def __init__(
        self,
        options: EngineOptions,
        gpus: Sequence[GpuModel],
        job: SimulatedRank | None = None,
        *,
        bounded: bool = False,
        inherits: bool = False,
    ) -> None:
        """``job``: the distributed job of an estimated run. ``bounded``: raise TooLarge above the
        limits of ``--compute auto``. ``inherits``: the GPUs are those of the process that started
        this one, and so are the options.
        """
        self._computes = bool(gpus) or inherits
        self._options = options
        self._job = job if job is not None and job.ranks > 1 else None
        self.traffic: Traffic | None = None  # once the recorder's clock is known
        self._patches: Patches | None = None
        self.gpus = tuple(gpus)
        self._assumed: list[str] = []
        self._values: Values | None = None  # while values are computed
        self._ended = False
        self._reported = False
        self._bounded = bounded
        self._reads: Reads | None = None  # once values are computed
        self._graphs_before = compile_notes.graphs()
        self._computed: Values | None = None  # as `_values`, also after `stop`
        self.runtime: process.Runtime | None = None
        self._launches: NativeLaunches | None = None
        self._began = time()
        self._end_keeping: Callable[[], None] = lambda: None
        self._end_counting: Callable[[], None] = lambda: None
        self._end_listing: Callable[[], None] = lambda: None

    @property
    def assumed(self) -> Sequence[str]:
        refused = self.runtime.refused() if self.runtime is not None else ()
        kernels = self.runtime.uncomputed() if self.runtime is not None else ()
        return (
            *self._assumed,
            *((_COMPILED,) if compile_notes.graphs() > self._graphs_before else ()),
            *(() if self._computed is None else self._computed.notes),
            *(f"{name} was called, which simulated GPUs do not answer" for name in refused),
            *(
                f"a library launched the kernel {readable(name)}, whose values are not computed: "
                "what it writes keeps the bytes from before"
                for name in kernels[:_MOST_KERNELS]
            ),
            *(
                (f"the same for {plural(len(kernels) - _MOST_KERNELS, 'other kernel')}",)
                if len(kernels) > _MOST_KERNELS
                else ()
            ),
        )

    @property
    def models(self) -> Sequence[str]:
        """What is assumed about sizes that a closed library decides and that the program needs."""
        return self.runtime.models() if self.runtime is not None else ()

    def assume(self, text: str) -> None:
        """Note an assumption behind the figures, once."""
        if text not in self._assumed:
            self._assumed.append(text)

    def start(self) -> None:
        """Load the engine, before torch. Raises what `gpuprobe.native.process.load` raises."""
        global _session
        if self.gpus:
            _set_conf(self._options.conf)
            self.runtime = process.load(self.gpus, endless=self._options.endless)
            self.runtime.forget_models()
            hidden.show()
            left = _empty_allocator()
            if left:
                self.assume(
                    f"tensors of {human_bytes(left)} from before were on the GPUs at the start, "
                    "and are counted"
                )
        else:
            self.runtime = process.loaded()
        if self._computes:
            self._pass_on()
        _session = self
        self._ended = False
        self._end_listing = add_assumptions(lambda: (*self.assumed, *self.models))
        if self.runtime is not None:
            self._launches = NativeLaunches(self.runtime)
            end_counting = set_launch_counter(self._launches)
            end_logging = set_call_log(NativeCalls(self.runtime))

            def end() -> None:
                end_counting()
                end_logging()

            self._end_counting = end
        if self._job is not None:
            # Its thread would read the store, which is Python, after the interpreter has ended.
            os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        when_imported("torch", self._join)
        when_imported("torch", self._compute)

    def _pass_on(self) -> None:
        """Have the processes that this one starts compute values as it does."""
        os.environ[process.VALUES] = _passed_on(self._options, reported=self._reported)

    def _join(self) -> None:
        """Become a rank of the job. Called when torch has been imported."""
        if self._ended or self._patches is not None:
            return
        from gpuprobe.native.jobs import groups

        self._patches = Patches()
        program_warnings.follow(self._patches)
        if self.runtime is not None:
            self.runtime.collectives.name_places(groups.place_in_job)
            self.runtime.collectives.alone(self._job is not None)
        if self._job is not None:
            assert self.traffic is not None  # `NativeMeasurement.recorded` comes before `start`
            groups.without_splits(self._patches, self.traffic)
            groups.install(self._job, len(self.gpus), self._patches, self.traffic, self.assume)

    def _compute(self) -> None:
        """Compute values from now on. Called when torch has been imported."""
        if self._ended or self._values is not None or not self._computes:
            return
        from gpuprobe.native.values.budget import Budget, Requested
        from gpuprobe.native.values.session import Values

        compute = self._options.compute
        budget: Budget | None = None
        if compute != "shapes" and self.runtime is not None:
            self.runtime.write_collectives(_ALL)
            self.runtime.note_uncomputed(True)
            if compute == "real":
                budget = (
                    Budget(self.runtime)
                    if self._bounded
                    else Requested(
                        self.runtime,
                        measure=self._options.measure,
                        on_measure=self._options.on_measure,
                    )
                )
        self._values = Values(compute, self._options.assume, reported=self._reported, budget=budget)
        self._reads = self._values.reads
        self._computed = self._values
        if self._job is not None:
            from gpuprobe.native.jobs.host import over_gloo

            self._values.computing.carrier = over_gloo
        self._values.__enter__()
        if self.runtime is not None:
            self.runtime.values_started()
        if self._launches is not None:
            self._launches.follow(self._values.computing)
        self._end_keeping = wrap_torch_writer(self._written_instead)

    def _written_instead(self, path: str) -> str | None:
        """Where `torch.save` writes, of a file that is older than this session: nowhere in an
        estimate, which makes a few steps, and where values were not computed, as they would replace
        trained ones; None for the path itself.
        """
        if self.everything and not self._options.endless:
            return None
        if not Path(path).is_file() or Path(path).stat().st_mtime >= self._began:
            return None
        self.assume(discarded(path))
        return os.devnull

    def stop(self) -> None:
        """End the session. The GPUs stay to the end of the process."""
        global _session
        self._ended = True
        self._end_counting()
        self._end_listing()
        self._end_keeping()
        if self._launches is not None:
            self._launches.follow(None)
        if self._computes:
            os.environ.pop(process.VALUES, None)
        values, self._values = self._values, None
        if values is not None:
            values.__exit__(None, None, None)
            if self.runtime is not None:
                self.runtime.write_collectives(_SMALL)
                self.runtime.note_uncomputed(False)
        patches, self._patches = self._patches, None
        if patches is not None:
            patches.undo()
        if _session is self:
            _session = None
        hidden.hide()

    def assume_unknown(self) -> None:
        """Assume values that were not computed, and note it, instead of raising ValueNeeded. Call
        it before `start`, or before torch is imported.
        """
        self._reported = True
        if process.VALUES in os.environ:
            self._pass_on()
        if self._reads is not None:
            self._reads.reported = True

    def unknown_read(self) -> tuple[str, str]:
        """The first line that decided by a value that was not computed, and the first whose size
        is the largest possible one; ``""`` for none.
        """
        return ("", "") if self._reads is None else (self._reads.decided, self._reads.bounded)

    def refused(self) -> ValueNeeded | None:
        """The error of a value that could not be assumed, which the program may have caught."""
        return None if self._reads is None else self._reads.refused

    def check_measured(self, error: BaseException | None = None) -> None:
        """Raise CostMeasured, or TooLarge, if the program ended before its cost was known, or with
        an ``error`` that a value which was not computed may have caused.
        """
        budget = None if self._computed is None else self._computed.computing.budget
        if budget is not None and (error is None or (budget.guessed and _may_be_guessed(error))):
            budget.end()

    @property
    def everything(self) -> bool:
        """Whether all values have been computed."""
        return self._options.compute != "shapes" and (
            self._computed is None or self._computed.everything
        )

    def too_large(self) -> str:
        """Why all values of the run are too much to be computed without a request, from what they
        cost; "" if they are not.
        """
        from gpuprobe.native.values.budget import too_large

        peak = max((allocated for allocated, _ in self.peaks().values()), default=0)
        return "" if self._computed is None else too_large(self._computed.cost, peak)

    @property
    def computed(self) -> Values | None:
        """The values of this session, and what they cost; None before torch is imported."""
        return self._computed

    def unused_assumptions(self) -> tuple[str, ...]:
        """The assumptions about lines that have read no unknown value."""
        if self._reads is None:
            return self._options.assume
        return tuple(self._reads.assumptions.unused)

    def peaks(self) -> Mapping[int, tuple[int, int]]:
        import torch

        return {
            index: (
                torch.cuda.max_memory_allocated(index),
                torch.cuda.max_memory_reserved(index),
            )
            for index in range(0 if self.runtime is None else len(self.runtime.visible()))
            if torch.cuda.max_memory_allocated(index)
        }


def _may_be_guessed(error: BaseException) -> bool:
    """Whether an error may be that of a wrong value: not one of memory, or of the user's."""
    import torch

    return isinstance(error, (Exception, SystemExit)) and not isinstance(
        error, (torch.OutOfMemoryError, GpuprobeError)
    )


_before: Final = {name: os.environ.get(name) for name in _CONF}
"""The user's settings of the allocator."""


def _set_conf(conf: str | None) -> None:
    """Make torch's allocator start with these settings, or with the user's for None. Raises
    TooLate if it has started with others.
    """
    settings = dict(_before) if conf is None else dict.fromkeys(_CONF, conf)
    now = {name: os.environ.get(name) for name in _CONF}
    torch = sys.modules.get("torch")
    if settings != now and torch is not None and torch.cuda.is_initialized():
        raise TooLate(
            "this process has other settings of the allocator already, which it keeps to its end",
            hint="use one process for each conf",
        )
    for name, text in settings.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text


def _empty_allocator() -> int:
    """Free the cache that earlier sessions of this process have left in torch's allocator, and
    reset its peaks, so that equal programs have equal figures. Returns the bytes of remaining
    tensors.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    left = 0
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)
        torch.cuda.reset_accumulated_memory_stats(index)
        left += torch.cuda.memory_allocated(index)
    return left


@contextmanager
def session(options: EngineOptions) -> Iterator[NativeSession]:
    """Simulated GPUs in this process. Raises ConfigError for an unknown GPU, and what
    `gpuprobe.native.process.load` raises.
    """
    made = NativeSession(options, parse_spec(options.gpu))
    made.start()
    try:
        yield made
    finally:
        made.stop()
