"""The results of the benchmarks of operators, and of random programs of them, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

_FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
_MODES = {"real": "with values", "shapes": "in shapes"}
_COMPUTED = {
    "nothing": "nothing",
    "small": "whole numbers, masks, small tensors (as `--compute shapes` does)",
    "everything": "everything",
}


def _document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / name).read_text(encoding="utf-8"))
    return found


def figures(table: Table) -> str:
    """How many pairs of operator and dtype pass in each mode."""
    document = _document("operator_results.json")
    rows = [
        (
            _MODES[row["mode"]],
            f"{row['pairs']:,}",
            f"{row['passed']:,} ({100 * row['passed'] / row['pairs']:.2f} %)",
        )
        for row in document["figures"]
    ]
    head = (
        f"{document['operators']} entries of torch {document['torch']}'s table",
        "pairs",
        "pass",
    )
    return table(head, rows)


def failures(table: Table) -> str:
    """Every pair that does not pass, and why."""
    found = _document("operator_results.json")["failures"]
    if not found:
        return "All of them pass."
    return table(
        ("operator", "dtypes", "mode", "why"),
        [
            (
                f"`{row['op']}`",
                ", ".join(row["dtypes"]),
                _MODES[row["mode"]],
                f"{row['kind']}: {row['what']}".replace("<", "&lt;"),
            )
            for row in found
        ],
    )


def programs(table: Table) -> str:
    """Random programs: how many allocate the same, whatever is computed."""
    document = _document("random_results.json")
    count = document["programs"]
    return table(
        (f"computed without `--compute real`, of {count:,} programs", "agree", "calls compared"),
        [
            (
                _COMPUTED[row["computed"]],
                f"{row['agree']:,} ({100 * row['agree'] / count:.1f} %)",
                f"{row['calls']:,}",
            )
            for row in document["figures"]
        ],
    )
