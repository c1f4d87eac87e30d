"""The data of a page's charts: curves, trees and steps, plain and bounded in size.

A column of numbers is packed: differences of neighbours, each of eight bytes, split into eight
planes (all lowest bytes first), deflated, in base 64. Memory curves repeat the same amounts, and
the high planes are nearly constant, so a point takes about a byte. The page unpacks it with the
browser's DecompressionStream.
"""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import sub
from typing import Any

from gpuprobe.analysis.inspection.tracks import NEEDS, SingleBlocks, SingleLife, Track
from gpuprobe.analysis.peak.flame import FlameNode, pruned
from gpuprobe.analysis.trace.timeline import Timeline, thin
from gpuprobe.model.memory import Category
from gpuprobe.model.run.recording import StepRow
from gpuprobe.model.text import visible
from gpuprobe.model.values import Bytes, Unavailable, available

MOST_BYTES = 1_800_000
"""The size of all curves, packed. With trees, tables and code a page is below 3 MB."""

_NODES = 6_000
_NAME = 300  # characters: a template's name may have thousands
_STEPS = 20_000


def track_data(tracks: Sequence[Track], most: int = MOST_BYTES) -> list[dict[str, Any]]:
    """The tracks as data of at most ``most`` bytes. Thins the tracks in place."""
    while True:
        packed = [_track(track) for track in tracks]
        held = sum(_weight(item) for item in packed)
        if held <= most or all(len(track) <= 500 for track in tracks):
            return packed
        for track in tracks:
            # A little below the limit, so that a second round is seldom needed.
            track.thinned(max(500, int(len(track) * most / held * 0.9)))


def _weight(item: dict[str, Any]) -> int:
    columns = [*item["columns"].values(), *item["bands"].values(), *item["needs"].values()]
    return sum(len(text) for text in columns if text is not None)


def _track(track: Track) -> dict[str, Any]:
    reserved = track.reserved
    phases = track.phases
    names = list(dict.fromkeys(span.name for span in phases))
    place = {name: index for index, name in enumerate(names)}
    top = max(track.allocated, default=0)
    return {
        "rank": track.rank,
        "device": visible(track.device),
        "events": track.events,
        "complete": track.complete,
        "peak": {"at": track.at[track.allocated.index(top)] if len(track) else 0, "bytes": top},
        "columns": {
            "at": pack(track.at),
            "time_us": pack(track.time_us),
            "allocated": pack(track.allocated),
            "active": pack(track.active),
            "reserved": None if isinstance(reserved, Unavailable) else pack(reserved),
        },
        "reserved_missing": reserved.reason if isinstance(reserved, Unavailable) else "",
        "bands": {category.value: pack(column) for category, column in track.bands.items()},
        "needs": {need.value: pack(column) for need, column in track.needs.items()},
        "blocks": _blocks(track.blocks),
        "chunks": [[chunk.step, chunk.first, chunk.events] for chunk in track.chunks],
        "phases": {
            "from": track.phases_from,
            "names": [_short(name) for name in names],
            "spans": [[span.first, span.end, place[span.name]] for span in phases],
        },
    }


def _blocks(blocks: SingleBlocks) -> dict[str, Any]:
    """The largest blocks one by one, with the frames and names that they use."""
    nodes: dict[int, int] = {0: 0}
    names: dict[int, int] = {0: 0}
    parents, frames = [-1], [0]

    def node(at: int) -> int:
        path = []
        while at not in nodes:
            path.append(at)
            at = blocks.parents[at]
        for one in reversed(path):
            nodes[one] = len(parents)
            parents.append(nodes[blocks.parents[one]])
            frames.append(names.setdefault(blocks.frames[one], len(names)))
        return nodes[path[0]] if path else nodes[at]

    stacks = [node(at) for at in blocks.stack]
    codes = dict.fromkeys(blocks.category)
    return {
        "total": blocks.total,
        "columns": {
            "start": pack(blocks.start),
            "life": pack(map(sub, blocks.end, blocks.start)),
            "size": pack(blocks.size),
            "category": pack(blocks.category),
            "stack": pack(stacks),
            "module": pack(blocks.module),
            "phase": pack(blocks.phase),
        },
        "uses": _uses(blocks) if any(blocks.spells) else None,
        "needs": [need.value for need in NEEDS],
        "categories": {code: Category.from_code(code).value for code in codes},
        "parents": pack(parents),
        "frames": pack(frames),
        "names": [_short(blocks.names[name]) for name in names],
        "plumbing": [int(blocks.plumbing[name]) for name in names],
        "strings": [_short(text) for text in blocks.strings],
    }


def _uses(blocks: SingleBlocks) -> dict[str, Any]:
    """The lives of the blocks: `SingleBlocks.life` by columns, and their spells one after the other
    with the number of each block's.
    """
    spells = [spell for some in blocks.spells for spell in some]
    return {
        **{name: pack(getattr(life, name) for life in blocks.life) for name in SingleLife._fields},
        "spells": pack(map(len, blocks.spells)),
        "at": pack(at for at, _ in spells),
        "need": pack(need for _, need in spells),
    }


def _short(name: str) -> str:
    """A printable name; of a long one the beginning and the end."""
    shown = visible(name)
    if len(shown) <= _NAME:
        return shown
    return f"{shown[: _NAME // 3]}…{shown[-2 * _NAME // 3 :]}"


def tree_data(tree: FlameNode, most: int = _NODES) -> dict[str, Any]:
    """A tree in flat form: parents before children, ``parents[0]`` is -1. Of at most ``most`` nodes
    each may have one more child, for the nodes that were omitted.

    Flat, because JSON writers and browsers limit the depth of nested objects, and a recursive
    program's stack is deeper.
    """
    names: dict[str, int] = {}
    columns: dict[str, list[int]] = {
        key: [] for key in ("name", "bytes", "blocks", "own", "parents")
    }
    pending = [(pruned(tree, most), -1)]
    while pending:
        node, parent = pending.pop()
        index = len(columns["name"])
        columns["name"].append(names.setdefault(node.name, len(names)))
        columns["bytes"].append(node.bytes)
        columns["blocks"].append(node.blocks)
        columns["own"].append(node.own)
        columns["parents"].append(parent)
        pending.extend((child, index) for child in reversed(node.children))
    return {"names": [_short(name) for name in names], **columns}


_MOST = 1 << 52
"""The largest number of a column: JavaScript's numbers are exact up to it."""


def step_columns(rows: Iterable[StepRow]) -> list[dict[str, Any]]:
    """The steps of a report, one table per rank and device; -1 is an unknown value.

    Of more than `_STEPS` steps, those with extremes are kept.
    """
    found: dict[tuple[int, str], dict[str, array[int]]] = {}
    names = ("index", "duration_ns", "at_least", "at_most", "reserved", "end")
    for row in rows:
        step = row.step
        for window in step.windows:
            key = (row.rank, window.device)
            columns = found.setdefault(key, {name: array("q") for name in names})
            peak, reserved = window.peak_allocated, window.peak_reserved
            values = {
                "index": step.index,
                "duration_ns": step.duration_ns,
                "at_least": -1 if isinstance(peak, Unavailable) else peak.at_least,
                "at_most": -1 if isinstance(peak, Unavailable) else peak.at_most,
                "reserved": -1 if isinstance(reserved, Unavailable) else reserved.at_most,
                "end": available(window.end.allocated, Bytes(-1)),
            }
            for name, value in values.items():
                # A damaged recording may have larger numbers than a column.
                columns[name].append(max(-1, min(value, _MOST)))
    return [
        {
            "rank": rank,
            "device": visible(device),
            "columns": {name: pack(column) for name, column in _thin(columns, _STEPS).items()},
        }
        for (rank, device), columns in found.items()
    ]


def _thin(columns: dict[str, array[int]], most: int) -> dict[str, array[int]]:
    count = len(columns["index"])
    if count <= most:
        return columns
    line = Timeline(
        "",
        range(count),
        columns["duration_ns"],
        columns["at_least"],
        columns["end"],
        columns["reserved"],
    )
    keep = thin(line, most).event
    return {name: array("q", map(column.__getitem__, keep)) for name, column in columns.items()}


def pack(values: Iterable[int]) -> str:
    """A packed column of integers below 2**53 in size; differences of neighbours must be, too."""
    column = array("q", values)
    if len(column):
        column = column[:1] + array("q", map(sub, column[1:], column))
    if sys.byteorder == "big":
        column.byteswap()
    raw = column.tobytes()
    planes = b"".join(raw[place::8] for place in range(8))
    return base64.b64encode(zlib.compress(planes, 9)).decode("ascii")


def unpack(packed: str) -> list[int]:
    """The integers of a packed column, for tests and other readers."""
    planes = zlib.decompress(base64.b64decode(packed))
    count = len(planes) // 8
    raw = bytearray(len(planes))
    for place in range(8):
        raw[place::8] = planes[place * count : (place + 1) * count]
    column = array("q", bytes(raw))
    if sys.byteorder == "big":
        column.byteswap()
    return list(accumulate(column))
