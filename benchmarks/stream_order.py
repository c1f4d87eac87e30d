"""gpuprobe's happens-before relation of the corpora's programs, against the CUDA calls they make.

``collect`` runs every program of `tests/hazards` under ``gpuprobe.detect_hazards()``. The runtime
logs torch's own calls meanwhile: launches, events, waits, frees. From those alone the order of the
program's operators is derived (`CallOrder`), and written next to that of gpuprobe's engine.
``compare`` prints where the orders in such a file differ. One operator is before another if all
that it launches is complete when anything of the other begins; the host's own accesses to pinned
memory take part.

Usage: python benchmarks/stream_order.py collect FILE [NAME...]
       python benchmarks/stream_order.py compare FILE [--show N]
"""

from __future__ import annotations

import argparse
import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hazard_programs import Program, begin, chosen, programs, run, run_each

warnings.simplefilter("ignore")

HOST: Final = "host"
_NON_BLOCKING: Final = 1  # cudaStreamNonBlocking
_PER_THREAD: Final = 1  # the number of the per-thread default stream
Clock = dict[str, int]
"""By stream: how many of its launches are complete."""


class Item:
    """An operator of the program, or an access of the host's, in one of the orders. ``world``: 0,
    or the number of the CUDA graph whose capture it is part of. ``starts``: what each stream that
    it uses has waited for at its first launch there; ``ends``: the number of its last one there.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.starts: dict[str, Clock] = {}
        self.ends: Clock = {}

    def launched(self, stream: str, clock: Clock) -> None:
        """Record a launch. ``clock``: its stream's clock, which includes the launch."""
        if stream not in self.starts:
            self.starts[stream] = {**clock, stream: clock[stream] - 1}
        self.ends[stream] = clock[stream]

    def data(self) -> Any:
        return [self.world, list(self.starts.values()), self.ends]


class _World:
    """Clocks and events, of what runs or of what one graph captures."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.events: dict[int, Clock] = {}

    def clock(self, stream: str) -> Clock:
        return self.clocks.setdefault(stream, {})


class CallOrder:
    """The order of what calls of CUDA launch. Sources: CUDA runtime API, "Stream synchronization
    behavior" and "API synchronization behavior"; for ``cudaFree``, which waits for the device, the
    CUDA programming guide, "Stream Ordered Memory Allocator".

    ``queried``: whether the program made a query itself: that torch's allocators find an
    event complete orders nothing. ``ours`` is False for calls of a thread that is neither the
    program's nor autograd's, such as gloo's: what it waits for, the program does not, and the
    program cannot know when it makes a stream wait.
    """

    def __init__(self) -> None:
        self._worlds: dict[int, _World] = {0: _World()}
        self._blocking: dict[str, set[str]] = {}  # streams that the default one waits for
        self._streams: dict[str, set[str]] = {}  # those of each device that were used
        self._captured: dict[str, int] = {}  # streams that are captured, by the graph
        self._capture_of: dict[int, int] = {}  # events recorded in a capture
        self._graphs = 0
        self._pinned: dict[int, int] = {}
        self._device: dict[int, int] = {}
        self._waiter = HOST  # the thread that makes the call

    def host(self, item: Item) -> None:
        """The host accesses memory."""
        clock = self._worlds[0].clock(HOST)
        clock[HOST] = clock.get(HOST, 0) + 1
        item.launched(HOST, clock)

    def call(
        self, call: Any, item: Item | None = None, queried: bool = True, ours: bool = True
    ) -> None:
        """Take one logged call, of the operator ``item``."""
        # To record an event makes a stream wait for nothing.
        other = not ours and call.kind.name != "EVENT_RECORD"
        self._waiter = f"{HOST} {call.thread}" if other else HOST
        kind, stream = call.kind.name, _name(call.device, call.stream)
        device = str(call.device)
        if kind == "STREAM_CREATE":
            if not call.a & _NON_BLOCKING:
                self._blocking.setdefault(device, set()).add(stream)
        elif kind in _LAUNCHING:
            self._launch(call, stream, device, item)
        elif kind == "EVENT_RECORD":
            world = self._captured.get(stream, 0)
            self._capture_of[call.a] = world
            self._worlds[world].events[call.a] = dict(self._queued(world, stream, device))
        elif kind == "EVENT_WAIT" and ours:
            self._wait_for_event(call, stream, device)
        elif kind in ("CAPTURE_BEGIN", "CAPTURE_END"):
            self._capture(kind, stream)
        elif kind == "EVENT_QUERY" and call.b:
            pass  # it was not complete
        elif queried or kind not in ("EVENT_QUERY", "STREAM_QUERY"):
            self._wait_on_host(kind, call, stream, device)
        self._account(kind, call)

    def _wait_for_event(self, call: Any, stream: str, device: str) -> None:
        """A stream waits for an event; one of a capture adds the stream to the capture."""
        world = self._capture_of.get(call.a, 0)
        if world and stream not in self._captured:
            self._captured[stream] = world
        world = self._captured.get(stream, 0)
        waiting = self._queued(world, stream, device)
        _merge(waiting, self._worlds[world].events.get(call.a, {}))

    def _wait_on_host(self, kind: str, call: Any, stream: str, device: str) -> None:
        """The host waits for an event, a stream or a device, or has found one of them done."""
        if kind in ("EVENT_SYNC", "EVENT_QUERY"):
            _merge(self._worlds[0].clock(self._waiter), self._worlds[0].events.get(call.a, {}))
        elif kind in ("STREAM_SYNC", "STREAM_QUERY"):
            _merge(self._worlds[0].clock(self._waiter), self._queued(0, stream, device))
        elif kind == "DEVICE_SYNC" or (kind == "FREE" and not call.stream):
            for other in self._streams.get(device, ()):
                _merge(self._worlds[0].clock(self._waiter), self._worlds[0].clock(other))

    def _capture(self, kind: str, stream: str) -> None:
        """The capture of a graph begins or ends."""
        if kind == "CAPTURE_BEGIN":
            self._graphs += 1
            self._worlds[self._graphs] = _World()
            self._captured[stream] = self._graphs
        else:
            ended = self._captured.get(stream)
            self._captured = {one: at for one, at in self._captured.items() if at != ended}

    def _account(self, kind: str, call: Any) -> None:
        """Memory of the device and pinned memory is allocated or freed."""
        if kind == "MALLOC":
            self._device[call.a] = call.bytes
        elif kind == "FREE":
            self._device.pop(call.a, None)
        elif kind == "HOST_ALLOC":
            self._pinned[call.a] = call.bytes
        elif kind == "HOST_FREE":
            self._pinned.pop(call.a, None)

    def _queued(self, world: int, stream: str, device: str) -> Clock:
        """The clock of a stream when something is queued on it. The legacy default stream waits
        for the blocking streams of its device, and they for it.
        """
        self._streams.setdefault(device, set()).add(stream)
        clock = self._worlds[world].clock(stream)
        if not world:
            blocking = self._blocking.get(device, set())
            default, own = _name(int(device), 0), _name(int(device), _PER_THREAD)
            if own in self._streams[device]:
                blocking = blocking | {own}
            if stream == default:
                for other in blocking:
                    _merge(clock, self._worlds[0].clock(other))
            elif stream in blocking:
                _merge(clock, self._worlds[0].clock(default))
            for thread in {HOST, self._waiter}:
                _merge(clock, self._worlds[0].clock(thread))
        return clock

    def _launch(self, call: Any, stream: str, device: str, item: Item | None) -> None:
        world = self._captured.get(stream, 0)
        clock = self._queued(world, stream, device)
        clock[stream] = clock.get(stream, 0) + 1
        if item is not None:
            item.world = world
            item.launched(stream, clock)
        if call.kind.name == "MEMCPY" and not world and self._waits(call):
            _merge(self._worlds[0].clock(self._waiter), clock)

    def _waits(self, call: Any) -> bool:
        """Whether the host waits for a copy: one of the synchronous calls from a device, or any
        from a device to pageable memory.
        """
        to_host = not _within(self._device, call.a) and _within(self._device, call.b)
        return to_host and (call.name == "sync" or not _within(self._pinned, call.a))


_LAUNCHING: Final = frozenset(
    {"LAUNCH", "LIBRARY", "MEMCPY", "MEMSET", "GRAPH_LAUNCH", "COLLECTIVE"}
)


def _name(device: int, number: int) -> str:
    """A stream's. Default streams have the same number on each device."""
    return f"{device}:{number}" if number <= _PER_THREAD else str(number)


def _within(ranges: dict[int, int], address: int) -> bool:
    return any(base <= address < base + size for base, size in ranges.items())


def _merge(into: Clock, clock: Clock) -> None:
    for stream, time in clock.items():
        if time > into.get(stream, 0):
            into[stream] = time


# -- what a run gives


class Watching:
    """Notes what gpuprobe's engines are given, and which calls torch makes for it."""

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = runtime
        self.spans: list[tuple[int, int, int]] = []  # (first call, end, thread) of each operator
        self.rows: list[dict[str, Any]] = []
        self.engines: list[Any] = []
        self._local = threading.local()
        self._made = 0

    def logged(self) -> int:
        return 0 if self._runtime is None else self._runtime.logged()

    def install(self, patches: Any) -> None:
        from gpuprobe.hazard_watch.source import EventSource
        from gpuprobe.hazards.engine import Engine
        from gpuprobe.hazards.events import GraphReplay, HostAccess, Launch

        original = Engine.apply
        watching, local = self, self._local

        def apply(engine: Any, event: Any) -> None:
            original(engine, event)
            if isinstance(event, Launch):
                watching._noted(engine, event.actor, event.op, event.site, event.note)
            elif isinstance(event, GraphReplay):
                watching._noted(engine, event.actor, "replay", event.site, "graph")
            elif isinstance(event, HostAccess):
                watching._noted(engine, 0, event.op, event.site, event.note)

        patches.set(Engine, "apply", _as_gpuprobes(apply))
        for owner, name in ((EventSource, "device_op"), (EventSource, "host_op")):
            patches.set(owner, name, self._in_operator(getattr(owner, name)))
        handle = EventSource.operator

        def operator(source: Any, *args: Any, **kwargs: Any) -> Any:
            before = getattr(local, "began", None)
            local.began = watching.logged()
            try:
                return handle(source, *args, **kwargs)
            finally:
                span = (local.began, watching.logged(), threading.get_native_id())
                watching.spans.append(span)
                local.began = before

        patches.set(EventSource, "operator", _as_gpuprobes(operator))

    def _in_operator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def operator(source: Any, func: Any, *args: Any) -> Any:
            before = getattr(self._local, "operator", None)
            self._made += 1
            self._local.operator = self._made
            try:
                return original(source, func, *args)
            finally:
                self._local.operator = before

        return _as_gpuprobes(operator)

    def _noted(self, engine: Any, actor: int, op: Any, site: Any, note: str) -> None:
        from gpuprobe.hazard_watch.names import place

        if engine.replays:
            return  # a log, to verify a fix
        if engine not in self.engines:
            self.engines.append(engine)
        at, end = place(site), self.logged()
        self.rows.append(
            {
                "operator": getattr(self._local, "operator", None) or -len(self.rows) - 1,
                "op": op[0] if isinstance(op, tuple) else str(op),
                "line": 0 if at is None else at.line,
                "world": self.engines.index(engine),
                "actor": str(actor) if actor else HOST,
                "clock": list(engine._clocks[actor]),
                "calls": (getattr(self._local, "began", None), end, threading.get_native_id()),
                "note": note,
            }
        )


def _as_gpuprobes(function: Any) -> Any:
    """``function``, whose frames count as gpuprobe's, which checks who called an operator."""
    from gpuprobe.user_frames import PACKAGE

    file = f"{PACKAGE}{Path(__file__).name}"
    function.__code__ = function.__code__.replace(co_filename=file)
    return function


def ours(rows: Sequence[dict[str, Any]]) -> dict[int, Item]:
    """gpuprobe's order, by operator."""
    items: dict[int, Item] = {}
    for row in rows:
        item = items.setdefault(row["operator"], Item(row["world"]))
        clock = {str(at) if at else HOST: time for at, time in enumerate(row["clock"])}
        item.launched(row["actor"], clock)
    return items


def derived(one: Run) -> dict[int, Item]:
    """The order of the calls, by operator; of those that launch something, and of the host's."""
    rows, calls = one.watching.rows, one.calls or []
    items = {row["operator"]: Item(0) for row in rows}
    at_call: dict[int, Item] = {}
    before: dict[int, list[Item]] = {}  # the host's accesses, by the call that comes next
    launched = set()
    for row in rows:
        begin, end, thread = row["calls"]
        item = items[row["operator"]]
        if row["actor"] == HOST:
            at = end if row["operator"] in launched or begin is None else begin
            before.setdefault(at + one.earlier, []).append(item)
            continue
        launched.add(row["operator"])
        if begin is not None:
            for number in range(begin + one.earlier, end + one.earlier):
                if calls[number].thread == thread:
                    at_call[number] = item
        elif row["op"] == "replay":  # it is reported when the call has returned
            at_call[end + one.earlier - 1] = item
    spans = one.watching.spans
    own = {thread for _, _, thread in spans} | {row["calls"][2] for row in rows}
    within = set()
    for begin, end, _ in spans:
        within.update(range(begin + one.earlier, end + one.earlier))
    order = CallOrder()
    for number, call in enumerate(calls):
        for item in before.pop(number, ()):
            order.host(item)
        mine = call.thread in own
        order.call(call, at_call.get(number), mine and number not in within, mine)
    for item in (item for number in sorted(before) for item in before[number]):
        order.host(item)
    return {number: item for number, item in items.items() if item.ends}


class Run(NamedTuple):
    """``calls`` is None on the simulated GPU. ``earlier``: of the calls, those of earlier programs
    of this process, whose streams and memory may still be used.
    """

    watching: Watching
    calls: list[Any] | None
    earlier: int


_created: list[Any] = []
_LASTING: Final = frozenset({"STREAM_CREATE", "MALLOC", "FREE", "HOST_ALLOC", "HOST_FREE"})


def watched(program: Program) -> Run:
    """Run a program."""
    from gpuprobe.native.process import loaded
    from gpuprobe.patching import Patches

    runtime = loaded()
    watching, patches = Watching(runtime), Patches()
    earlier = list(_created)
    if runtime is not None:
        runtime.start_log(5_000_000)
    watching.install(patches)
    try:
        run(program)
    finally:
        patches.undo()
        calls = [] if runtime is None else list(runtime.take_log())
        _created.extend(call for call in calls if call.kind.name in _LASTING)
    if runtime is None:
        return Run(watching, None, 0)
    return Run(watching, [*earlier, *calls], len(earlier))


def orders(one: Run) -> dict[str, Any]:
    """Both orders of a run, for those of its operators that are in both; on the simulated GPU
    gpuprobe's.
    """
    rows = one.watching.rows
    engine = ours(rows)
    log = None if one.calls is None else derived(one)
    first: dict[int, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["operator"], row)
    kept = [number for number in engine if log is None or number in log]
    return {
        "operators": [[first[number]["op"], first[number]["line"]] for number in kept],
        "ours": [engine[number].data() for number in kept],
        "log": None if log is None else [log[number].data() for number in kept],
        "left out": sorted(
            {first[number]["op"] for number in engine if log is not None and number not in log}
        ),
    }


def account(program: Program) -> dict[str, Any]:
    return orders(watched(program))


# -- comparing


def relation(items: Sequence[Any]) -> list[int]:
    """For each item, those before it, as bits."""
    worlds = list(dict.fromkeys(world for world, _, _ in items))
    items = [(worlds.index(world), starts, last) for world, starts, last in items]
    ends: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for at, (world, _, last) in enumerate(items):
        for stream, time in last.items():
            ends.setdefault((world, stream), []).append((time, at))
    found = []
    for at, (world, starts, _) in enumerate(items):
        same = 0
        for other in range(at):
            if items[other][0] == world:
                same |= 1 << other
        for clock in starts:
            for (where, stream), entries in ends.items():
                if where == world:
                    seen = clock.get(stream, 0)
                    for time, other in entries:
                        if time > seen:
                            same &= ~(1 << other)
        found.append(same)
    return found


Difference = tuple[int, int, bool]
"""Two operators' numbers, and whether the second order has the edge."""


def differences(one: Sequence[Any], other: Sequence[Any]) -> Iterator[Difference]:
    """Pairs that are ordered in one of two orders of the same operators only."""
    for at, (a, b) in enumerate(zip(relation(one), relation(other), strict=True)):
        odd = a ^ b
        while odd:
            low = odd & -odd
            yield low.bit_length() - 1, at, bool(b & low)
            odd ^= low


def read(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(map(json.loads, lines))


def compare(collected: dict[str, Any], show: int) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    ran = [program for program in programs() if program.name in collected]
    for program in ran:
        result = collected[program.name]
        if "error" in result:
            counts[program.corpus, "no order"] += 1
            print(f"{program.name}: {result['error']}")
            continue
        counts[program.corpus, "operators"] += len(result["operators"])
        odd = list(differences(result["log"], result["ours"]))
        counts[program.corpus, "different" if odd else "equal"] += 1
        tell(program, result["operators"], odd, show)
    print(f"\n{'corpus':20}  programs  equal  different  no order  operators")
    for corpus in dict.fromkeys(program.corpus for program in ran):
        row = [counts[corpus, what] for what in ("equal", "different", "no order")]
        print(
            f"{corpus:20}  {sum(row):8}  {row[0]:5}  {row[1]:9}  {row[2]:8}"
            f"  {counts[corpus, 'operators']:9}"
        )
    return 1 if any(counts[program.corpus, "different"] for program in ran) else 0


def tell(program: Program, operators: Sequence[Any], odd: Sequence[Difference], show: int) -> None:
    for first, second, only_ours in odd[:show]:
        who = "only gpuprobe orders" if only_ours else "gpuprobe does not order"
        one, other = (f"{op} (line {line})" for op, line in (operators[first], operators[second]))
        print(f"{program.name}, 1 of {len(odd)}: {who} {one} before {other}")


def collect(names: Collection[str], path: Path) -> None:
    begin()
    done = read(path)
    with path.open("a") as file:
        for program, found in run_each(chosen(names, done), account):
            print(json.dumps([program.name, found]), file=file, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("file", type=Path)
    collecting.add_argument("names", nargs="*")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("--show", type=int, default=1, help="differences of each program")
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.names, args.file)
        return 0
    return compare(read(args.file), args.show)


if __name__ == "__main__":
    raise SystemExit(main())
