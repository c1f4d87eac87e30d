"""Random programs for torch's caching allocator: their requests, and their settings.

Used by ``allocator_against_torch.py``. A program follows from its seed alone; that it runs out of
memory, or that a pool is dropped twice, it finds out as it runs.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

MIB: Final = 1 << 20
STREAMS: Final = 4


@dataclass(frozen=True)
class Machine:
    """A device: its bytes, and whether programs set the share of it that they may use. torch
    cannot forget that a process once did, so such programs run in separate processes."""

    capacity: int
    limited: bool


MACHINES: Final = (
    Machine(96 * MIB, False),
    Machine(256 * MIB, False),
    Machine(256 * MIB, True),
    Machine(640 * MIB, False),
    Machine(1024 * MIB, True),
    Machine(8192 * MIB, False),
)


class Operation(NamedTuple):
    """One step of a program. ``kind`` is a method of ``_Running`` in
    ``allocator_against_torch.py``; ``slot`` numbers blocks, pools or graphs."""

    kind: str
    slot: int = 0
    size: int = 0
    stream: int = 0
    other: int = -1  # the graph whose pool is shared
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """``stacks``: its history has stacks. ``other_conf`` and ``change``: the settings of the
    what-if, all and what they change. ``comparable``: nothing in it changes what a what-if keeps.
    """

    seed: int
    machine: int
    segment_size: int  # large_segment_size_mb
    conf: str
    other_conf: str
    change: str
    fraction: float
    stacks: bool
    operations: tuple[Operation, ...]
    traits: frozenset[str]
    comparable: bool


DEFAULTS: Final = {"expandable_segments": "False", "large_segment_size_mb": "20"}
"""What torch does not forget when other settings are given."""

POOL_OPTIONS: Final = ("use_on_oom", "no_split")
"""Options of a ``MemPool``."""

_PINNED: Final = {
    "pinned_use_cuda_host_register": "True",
    "pinned_num_register_threads": "4",
    "pinned_use_background_threads": "False",
}


def program_of(seed: int, without: Collection[str] = ()) -> Program:
    """The program of a seed. ``without``: settings, and options of pools, that a torch does not
    know, and that are left out.
    """
    rng = random.Random(seed)
    number = rng.randrange(len(MACHINES))
    machine = MACHINES[number]
    conf = random_conf(rng)
    other, changes = changed_conf(rng, conf)
    fraction = rng.choice((0.95, 0.9, 0.75, 0.6, 0.5, 0.35)) if machine.limited else 1.0
    expandable = "expandable_segments" in {*conf, *other}
    writer = _Writer(rng, machine, expandable=expandable)
    writer.write(rng.choice((20, 60, 120, 250)))
    stacks = rng.random() < 0.7
    traits = {f"{key}" for key, value in conf.items() if DEFAULTS.get(key) != value}
    traits |= writer.traits
    traits.add(f"device of {machine.capacity // MIB} MiB" + (", limited" * machine.limited))
    traits.add("with stacks" if stacks else "without stacks")
    traits -= {*without, *(f"pool with {name}" for name in without)}
    if not traits & {key for key, _ in _KEYS}:
        traits.add("default settings")
    changes = [change for change in changes if change.removeprefix("no_") not in without]
    return Program(
        seed=seed,
        machine=number,
        segment_size=int(conf.get("large_segment_size_mb", 20)),
        conf=conf_text(conf, without),
        other_conf=conf_text(other, without),
        change=" ".join(sorted(changes)),
        fraction=fraction,
        stacks=stacks,
        operations=tuple(writer.operations),
        traits=frozenset(traits),
        comparable="fraction changed midway" not in traits,
    )


def conf_text(conf: Mapping[str, str], without: Collection[str]) -> str:
    whole = {**DEFAULTS, **conf}
    if "large_segment_size_mb" in without:
        # Older versions do not forget this one either, and take only more than their default.
        whole.setdefault("max_non_split_rounding_mb", "21")
    return ",".join(f"{key}:{value}" for key, value in whole.items() if key not in without)


def _divisions(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return str(rng.choice((1, 2, 4, 8, 16, 32)))
    bounds = sorted(rng.sample([1, 2, 4, 8, 16, 32, 64, 128, 256], rng.randint(1, 4)))
    listed = [f"{bound}:{rng.choice((0, 1, 2, 4, 8))}" for bound in bounds]
    if rng.random() < 0.7:
        listed.append(f">:{rng.choice((0, 1, 2, 4, 8))}")
    return f"[{','.join(listed)}]"


def _megabytes(rng: random.Random) -> str:
    return str(rng.choice((64, 64, 65, 80, 100, 128, 200)))


_KEYS: Final = (
    ("expandable_segments", lambda rng: "True"),
    ("roundup_power2_divisions", _divisions),
    ("max_split_size_mb", lambda rng: str(rng.choice((64, 65, 70, 80, 100, 128)))),
    ("max_non_split_rounding_mb", _megabytes),
    ("garbage_collection_threshold", lambda rng: str(rng.choice((0.2, 0.4, 0.6, 0.8, 0.95)))),
    ("large_segment_size_mb", lambda rng: str(rng.choice((12, 16, 24, 32, 64)))),
)
"""Settings and their random values. Any of them goes with any other: the two limits are no smaller
than the largest segments."""


def random_conf(rng: random.Random) -> dict[str, str]:
    """The settings that are not the defaults."""
    likely = rng.choice((0.0, 0.15, 0.3, 0.5))
    conf = {key: value(rng) for key, value in _KEYS if rng.random() < likely}
    # Smaller limits, nearer to the requests of programs of this size, where segments allow it.
    if "large_segment_size_mb" not in conf:
        for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
            if key in conf and rng.random() < 0.7:
                conf[key] = str(rng.choice((22, 21, 24, 30, 32, 40)))
    if rng.random() < 0.1:
        conf.update(_PINNED)
    return conf


def changed_conf(rng: random.Random, conf: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Other settings, and what is changed in them: one key or two."""
    other = dict(conf)
    changes = []
    for key, value in rng.sample(_KEYS, rng.choice((1, 1, 2))):
        if key in other and rng.random() < 0.7:
            del other[key]
        else:
            other[key] = value(rng)
        if key == "large_segment_size_mb":
            for limit in ("max_split_size_mb", "max_non_split_rounding_mb"):
                if int(other.get(limit, 64)) < int(other.get(key, 20)):
                    other[limit] = "64"
        if other.get(key) != conf.get(key):
            changes.append(key if key in other else f"no_{key}")
    if not changes:
        return changed_conf(rng, conf)
    return other, changes


class _Writer:
    """Writes a program's operations."""

    def __init__(self, rng: random.Random, machine: Machine, *, expandable: bool) -> None:
        self._rng = rng
        self._expandable = expandable
        self.operations: list[Operation] = []
        self.traits: set[str] = set()
        self._held: list[tuple[int, int]] = []  # slot, size
        self._slots = 0
        self._pools: list[int] = []
        self._graphs: list[int] = []
        self._inside = ""
        self._capture_stream = 0
        self._level = machine.capacity * rng.choice((0.3, 0.6, 0.8, 1.0, 1.2))
        self._most = max(int(machine.capacity * rng.choice((0.05, 0.15, 0.4))), 4 * MIB)
        # Programs request the same sizes again and again.
        self._palette = [self._any_size() for _ in range(rng.randint(3, 12))]
        self._repeats = rng.choice((0.0, 0.5, 0.9))
        self._streams = rng.choice((1, 1, 2, STREAMS))
        self._other_streams = rng.choice((0.1, 0.5)) if self._streams > 1 else 0.0
        self._kinds = {
            "record_stream": rng.choice((0.0, 0.1)) if self._streams > 1 else 0.0,
            "empty_cache": rng.choice((0.0, 0.0, 0.02, 0.06)),
            "pool": rng.choice((0.0, 0.0, 0.0, 0.08)),
            "capture": rng.choice((0.0, 0.0, 0.0, 0.08)),
            "fraction": 0.02 if machine.limited and rng.random() < 0.3 else 0.0,
            "pinned": rng.choice((0.0,) * 7 + (0.03,)),
        }

    def write(self, length: int) -> None:
        for _ in range(length):
            self._step()

    def _any_size(self) -> int:
        rng = self._rng
        kind = rng.randrange(7)
        if kind == 0:
            return rng.randrange(1, 4096)
        if kind == 1:
            return rng.randrange(4096, MIB + 1)
        if kind in (2, 3):
            return rng.randrange(MIB + 1, 10 * MIB)
        if kind == 4:
            return rng.randrange(1, self._most + 1)
        if kind == 5:
            return rng.choice((1, 2, 10, 20, 30, 64)) * MIB + rng.choice((-512, 0, 0, 512, 1024))
        return rng.choice((512, 513, MIB - 1, MIB + 1, 3 * MIB, 5 * MIB, 9 * MIB, 40 * MIB))

    def _size(self) -> int:
        if self._rng.random() < self._repeats:
            return self._rng.choice(self._palette)
        return self._any_size()

    def _step(self) -> None:
        rng = self._rng
        for kind, likely in self._kinds.items():
            if rng.random() < likely:
                getattr(self, f"_{kind}")()
                return
        held = sum(size for _, size in self._held)
        if not self._held or rng.random() < (0.65 if held < self._level else 0.3):
            self._allocate()
        else:
            slot, _ = self._held.pop(rng.randrange(len(self._held)))
            self.operations.append(Operation("free", slot))

    def _stream(self) -> int:
        rng = self._rng
        if self._inside == "capture" and (self._expandable or self._kinds["record_stream"]):
            # torch itself fails where another stream's request unmaps pages during a capture, or
            # polls an event of a stream that captures.
            return self._capture_stream
        usual = self._capture_stream if self._inside == "capture" else 0
        if rng.random() < self._other_streams:
            self.traits.add("several streams")
            return rng.randrange(self._streams)
        return usual

    def _allocate(self) -> None:
        self._slots += 1
        size = self._size()
        self._held.append((self._slots, size))
        self.operations.append(Operation("allocate", self._slots, size, self._stream()))

    def _record_stream(self) -> None:
        if self._held:
            self.traits.add("record_stream")
            slot, _ = self._rng.choice(self._held)
            stream = self._rng.randrange(self._streams)
            self.operations.append(Operation("record_stream", slot, stream=stream))

    def _empty_cache(self) -> None:
        if self._inside == "capture":
            return
        self.traits.add("empty_cache" + (" in a pool" if self._inside else ""))
        self.operations.append(Operation("empty_cache"))

    def _fraction(self) -> None:
        self.traits.add("fraction changed midway")
        self.operations.append(Operation("fraction", size=self._rng.choice((300, 500, 800, 1000))))

    def _pinned(self) -> None:
        self.traits.add("pinned memory")
        self.operations.append(Operation("pinned", size=self._rng.randrange(1, 4 * MIB)))

    def _pool(self) -> None:
        rng = self._rng
        if self._inside == "pool":
            self._inside = ""
            self.operations.append(Operation("leave_pool"))
        elif not self._inside:
            # torch itself crashes where a pool ends whose blocks wait for a stream.
            if self._pools and not self._kinds["record_stream"] and rng.random() < 0.3:
                slot = self._pools.pop(rng.randrange(len(self._pools)))
                self.traits.add("pool dropped")
                self.operations.append(Operation("drop_pool", slot))
                return
            if not self._pools or rng.random() < 0.3:
                self._slots += 1
                self._pools.append(self._slots)
                options = tuple(name for name in POOL_OPTIONS if rng.random() < 0.3)
                self.traits.update(f"pool with {name}" for name in options)
                self.operations.append(Operation("make_pool", self._slots, options=options))
            self.traits.add("MemPool")
            self._inside = "pool"
            self.operations.append(Operation("enter_pool", rng.choice(self._pools)))

    def _capture(self) -> None:
        rng = self._rng
        if self._inside == "capture":
            self._inside = ""
            self.operations.append(Operation("end_capture"))
        elif not self._inside:
            if self._graphs and rng.random() < 0.3:
                slot = self._graphs.pop(rng.randrange(len(self._graphs)))
                self.traits.add("graph dropped")
                self.operations.append(Operation("drop_graph", slot))
                return
            self._slots += 1
            other = rng.choice(self._graphs) if self._graphs and rng.random() < 0.4 else -1
            self._graphs.append(self._slots)
            self._capture_stream = rng.randint(1, STREAMS - 1)
            self.traits.add("CUDA graph")
            self._inside = "capture"
            self.operations.append(
                Operation("begin_capture", self._slots, stream=self._capture_stream, other=other)
            )
