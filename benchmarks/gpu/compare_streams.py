"""Where the simulated GPU allocates otherwise than a real one did: allocation by allocation.

    python benchmarks/gpu/compare_streams.py TRUTH.json          a file of record_truth.py
    python benchmarks/gpu/compare_streams.py SNAPSHOT.pickle     one that snapshot_programs.py knows

Prints the stretches in which the two streams of (allocated or freed, size) differ, with the
operators and lines that the recording names, then how often each operator is missing or too many.
Exit code: 0 if the streams are equal, 1 if not.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # before torch, which the cases import
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec("h100-80gb"))

from reference_models import cases
from snapshot_programs import programs
from truth_files import read_trace, read_truth

import gpuprobe
from gpuprobe.errors import DataError
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.recording.snapshot.load import trace_from_snapshot

_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_NODE = re.compile(r"(\w+Backward\d*)")
_KEPT = {TraceAction.ALLOC.code: "+", TraceAction.FREE_COMPLETED.code: "-"}


class Event(NamedTuple):
    sign: str  # "+" allocated, "-" freed
    size: int
    what: str  # of a free: what had allocated it


class Difference(NamedTuple):
    """A stretch of the recorded stream in whose place the simulated GPU has another."""

    at: int  # index in the recorded stream
    recorded: Sequence[Event]
    simulated: Sequence[Event]


def stream(trace: MemoryTrace) -> list[Event]:
    """Allocations and frees in order. Frees of what was there before are left out: in which
    order a program lets go of its old blocks is not the question.
    """
    owners: dict[int, str] = {}
    found = []
    events = trace.events
    stacks = events.column("stack")
    for action, address, size, stack in zip(
        events.action, events.address, events.size, stacks, strict=True
    ):
        sign = _KEPT.get(action)
        if sign == "+":
            owners[address] = described(trace.stacks.frames_of(stack))
            found.append(Event("+", size, owners[address]))
        elif sign == "-" and address in owners:
            found.append(Event("-", size, owners.pop(address)))
    return found


def described(frames: Sequence[Frame]) -> str:
    """The operators, outermost first, the backward node, and the program's own line."""
    operators = [m[1] for f in frames if (m := _OPERATOR.search(f.name))]
    nodes = [m[1] for f in frames if (m := _NODE.search(f.name))][:1]
    lines = [
        f"{f.filename.rpartition('/')[2]}:{f.line}"
        for f in frames
        if f.filename.endswith(".py")
        and not re.search(r"(^|/)(torch|einops|gpuprobe)/", f.filename)
    ][:1]
    return " ".join([">".join(dict.fromkeys(reversed(operators))), *nodes, *lines]).strip()


def differences(recorded: Sequence[Event], simulated: Sequence[Event]) -> Iterator[Difference]:
    """Where the streams differ in sign or size. Notes on events do not count."""
    left = [event[:2] for event in recorded]
    right = [event[:2] for event in simulated]
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(
        None, left, right, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            yield Difference(i, recorded[i:i_end], simulated[j:j_end])


def lines(found: Sequence[Difference], limit: int) -> Iterator[str]:
    for difference in found[:limit]:
        yield f"at {difference.at}:"
        for title, events in (
            ("recorded", difference.recorded),
            ("simulated", difference.simulated),
        ):
            for event in events[:8]:
                yield f"  {title:9}{event.sign}{event.size:>13,}  {event.what}"
            if len(events) > 8:
                yield f"  {title:9}... and {len(events) - 8} more"
    for title, side in (("only recorded", 1), ("only simulated", 2)):
        counts = Counter(
            (event.what, event.size)
            for difference in found
            for event in difference[side]
            if event.sign == "+"
        )
        if counts:
            yield f"{title}:"
        for (what, size), count in counts.most_common(limit):
            yield f"  {count:6} x {size:>13,}  {what}"


def both(path: Path) -> tuple[MemoryTrace, MemoryTrace]:
    """The recorded trace, and that of the same run on the simulated GPU.

    Raises DataError if there is no trace, or the program is unknown.
    """
    if path.suffix == ".pickle":
        program = programs().get(path.stem)
        if program is None:
            raise DataError(f"snapshot_programs.py has no program for {path}")
        recorded = next(iter(gpuprobe.load(path).ranks[0].load_traces()))
        with gpuprobe.virtual_gpu(program.gpu, compute="shapes"):
            run = program.run("cuda", program.sizes)
            next(run)
            _start()
            next(run, None)
            return recorded, _stop()
    truth = read_truth(path)
    kept = read_trace(path)
    if kept is None:
        raise DataError(f"there is no trace beside {path}")
    case = cases()[truth.case]
    gpu = getattr(truth.gpu, "title", "")
    with gpuprobe.virtual_gpu(gpu, compute="real" if case.values else "shapes"):
        _start()
        step = case.build("cuda", tiny=truth.tiny)
        for _ in truth.steps:
            loss = step()
            del loss
        return kept, _stop()


def _start() -> None:
    import torch

    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=2_000_000)


def _stop() -> MemoryTrace:
    import torch

    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    return trace_from_snapshot(snapshot, 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="a truth file, or a snapshot")
    parser.add_argument("--limit", type=int, default=20, help="stretches to print (default 20)")
    args = parser.parse_args(argv)
    recorded, simulated = (stream(trace) for trace in both(args.path))
    # Later frees have no counterpart in the recording, which ended before: they are not compared.
    last = max((i for i, event in enumerate(simulated) if event.sign == "+"), default=-1)
    final = max((i for i, event in enumerate(recorded) if event.sign == "+"), default=-1)
    found = list(differences(recorded[: final + 1], simulated[: last + 1]))
    print("\n".join(lines(found, args.limit)))
    print(f"{len(recorded)} recorded, {len(simulated)} simulated events, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
