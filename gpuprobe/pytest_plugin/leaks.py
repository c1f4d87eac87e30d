"""What a test leaves allocated: the lines that allocated it, and what holds it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gpuprobe.model.run.holders import Holder, with_article
from gpuprobe.model.text import human_bytes, plural

_MOST_LINES = 5

_Key: TypeAlias = "int | tuple[str, int]"
"""A block as the search for holders names it: by device and address."""


class _Left(NamedTuple):
    """A block: its size in bytes, and the line that allocated it."""

    bytes: int
    line: str


def left_behind(
    path: Path, root: Path, allocated: Mapping[str, set[int]], ignored: Collection[int]
) -> Iterator[str]:
    """A line of text for each line of the program and its holder, the most bytes first. ``path``:
    the recording of the test; ``root``: the folder of its project; ``allocated``: the addresses of
    all blocks that are allocated now, by device; ``ignored``: those of the test's fixtures, which
    end with them.
    """
    # 30 ms with torch loaded; only tests that leak need it.
    from gpuprobe.torch_support.holding.search import holders_of

    blocks = dict(_blocks(path, allocated, ignored))
    holders = holders_of({key: block.bytes for key, block in blocks.items()})
    groups: dict[tuple[str, str], list[int]] = {}
    for key, block in blocks.items():
        holder = holders.get(key)
        held = "what holds it was not found" if holder is None else f"held by {_name(holder)}"
        groups.setdefault((block.line, held), []).append(block.bytes)
    ordered = sorted(groups.items(), key=lambda item: (-sum(item[1]), item[0]))
    for (line, held), sizes in ordered[:_MOST_LINES]:
        line = line.removeprefix(f"{root}{os.sep}")
        amount = f"{human_bytes(sum(sizes))} in {plural(len(sizes), 'block')}"
        yield f"{amount} from {line}, {held}"
    if ordered[_MOST_LINES:]:
        size = sum(sum(sizes) for _, sizes in ordered[_MOST_LINES:])
        yield f"{human_bytes(size)} from other lines"


def _name(holder: Holder) -> str:
    """The innermost container of a holder, or the holder itself if it is in none."""
    sized = [at for at, step in enumerate(holder.path) if step.size is not None]
    if not sized:
        return holder.place
    step = holder.path[sized[-1]]
    labels = [one.label for one in holder.path]
    prefix = holder.name[: len(holder.name) - len("".join(labels))]  # the module of a global
    graph = ", through autograd's graph" if ".grad_fn" in labels else ""
    name = prefix + "".join(labels[: sized[-1] + 1])
    return f"{name} ({with_article(step.kind)} of {step.size:,}){graph}"


def _blocks(
    path: Path, allocated: Mapping[str, set[int]], ignored: Collection[int]
) -> Iterator[tuple[_Key, _Left]]:
    """The blocks that the test allocated and that are allocated now."""
    from gpuprobe.analysis.trace.ledger import ledger_of
    from gpuprobe.api.recordings import load
    from gpuprobe.user_frames import Lines

    for rank in load(path).ranks:
        for step in rank.traced_steps():
            for trace in rank.traces.of(step):
                ledger, lines = ledger_of(trace), Lines(trace.stacks)
                left = allocated.get(trace.device, set()).difference(ignored)
                addresses = ledger.column("address")
                for row in ledger.alive(len(trace.events) - 1):
                    address = addresses[row]
                    if row < ledger.made and address in left:
                        line = str(lines.place(ledger.stack[row]))
                        yield (trace.device, address), _Left(ledger.size[row], line)
