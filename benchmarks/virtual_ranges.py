"""Whether the ranges of estimates on the virtual GPU contain what torch's own CUDA code allocates.

    python benchmarks/foreign_programs.py --mode native-shapes --results native.jsonl
    python benchmarks/foreign_programs.py --mode shapes --results virtual.jsonl
    PYTHONPATH=. python benchmarks/virtual_ranges.py native.jsonl virtual.jsonl

The programs are those of ``benchmarks/foreign/corpus.txt``, which were frozen before the ranges
were made. Both files come from one environment with torch's build with CUDA. Printed are the
programs that both engines ran, in how many the native figures lie inside the printed ranges, and
how wide those are; then each program outside of its range.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from gpuprobe.model.text import human_bytes

NARROW = 0.05
"""A range of at most this share of its upper end counts as narrow."""


class Row(NamedTuple):
    """One figure of one program, in bytes."""

    program: str
    figure: str
    native: int
    low: int
    high: int

    @property
    def inside(self) -> bool:
        return self.low <= self.native <= self.high

    @property
    def printed_inside(self) -> bool:
        """Whether it is inside as an estimate prints sizes, with one decimal."""
        native, low, high = map(human_bytes, (self.native, self.low, self.high))
        return self.inside or native in (low, high)

    @property
    def width(self) -> float:
        return (self.high - self.low) / self.high if self.high else 0.0

    @property
    def outside_by(self) -> float:
        """How far the range is from the native figure, as a share of it; negative: too low."""
        if self.inside:
            return 0.0
        nearest = self.high if self.native > self.high else self.low
        return (nearest - self.native) / self.native


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each program that ran."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["status"] == "ran":
            found[row["name"]] = row
    return found


def rows(native: Path, virtual: Path) -> list[Row]:
    ours, theirs = results(virtual), results(native)
    return [
        Row(name, figure, theirs[name][figure], *ours[name][f"{figure}_range"])
        for name in ours
        if name in theirs
        for figure in ("allocated", "reserved")
    ]


def summary(found: list[Row]) -> str:
    lines = []
    for figure in ("allocated", "reserved"):
        of_figure = [row for row in found if row.figure == figure]
        count = len(of_figure)
        if not count:
            continue
        inside = sum(row.inside for row in of_figure)
        printed = sum(row.printed_inside for row in of_figure)
        narrow = sum(row.width <= NARROW for row in of_figure)
        exact = sum(row.low == row.high == row.native for row in of_figure)
        lines.append(
            f"{figure}: {count} programs: {inside} inside of the range ({inside / count:.1%}; "
            f"{printed} as printed), "
            f"{narrow} ranges of at most {NARROW:.0%} ({narrow / count:.1%}), {exact} exact"
        )
    outside = sorted((row for row in found if not row.inside), key=lambda row: row.outside_by)
    lines += [
        f"  {row.program} {row.figure}: {row.native} not in {row.low} to {row.high} "
        f"({row.outside_by:+.2%})"
        for row in outside
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("native", type=Path)
    parser.add_argument("virtual", type=Path)
    args = parser.parse_args()
    found = rows(args.native, args.virtual)
    print(summary(found))
    return int(any(not row.inside for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
