"""A training run on a GPU, made by hand: the same bytes every time, and no torch needed."""

from __future__ import annotations

import os
import random
from pathlib import Path

from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.memory import AllocatorCounts, Block, BlockState, Category, Segment, TraceAction
from gpuprobe.model.place import Place
from gpuprobe.model.run.session import (
    AllocatorActivity,
    DeviceWindow,
    Environment,
    HostWindow,
    KnownTensors,
    Phase,
    Placed,
    Session,
    SessionEnd,
    Step,
)
from gpuprobe.model.trace import AllocatorSettings, Frame, MemoryTrace
from gpuprobe.model.values import Bytes, Peak
from gpuprobe.recording.writer import RecordingWriter

MIB = 1 << 20
SOURCE = '''"""A model."""


class Net:
    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden)


def train(net, batches):
    for batch in batches:
        loss = net.forward(batch)
        loss.backward()
        kept.append(loss)
        optimizer.step()
'''

_ALLOC = TraceAction.ALLOC.code
_REQUESTED = TraceAction.FREE_REQUESTED.code
_COMPLETED = TraceAction.FREE_COMPLETED.code
_SLOTS = 10  # of a MiB each, in a segment
_LINES = {
    Category.PARAMETER: (5, "__init__"),
    Category.OPTIMIZER_STATE: (15, "train"),
    Category.ACTIVATION: (6, "forward"),
    Category.GRADIENT: (13, "train"),
    Category.TEMPORARY: (7, "forward"),
    Category.OTHER: (14, "train"),
}


class Training:
    """Blocks of whole MiB in segments of 10 MiB; each step keeps one block more (a leak)."""

    def __init__(self, folder: Path, *, device: int = 0, segments: int = 8, seed: int = 1) -> None:
        self.folder = folder
        self.device = device
        self._rng = random.Random(seed)
        self._bases = [(i + 1) << 32 for i in range(segments)]
        self._slots: dict[int, list[int]] = {base: [0] * _SLOTS for base in self._bases}
        self._live: dict[int, tuple[int, Category]] = {}
        self._clock = 2_000_000_000_000_000
        self.modules = ["net.first"]  # of activations, in turn
        self._trace = MemoryTrace(f"cuda:{device}")
        for _ in range(4):
            self._alloc(2, Category.PARAMETER, "setup")

    def step(self, index: int) -> MemoryTrace:
        """The trace of the next step."""
        trace = self._trace = MemoryTrace(
            f"cuda:{self.device}", step=index, settings=AllocatorSettings()
        )
        for address, (size, category) in self._live.items():
            trace.baseline.append(
                _ALLOC,
                address,
                size * MIB,
                stack=self._stack(category),
                category=category.code,
            )
        if not index:
            for _ in range(4):
                self._alloc(1, Category.OPTIMIZER_STATE, "optimizer")
        acts = []
        for _ in range(12):
            acts.append(self._alloc(self._rng.randint(1, 4), Category.ACTIVATION, "forward"))
            self._free(self._alloc(1, Category.TEMPORARY, "forward"), "forward")
        grads = []
        for count, act in enumerate(reversed(acts)):
            if count % 3 == 0:
                grads.append(self._alloc(2, Category.GRADIENT, "backward"))
            self._free(act, "backward")
        self._alloc(1, Category.OTHER, "other")
        for grad in grads:
            self._free(grad, "optimizer")
        trace.segments = tuple(self._segment(base) for base in self._bases)
        return trace

    def held(self) -> int:
        """Allocated bytes now."""
        return sum(size for size, _ in self._live.values()) * MIB

    @property
    def reserved(self) -> int:
        return len(self._bases) * _SLOTS * MIB

    def by_category(self) -> dict[Category, Bytes]:
        found: dict[Category, Bytes] = {}
        for size, category in self._live.values():
            found[category] = Bytes(found.get(category, 0) + size * MIB)
        return found

    def _alloc(self, size: int, category: Category, phase: str) -> int:
        for base, slots in self._slots.items():
            for at in range(_SLOTS - size + 1):
                if not any(slots[at : at + size]):
                    slots[at : at + size] = [size] * size
                    address = base + at * MIB
                    self._live[address] = (size, category)
                    self._event(_ALLOC, address, size, category, phase)
                    return address
        raise AssertionError("the segments are full")

    def _free(self, address: int, phase: str) -> None:
        size, category = self._live.pop(address)
        base = max(b for b in self._bases if b <= address)
        at = (address - base) // MIB
        self._slots[base][at : at + size] = [0] * size
        self._event(_REQUESTED, address, size, category, phase)
        self._event(_COMPLETED, address, size, category, phase)

    def _event(self, action: int, address: int, size: int, category: Category, phase: str) -> None:
        self._clock += 250
        self._trace.events.append(
            action,
            address,
            size * MIB,
            0,
            self._clock,
            self._stack(category) if action == _ALLOC else 0,
            category.code,
            self._trace.stacks.string(self._module() if category is Category.ACTIVATION else ""),
            self._trace.stacks.string(phase),
        )

    def _module(self) -> str:
        self.modules = [*self.modules[1:], self.modules[0]]
        return self.modules[-1]

    def _stack(self, category: Category) -> int:
        line, name = _LINES[category]
        frames = (
            Frame("/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward"),
            Frame(str(self.folder / "model.py"), line, name),
            Frame(str(self.folder / "model.py"), 12, "train"),
        )
        table = self._trace.stacks
        return table.stack(tuple(table.frame(frame) for frame in frames))

    def _segment(self, base: int) -> Segment:
        blocks, at = [], base
        for address, (size, category) in sorted(self._live.items()):
            if not base <= address < base + _SLOTS * MIB:
                continue
            if address > at:
                blocks.append(Block(at, address - at, 0, BlockState.INACTIVE))
            state = BlockState.ALLOCATED
            blocks.append(Block(address, size * MIB, size * MIB, state, self._stack(category)))
            at = address + size * MIB
        if at < base + _SLOTS * MIB:
            blocks.append(Block(at, base + _SLOTS * MIB - at, 0, BlockState.INACTIVE))
        return Segment(self.device, base, _SLOTS * MIB, 0, "large", blocks=tuple(blocks))


class Run:
    """A recording of it, written step by step. ``traced``: which steps have a trace."""

    def __init__(
        self,
        folder: Path,
        name: str = "run.gpuprobe",
        *,
        rank: int = 0,
        world_size: int = 1,
        hostname: str = "elsewhere",
        pid: int = 42,
        slow: float = 1.0,
    ) -> None:
        (folder / "model.py").write_text(SOURCE, "utf-8")
        os.utime(folder / "model.py", (1e9, 1e9))  # older than the recording
        self.training = Training(folder, device=rank, seed=rank + 1)
        self.writer = RecordingWriter.create(folder / name, rank=rank, world_size=world_size)
        self.path = folder / name
        self._slow = slow
        self._index = 0
        self._start = 0
        session = Session(
            2e9, pid, ("train.py",), "trace", (f"cuda:{rank}",), str(folder), rank, rank, world_size
        )
        self.writer.session(
            session, Environment("0", "3.11.0", "Linux", hostname, torch="2.13.0", cpu_count=8)
        )

    def step(self, *, traced: bool = True, placement: tuple[Placed, ...] = ()) -> Step:
        """Write the next step."""
        start, index = self.training.held(), self._index
        trace = self.training.step(index)
        names = (self.writer.trace(trace),) if traced else ()
        peak = start + 30 * MIB + self._index * MIB
        window = self._window(start, peak)
        ns = round((5 + self._index % 3) * 1_000_000 * self._slow)
        phases = tuple(
            Phase(name, self._start + begin * ns // 10, share * ns // 10, 1, (part,))
            for name, begin, share, part in (
                ("forward", 0, 3, self._window(start, peak - 2 * MIB)),
                ("backward", 3, 5, window),
                ("optimizer", 8, 2, self._window(start, start + 8 * MIB)),
            )
        )
        known = KnownTensors(
            window.device, {**self.training.by_category(), Category.OTHER: Bytes(0)}, Bytes(0)
        )
        host = HostWindow(Bytes(900 * MIB), Bytes(900 * MIB), Peak.exactly(901 * MIB))
        written = Step(
            index,
            self._start,
            ns,
            phases,
            (window,),
            host,
            tensors=(known,),
            traces=names,
            placement=placement,
        )
        self.writer.step(written)
        self._index += 1
        self._start += ns + 100_000
        return written

    def _window(self, start: int, peak: int) -> DeviceWindow:
        held, reserved = self.training.held(), Bytes(self.training.reserved)
        return DeviceWindow(
            f"cuda:{self.training.device}",
            AllocatorCounts(Bytes(start), Bytes(start), reserved, Bytes(start)),
            AllocatorCounts(Bytes(held), Bytes(held), reserved, Bytes(held)),
            Peak.exactly(peak),
            Peak.exactly(reserved),
            AllocatorActivity(2 if not self._index else 0, 0, 0, 0),
        )

    def finding(self, *, race: bool = True, line: int = 13) -> None:
        place = Place(str(self.training.folder / "model.py"), line, "train")
        if race:
            self.writer.finding(
                Finding(
                    "GP201",
                    "read-after-write",
                    Level.ERROR,
                    "side stream reads 'hidden' while the default stream writes it",
                    (("written by", "aten::mul_"), ("read by", "aten::sum")),
                    place,
                    fix=Fix("make the reader wait", "side.wait_stream(main)"),
                )
            )
        else:
            self.writer.finding(
                Finding(
                    "GP206", "implicit-sync", Level.WARNING, "implicit synchronisation: .item()",
                    location=place, count=12, subject=".item()",
                )
            )  # fmt: skip

    def end(self) -> None:
        self.writer.end(SessionEnd(2_000_000_000))
        self.writer.close()
