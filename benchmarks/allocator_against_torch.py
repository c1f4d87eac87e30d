"""gpuprobe's allocator against torch's own: random programs, under random settings.

    python benchmarks/allocator_against_torch.py [--programs 10000] [--first SEED] [--what-ifs 1000]
        [--state FILE] [--minutes N] [--show N]

To be run with a build of torch with CUDA; no GPU is needed. Each program allocates, frees, uses
other streams, empties the cache, captures graphs, fills pools, runs out of memory, through torch's
caching allocator on the native engine, which has the driver's part of memory: a device of so many
bytes, addresses as a driver gives them. It begins with nothing cached. Then

* **replay**: gpuprobe replays the history that torch recorded. Every block must be where torch had
  it, every segment and page come and go when it did, the layout at the end be torch's; and the
  figures must be those that torch's statistics have: peaks, device allocations and frees, retries,
  requests that failed.
* **what-if**: for the first ``--what-ifs`` programs, gpuprobe simulates the recording under other
  settings, and the same program runs under those. The same figures must be equal.
  The real run makes the requests that the recording has: what failed there and is served under the
  other settings is freed at once, what fails there is left out, and so is a call of
  ``empty_cache`` that released nothing, which no history contains.

Each is "exact"; or "undecidable", if figures depend on something that the history lacks, and
gpuprobe notes that; or "wrong". If torch itself fails (an assertion, a segmentation fault, memory
that it does not release), nothing is compared.

What a program is follows from its seed alone. Programs run by many in one process, one process at a
time, each on a device with its own size. With ``--state`` what has run is kept, and not run again.

The table has the programs with each trait. The first difference of each that is wrong is printed
below the table. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from allocator_requests import (  # noqa: E402
    DEFAULTS,
    MACHINES,
    POOL_OPTIONS,
    Machine,
    Operation,
    Program,
    program_of,
)

from gpuprobe.allocator.driver import ADDRESS_ORDERS  # noqa: E402
from gpuprobe.allocator.replay import (  # noqa: E402
    POOLS_NOT_RECORDED,
    SPLITTING_NOT_RECORDED,
    TraceReplay,
    replay_trace,
)
from gpuprobe.allocator.settings import parse_conf  # noqa: E402
from gpuprobe.allocator.whatif import what_if  # noqa: E402
from gpuprobe.catalogue.gpus import parse_spec  # noqa: E402
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace  # noqa: E402
from gpuprobe.native.process import load  # noqa: E402

BATCH: Final = 500
"""Programs of one process."""

STATISTICS: Final = {
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
    "device_allocs": "num_device_alloc",
    "device_frees": "num_device_free",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
"""Figures of a replay, and what torch calls them."""


@dataclass
class Measured:
    """What torch made of a program: its history and statistics, and the operations that failed."""

    trace: MemoryTrace
    figures: dict[str, int]
    failed: frozenset[int]
    silent: frozenset[int]  # calls of empty_cache that released nothing
    served: int
    captures: tuple[int, ...]  # the operations that began one


@dataclass
class Outcome:
    """What is kept of one program. ``difference`` is the first of its replay, "" for none, and
    ``what_if_difference`` that of its what-if; ``undecided`` and ``what_if_undecided`` are what
    they need and the history lacks. ``retries_open``: the replay has more than one number of
    retries. ``fault``: what torch failed at. ``what_if``: what its settings change.
    """

    seed: int
    traits: list[str]
    events: int = 0
    fault: str = ""
    difference: str = ""
    undecided: str = ""
    retries_open: bool = False
    what_if: str = ""
    what_if_difference: str = ""
    what_if_undecided: str = ""
    notes: list[str] = field(default_factory=list)


# -- one program in torch


class MemoryLeft(Exception):
    """torch keeps memory that has no owner."""


class Leftover(Exception):
    """An earlier program left an address range with pages of another size, which torch keeps for
    good where mapping them failed: the next one runs in a separate process."""


class Runner:
    """Runs programs, one after the other, in this process's torch."""

    def __init__(self, machine: Machine) -> None:
        import torch

        self._pages: set[str] = set()  # the page sizes of ranges that may be left
        self.torch = torch
        self.machine = machine
        self.streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
        set_conf = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        self.set_conf = set_conf or torch.cuda.memory._set_allocator_settings
        self.unknown = frozenset(self._unknown())
        # Without this argument, every recording begins with an empty history.
        known = signature(torch.cuda.memory._record_memory_history_impl).parameters
        self.clearing = {"clear_history": True} if "clear_history" in known else {}

    def _unknown(self) -> Iterator[str]:
        """The settings and options of pools that this torch does not know."""
        for key, value in DEFAULTS.items():
            try:
                self.set_conf(f"{key}:{value}")
            except RuntimeError:  # "Unrecognized CachingAllocator option"
                yield key
        known = signature(self.torch.cuda.MemPool).parameters
        for option in POOL_OPTIONS:
            # Before it had `no_split`, torch failed an assertion once a pool had overflow.
            if option not in known or "no_split" not in known:
                yield option

    def reserved(self) -> int:
        """``torch.cuda.memory_reserved()``, which sorts all statistics first."""
        statistics = self.torch.cuda.memory_stats_as_nested_dict()
        return int(statistics["reserved_bytes"]["all"]["current"])

    def run(self, program: Program, conf: str, recorded: Measured | None = None) -> Measured:
        """The program under the settings of ``conf``. With ``recorded``, what its history shows:
        requests that failed there are, if they are served, freed at once, and calls of
        ``empty_cache`` that released nothing are left out.
        """
        from gpuprobe.torch_support.snapshots import trace_of

        torch = self.torch
        page = conf.partition("large_segment_size_mb:")[2].partition(",")[0]
        expandable = "expandable_segments:True" in conf
        if expandable and self._pages - {page}:
            raise Leftover
        self.set_conf(conf)
        if self.machine.limited:
            torch.cuda.set_per_process_memory_fraction(program.fraction)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.memory._record_memory_history(
            "all", context="all" if program.stacks else None, stacks="python", **self.clearing
        )
        state = _Running(self, recorded)
        try:
            for index, operation in enumerate(program.operations):
                state.do(index, operation)
            state.leave()
            snapshot = torch.cuda.memory._snapshot()
            statistics = torch.cuda.memory_stats()
        finally:
            torch.cuda.memory._record_memory_history(None)
            state.clear()
        torch.cuda.empty_cache()
        if self.reserved():
            raise MemoryLeft
        figures = {name: statistics.get(key, 0) for name, key in STATISTICS.items()}
        if expandable and figures["retries"] + figures["ooms"]:
            self._pages.add(page)
        trace = trace_of(snapshot, 0)
        return Measured(
            trace,
            figures,
            frozenset(state.failed),
            frozenset(state.silent),
            state.served,
            tuple(state.captures),
        )


class _Running:
    """A program on its way: what it holds."""

    def __init__(self, runner: Runner, recorded: Measured | None) -> None:
        self._runner = runner
        self._torch = runner.torch
        self._given_back = recorded.failed if recorded is not None else frozenset()
        self._left_out = recorded.silent if recorded is not None else frozenset()
        self._slots: dict[int, Any] = {}
        self._pools: dict[int, Any] = {}
        self._graphs: dict[int, Any] = {}
        self._open: list[tuple[int, contextlib.ExitStack]] = []
        self._host: list[Any] = []
        self.failed: list[int] = []
        self.silent: list[int] = []
        self.served = 0
        self.captures: list[int] = []

    def do(self, index: int, operation: Operation) -> None:
        getattr(self, operation.kind)(index, operation)

    def _in_stream(self, number: int) -> Any:
        return self._torch.cuda.stream(self._runner.streams[number])

    def allocate(self, index: int, operation: Operation) -> None:
        torch = self._torch
        try:
            with self._in_stream(operation.stream):
                tensor = torch.empty(operation.size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            self.failed.append(index)
            return
        if index in self._given_back:
            self.served += 1
            return
        self._slots[operation.slot] = tensor

    def free(self, index: int, operation: Operation) -> None:
        self._slots.pop(operation.slot, None)

    def record_stream(self, index: int, operation: Operation) -> None:
        tensor = self._slots.get(operation.slot)
        if tensor is not None:
            tensor.record_stream(self._runner.streams[operation.stream])

    def empty_cache(self, index: int, operation: Operation) -> None:
        if index in self._left_out:
            return
        before = self._runner.reserved()
        self._torch.cuda.empty_cache()
        if self._runner.reserved() == before:
            self.silent.append(index)

    def fraction(self, index: int, operation: Operation) -> None:
        self._torch.cuda.set_per_process_memory_fraction(operation.size / 1000)

    def pinned(self, index: int, operation: Operation) -> None:
        torch = self._torch
        self._host.append(torch.empty(operation.size, dtype=torch.uint8, pin_memory=True))
        if len(self._host) > 2:
            del self._host[0]

    def make_pool(self, index: int, operation: Operation) -> None:
        given = {n: True for n in operation.options if n not in self._runner.unknown}
        self._pools[operation.slot] = self._torch.cuda.MemPool(**given)

    def enter_pool(self, index: int, operation: Operation) -> None:
        pool = self._pools.get(operation.slot)
        stack = contextlib.ExitStack()
        if pool is not None:
            stack.enter_context(self._torch.cuda.use_mem_pool(pool))
        self._open.append((operation.slot, stack))

    def leave_pool(self, index: int, operation: Operation) -> None:
        self.leave()

    def drop_pool(self, index: int, operation: Operation) -> None:
        self._pools.pop(operation.slot, None)

    def begin_capture(self, index: int, operation: Operation) -> None:
        torch = self._torch
        stack = contextlib.ExitStack()
        self._open.append((operation.slot, stack))
        # To begin one, torch allocates twice. If it cannot, it leaves the stream in a state
        # without a capture.
        try:
            torch.empty(2 * 512, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            self.failed.append(index)
            return
        if index in self._given_back:
            self.served += 1
            return
        graph = torch.cuda.CUDAGraph()
        shared = self._graphs.get(operation.other)
        stack.enter_context(self._in_stream(operation.stream))
        graph.capture_begin(pool=shared.pool() if shared is not None else None)
        stack.callback(graph.capture_end)
        self.captures.append(index)
        self._graphs[operation.slot] = graph

    def end_capture(self, index: int, operation: Operation) -> None:
        self.leave()

    def drop_graph(self, index: int, operation: Operation) -> None:
        self._graphs.pop(operation.slot, None)

    def leave(self) -> None:
        """Leave the pool or the capture that the program is in, if it is."""
        if self._open:
            self._open.pop()[1].close()

    def clear(self) -> None:
        while self._open:
            with contextlib.suppress(RuntimeError):
                self.leave()
        self._slots.clear()
        self._host.clear()
        self._graphs.clear()
        # Blocks that wait for a stream come back before their pool ends, or torch crashes.
        with contextlib.suppress(self._torch.OutOfMemoryError):
            self._torch.empty(1, device="cuda")
        self._pools.clear()


# -- comparing


def check_replay(program: Program, measured: Measured, replayed: TraceReplay) -> tuple[str, str]:
    """The first difference between torch and the replay of its history, and what that lacks to
    decide; "" for none.
    """
    lacks = "; ".join(lacks_pools(program, replayed))
    if SPLITTING_NOT_RECORDED in replayed.notes:
        lacks = lacks or "whether a MemPool splits its blocks"
    first = replayed.first_divergence
    if first is not None:
        return (
            f"event {first.event} of {replayed.events} ({first.action}): torch {first.observed}, "
            f"the rules {first.expected}: {first.why}"
        ), lacks
    ours = {name: getattr(replayed, name) for name in STATISTICS}
    # What a release of cached memory was for is not always recorded; the replay notes where.
    perhaps = measured.figures["retries"] - ours["retries"]
    if 0 < perhaps <= len(replayed.unclear):
        ours["retries"] += perhaps
    for name, value in measured.figures.items():
        if ours[name] != value:
            return f"{name} is {value} in torch and {ours[name]} by the rules", lacks
    return "", ""


def lacks_pools(program: Program, replayed: TraceReplay) -> list[str]:
    """Whether the history lacks the pools of the program's events, and the replay notes that."""
    noted = POOLS_NOT_RECORDED in replayed.notes
    return ["the pools of events"] if noted and program.traits & {"CUDA graph", "MemPool"} else []


def check_what_if(
    program: Program,
    settings: AllocatorSettings,
    machine: Machine,
    measured: Measured,
    replayed: TraceReplay,
    real: Measured,
) -> tuple[str, str]:
    """The first difference between a real run under other ``settings`` and the what-if, and what
    the history lacks to decide; "" for none.
    """
    expected = {**real.figures, "served_after_all": real.served}
    # The engine allocates at ascending addresses; on a GPU they may be in any order.
    one = what_if(
        measured.trace, replayed, settings, capacity=machine.capacity, orders=ADDRESS_ORDERS[:1]
    )
    outcome = what_if(measured.trace, replayed, settings, capacity=machine.capacity)
    lacks = "; ".join((*lacks_pools(program, replayed), *outcome.undecided))
    for name, value in expected.items():
        for figure in getattr(one, name), getattr(outcome, name):
            if not figure.least <= value <= figure.most:
                span = f"{figure.least} to {figure.most}"
                return f"{name} is {value} in torch and {span} by the what-if", lacks
    failed = len(real.failed - measured.failed)
    if not lacks and bool(failed) != bool(one.would_oom):
        return f"{failed} requests fail in torch, and by the what-if {one.would_oom}", lacks
    return "", lacks


def limited_to(
    settings: AllocatorSettings, program: Program, machine: Machine
) -> AllocatorSettings:
    """``settings``, with the share of the device that the program may use."""
    if not machine.limited:
        return settings
    extra = {**settings.extra, "per_process_memory_fraction": program.fraction}
    return replace(settings, extra=extra)


def check(runner: Runner, seed: int, with_what_if: bool) -> Outcome:
    """Run one program, and compare."""
    program = program_of(seed, runner.unknown)
    machine = MACHINES[program.machine]
    measured = runner.run(program, program.conf)
    settings = limited_to(measured.trace.settings or AllocatorSettings(), program, machine)
    replayed = replay_trace(measured.trace, settings, torch=runner.torch.__version__)
    outcome = Outcome(
        seed, sorted(program.traits | happened(measured)), events=len(measured.trace.events)
    )
    outcome.difference, outcome.undecided = check_replay(program, measured, replayed)
    outcome.notes = list(replayed.notes)
    outcome.retries_open = bool(replayed.unclear)
    if with_what_if and program.comparable and program.change:
        real = runner.run(program, program.other_conf, recorded=measured)
        outcome.what_if = program.change
        if real.captures != measured.captures:
            outcome.what_if = ""
            outcome.traits.append("no what-if: there a capture cannot begin")
        elif replayed.first_divergence is not None:
            outcome.what_if_difference = "the recording was not replayed"
            outcome.what_if_undecided = outcome.undecided
        else:
            # torch 2.6 understands "roundup_power2_divisions:[…,>:N]" in another way.
            other = real.trace.settings if runner.unknown else None
            other = limited_to(other or parse_conf(program.other_conf), program, machine)
            difference, lacks = check_what_if(program, other, machine, measured, replayed, real)
            outcome.what_if_difference, outcome.what_if_undecided = difference, lacks
    return outcome


def happened(measured: Measured) -> set[str]:
    found = set()
    if measured.figures["ooms"]:
        found.add("out of memory")
    if measured.figures["retries"] > measured.figures["ooms"]:
        found.add("retried and served")
    if measured.silent:
        found.add("empty_cache that released nothing")
    return found


# -- processes


def child(machine: int, seeds: Sequence[int], what_ifs: int) -> None:
    """Run these programs, all of one machine, and print an outcome a line."""
    _load(MACHINES[machine])
    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
    runner = Runner(MACHINES[machine])
    gc.freeze()
    for number, seed in enumerate(seeds):
        try:
            outcome = check(runner, seed, seed < what_ifs)
        except Leftover:
            if number:
                os._exit(0)
            outcome = check(runner, seed, False)  # its own two runs do not go together
            outcome.traits.append("no what-if: it needs another process")
        except MemoryLeft:
            outcome = Outcome(seed, sorted(program_of(seed).traits), fault="memory is left")
        except RuntimeError as error:
            # Memory that ends as a capture begins leaves its stream in an undefined state.
            memory = isinstance(error, runner.torch.OutOfMemoryError)
            if not memory and "INTERNAL ASSERT FAILED" not in str(error):
                raise
            # What this torch has allocated is unknown now: the others run in a new process.
            outcome = Outcome(seed, sorted(program_of(seed).traits), fault=str(error))
        print(json.dumps(asdict(outcome)), flush=True)
        if outcome.fault:
            os._exit(0)


def _load(machine: Machine) -> None:
    gpu = parse_spec("h100-80gb")[0]
    load([replace(gpu, total_memory=machine.capacity, context=(0, 0))])


def run_batches(
    seeds: Iterable[int], what_ifs: int, keep: Callable[[Outcome], None], until: float
) -> None:
    """Run the programs of these seeds in processes for so many, which have one machine. Those with
    segments of one size follow each other, last those whose what-if has another (`Leftover`).
    """
    machines: dict[int, list[tuple[int, bool, int]]] = defaultdict(list)
    for seed in seeds:
        program = program_of(seed)
        other = "large_segment_size_mb" in program.change
        machines[program.machine].append((program.segment_size, other, seed))
    for machine, found in sorted(machines.items()):
        own = [seed for _, _, seed in sorted(found)]
        for at in range(0, len(own), BATCH):
            _run_batch(machine, own[at : at + BATCH], what_ifs, keep, until)


def _run_batch(
    machine: int, seeds: list[int], what_ifs: int, keep: Callable[[Outcome], None], until: float
) -> None:
    left = list(seeds)
    while left and time.monotonic() < until:
        command = [sys.executable, __file__, "--child", str(machine), "--what-ifs", str(what_ifs)]
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with subprocess.Popen(
            [*command, "--seeds", *map(str, left)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                outcome = Outcome(**json.loads(line))
                left.remove(outcome.seed)
                keep(outcome)
                if time.monotonic() > until:
                    process.kill()
                    return
        if left and process.returncode:  # it ended within this program
            seed = left.pop(0)
            ended = f"the process ended with exit code {process.returncode}"
            outcome = Outcome(seed, sorted(program_of(seed).traits))
            if process.returncode < 0:  # by a signal, within torch
                outcome.fault = ended
            else:
                outcome.difference = ended
            keep(outcome)


# -- the table


KINDS: Final = ("exact", "undecidable", "wrong")


def kind_of(difference: str, lacks: str) -> str:
    if lacks:
        return "undecidable"
    return "wrong" if difference else "exact"


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    replays: dict[str, Counter[str]] = defaultdict(Counter)
    what_ifs: dict[str, Counter[str]] = defaultdict(Counter)
    faults = 0
    for outcome in outcomes:
        if outcome.fault:
            faults += 1
            continue
        replayed = kind_of(outcome.difference, outcome.undecided)
        answered = kind_of(outcome.what_if_difference, outcome.what_if_undecided)
        for trait in ("all", *outcome.traits):
            replays[trait][replayed] += 1
            what_ifs[trait][answered] += bool(outcome.what_if)
        for change in outcome.what_if.split():
            what_ifs[f"→ {change}"][answered] += 1
    titles = "".join(f"{kind:>13}" for kind in (*KINDS, *KINDS))
    yield f"{'':42}{'replays':>39}{'what-ifs':>39}"
    yield f"{'':42}{titles}"
    for trait in sorted({*replays, *what_ifs}, key=lambda name: (name != "all", name)):
        figures = [found[trait][kind] for found in (replays, what_ifs) for kind in KINDS]
        yield f"{trait:42}" + "".join(f"{figure:13,}" for figure in figures)
    retries = sum(o.retries_open and not (o.difference or o.fault) for o in outcomes)
    yield f"{retries} exact replays leave open how many retries there were, and say so"
    if faults:
        yield f"{faults} programs are left out, at which torch itself failed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--what-ifs", type=int, default=1_000)
    parser.add_argument("--state", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--show", type=int, default=10, help="differences printed")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.seeds, options.what_ifs)
        return 0

    outcomes: dict[int, Outcome] = {}
    seeds = range(options.first, options.first + options.programs)
    if options.state is not None and options.state.exists():
        for line in options.state.read_text(encoding="utf-8").splitlines():
            outcome = Outcome(**json.loads(line))
            outcomes[outcome.seed] = outcome

    def keep(outcome: Outcome) -> None:
        outcomes[outcome.seed] = outcome
        if options.state is not None:
            with options.state.open("a", encoding="utf-8") as file:
                print(json.dumps(asdict(outcome)), file=file)

    until = time.monotonic() + 60 * options.minutes
    left = [seed for seed in seeds if seed not in outcomes]
    # Programs without the requested what-if run again.
    last = options.first + options.what_ifs
    run_batches(left, last, keep, until)
    shown = [outcomes[seed] for seed in seeds if seed in outcomes]
    print(*table(shown), sep="\n")
    differ = [
        o
        for o in shown
        if kind_of(o.difference, o.undecided) == "wrong"
        or kind_of(o.what_if_difference, o.what_if_undecided) == "wrong"
    ]
    for outcome in differ[: options.show]:
        print(f"\nprogram {outcome.seed} ({', '.join(outcome.traits)})")
        if outcome.difference:
            print(f"  replay: {outcome.difference}")
        if outcome.what_if_difference:
            print(f"  what-if {outcome.what_if}: {outcome.what_if_difference}")
    if len(differ) > options.show:
        print(f"\nand {len(differ) - options.show} more")
    missing = len(seeds) - len(shown)
    if missing:
        print(f"\n{missing} programs were not run")
    return 1 if differ or missing else 0


if __name__ == "__main__":
    sys.exit(main())
