"""The results of `benchmarks/foreign_programs.py` as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpuprobe.model.text import human_bytes

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "foreign" / "results.json"


def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def figures(table: Table) -> str:
    """The counts over all programs."""
    document = _document()
    return table(("of the corpus", ""), [tuple(row) for row in document["figures"]])


def families(table: Table) -> str:
    """One row for each library: how many programs, and how many of them run."""
    groups: dict[str, Counter[str]] = {}
    versions = _document()["versions"]
    for row in _document()["rows"]:
        name = row["name"]
        family = (
            "/".join(name.split("/")[:2])
            if name.startswith("transformers/")
            else name.split("/")[0]
        )
        found = groups.setdefault(family, Counter())
        found["programs"] += 1
        if not _tried(row):
            continue
        found["tried"] += 1
        found["real"] += row["real"] == "ran"
        found["shapes"] += row["shapes"] == "ran"
        found["losses"] += row["losses"] == "equal"
        found["peaks"] += row["peaks"] == "equal"
    return table(
        (
            "library",
            "version",
            "programs",
            "tried",
            "run with values",
            "in shapes",
            "losses equal",
            "peaks equal",
        ),
        [
            (
                family,
                versions.get(family.split("/")[0], ""),
                *(
                    str(found[key])
                    for key in ("programs", "tried", "real", "shapes", "losses", "peaks")
                ),
            )
            for family, found in groups.items()
        ],
    )


def exceptions(table: Table) -> str:
    """Every program that does not run in both modes, or whose figures differ, and why."""
    rows = [
        (
            f"`{row['name']}`",
            row["real"],
            row["shapes"],
            row["losses"],
            row["peaks"],
            _cell(row["note"]),
        )
        for row in _document()["rows"]
        if "not run" not in (row["real"], row["shapes"])
        and (row["losses"] == "differ" or row["peaks"] != "equal")
    ]
    return table(("program", "with values", "in shapes", "losses", "peaks", "why"), rows)


def programs(table: Table) -> str:
    """All programs with their peaks."""
    rows = [
        (f"`{row['name']}`", human_bytes(row["allocated"]), human_bytes(row["reserved"]))
        for row in _document()["rows"]
        if row["peaks"] == "equal"
    ]
    return table(("program", "peak allocated", "peak reserved"), rows)


def _tried(row: dict[str, Any]) -> bool:
    return row["real"] != "-" and "not run" not in (row["real"], row["shapes"])


def _cell(text: str) -> str:
    return text.replace("<", "&lt;")
