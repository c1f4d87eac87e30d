"""How far the virtual GPU's allocations are from those of torch's own CUDA code, by operator.

    python benchmarks/virtual_accuracy.py [--only PATTERN | --add] NATIVE VIRTUAL [...]

Takes pairs of files that `oracle.py` collected (``--dtypes float32,bfloat16,int64,complex64``,
``--programs``, ``--sizes --only '^(norm|reduce|matmul|sdpa|fft)'``), and writes
``gpuprobe/virtual/accuracy.json``. A call is equal if its highest memory and what it leaves behind
are the same. An operator is equal if it was in a call that is, and no call that differs is put down
to it. A difference is put down to the operator that the sample is named after, or, without one,
to the one in the call that is equal least often. Programs show which operators are equal, not which
differ, since they call many.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from oracle import ROOT, read

OUT: Final = ROOT / "gpuprobe" / "virtual" / "accuracy.json"
ROUNDING: Final = 512
"""Bytes to which torch's allocator rounds blocks."""

LARGE: Final = 64 << 10
"""Bytes from which a call shows what grows with its tensors."""

TYPICAL: Final = 0.95
"""The share of the differing operators that differ less than the figure assumed for operators that
were not compared."""

SOURCE: Final = (
    "benchmarks/virtual_accuracy.py: torch 2.13.0+cu130 on the native engine, h100-80gb, against "
    "the virtual GPU with torch 2.13.0"
)


class Compared(NamedTuple):
    """A call of a sample of ``name``. ``above``: by how many bytes torch's highest memory is above
    the virtual GPU's; ``kept``: the same of what is left afterwards.
    """

    name: str
    operators: dict[str, int]
    above: int
    kept: int


def highest(events: list[list[Any]]) -> tuple[int, int]:
    """Bytes at the highest moment and at the end, in blocks."""
    now = top = 0
    for size, *_ in events:
        blocks = -(-abs(size) // ROUNDING) * ROUNDING
        now += blocks if size > 0 else -blocks
        top = max(top, now)
    return top, now


def pairs(native: Path, virtual: Path) -> tuple[list[Compared], bool]:
    """The calls that both engines ran, and whether they are whole programs."""
    ours, found, programs = read(virtual), [], False
    for key, theirs in read(native).items():
        own = ours.get(key)
        if own is None or key == "engine" or key.endswith(" end"):
            continue
        if any(side.get("lost") or side.get("error") for side in (theirs, own)):
            continue
        programs |= " " not in key
        (top, left), (our_top, our_left) = highest(theirs["events"]), highest(own["events"])
        found.append(Compared(named(key), own["operators"], top - our_top, left - our_left))
    return found, programs


def named(key: str) -> str:
    """The part of an operator's name by which it is the one of a sample."""
    family, _, rest = key.partition(": ")
    if not rest:
        return key.split()[0].rpartition(".")[2]
    families = {"sdpa": "scaled_dot_product", "fft": "_fft"}
    return families.get(family.split()[0], rest.split()[0])


def by_operator(differing: list[Compared], equal: Counter[str]) -> dict[str, list[Compared]]:
    """The calls that differ, by the operator that each is put down to."""
    found: dict[str, list[Compared]] = defaultdict(list)
    counts = Counter(name for call in differing for name in call.operators)

    def differs(name: str) -> tuple[float, str]:
        return counts[name] / (counts[name] + equal[name]), name

    unnamed = []
    for call in differing:
        if own := [name for name in call.operators if call.name in name]:
            found[max(own, key=differs)].append(call)
        elif call.operators:
            unnamed.append(call)
    for call in unnamed:
        known = [name for name in call.operators if name in found]
        found[max(known or call.operators, key=differs)].append(call)
    return found


def difference(name: str, calls: list[Compared]) -> dict[str, Any]:
    """The fields of a `gpuprobe.virtual.accuracy.Difference`."""
    sides = []
    for sign in (1, -1):
        gaps = [(max(0, sign * call.above), call.operators[name]) for call in calls]
        fixed = max((gap for gap, size in gaps if size < LARGE), default=0)
        share = max(((gap - fixed) / size for gap, size in gaps if size >= LARGE), default=0.0)
        sides.append([fixed, round(max(0.0, share), 3)])
    return {"above": sides[0], "below": sides[1]}


def typical(differences: dict[str, Any], side: str) -> list[float]:
    """What `TYPICAL` of the operators that differ are within."""
    at = int(TYPICAL * (len(differences) - 1))
    return [sorted(entry[side][part] for entry in differences.values())[at] for part in (0, 1)]


def dtypes(files: list[Path]) -> list[str]:
    """Those of the operators' samples."""
    found = {key.split()[1] for file in files for key in read(file) if key.endswith(" end")}
    return sorted(found)


def renewed(former: dict[str, Any], document: dict[str, Any], only: str) -> dict[str, Any]:
    """``former`` with ``document``'s entries of the operators that match ``only``."""
    names = {*document["equal"], *document["differences"]}
    found = {name for name in names if re.search(only, name)}
    kept = {name: entry for name, entry in former["differences"].items() if name not in found}
    new = {name: entry for name, entry in document["differences"].items() if name in found}
    return {
        **former,
        "equal": sorted({*former["equal"]} - found | found.intersection(document["equal"])),
        "differences": dict(sorted({**kept, **new}.items())),
    }


def added(former: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """``former`` with what the calls of ``document`` show as well."""
    differences = dict(former["differences"])
    for name, entry in document["differences"].items():
        known = differences.get(name, entry)
        differences[name] = {
            side: [max(pair) for pair in zip(known[side], entry[side], strict=True)]
            for side in ("above", "below")
        }
    return {
        "source": former["source"],
        "dtypes": sorted({*former["dtypes"], *document["dtypes"]}),
        "equal": sorted({*former["equal"], *document["equal"]} - set(differences)),
        "differences": dict(sorted(differences.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="NATIVE VIRTUAL")
    changing = parser.add_mutually_exclusive_group()
    changing.add_argument("--only", default="", help="regular expression of operators to renew")
    changing.add_argument("--add", action="store_true", help="add to the former entries")
    given = parser.parse_args()
    equal: Counter[str] = Counter()
    differing: list[Compared] = []
    for native, virtual in zip(given.files[::2], given.files[1::2], strict=True):
        calls, programs = pairs(native, virtual)
        same = [call for call in calls if not call.above and not call.kept]
        print(f"{native}: {len(same)} of {len(calls)} calls are equal")
        equal.update(name for call in same for name in call.operators)
        if not programs:
            differing += [call for call in calls if call.above or call.kept]
    differences = {
        name: difference(name, calls)
        for name, calls in sorted(by_operator(differing, equal).items())
    }
    document = {
        "source": SOURCE,
        "dtypes": dtypes(given.files),
        "equal": sorted(name for name in equal if name not in differences),
        "differences": differences,
    }
    if given.only or given.add:
        former = json.loads(OUT.read_text(encoding="utf-8"))
        document = renewed(former, document, given.only) if given.only else added(former, document)
    differences = document["differences"]
    document["not_compared"] = {side: typical(differences, side) for side in ("above", "below")}
    OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{len(document['equal'])} operators are equal, {len(document['differences'])} differ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
