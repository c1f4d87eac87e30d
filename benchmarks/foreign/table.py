"""Results of the corpus: what they say together, as text and as the file of the page in docs."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).resolve().parent / "results.json"
TOLERANCE = 1e-3
"""Of a loss, relatively: float32 on two paths (a fused kernel and its parts) after a few steps of
an optimizer. Losses below it are compared absolutely."""

Results = dict[tuple[str, str], dict[str, Any]]


@dataclass
class Row:
    """What is known of one program. ``losses`` and ``peaks``: equal, or why not compared."""

    name: str
    real: str
    shapes: str
    losses: str
    peaks: str
    allocated: int | None = None
    reserved: int | None = None
    note: str = ""


@dataclass
class Summary:
    rows: list[Row]
    counts: dict[str, int] = field(default_factory=dict)
    unclear: list[str] = field(default_factory=list)


def read(path: Path) -> Results:
    """The newest result of each program and mode."""
    found: Results = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[row["name"], row["mode"]] = row
    return found


def one_line(row: dict[str, Any]) -> str:
    text = f"  {row['name']:50} {row['mode']:7} {row['status']:12} {row.get('seconds', 0):6} s"
    if row["status"] == "ran":
        return text
    return f"{text}  {row.get('kind', '')} {row.get('cause') or row.get('error', '')}"[:240]


def equal(ours: list[float], theirs: list[float]) -> bool:
    """Whether losses are the same to `TOLERANCE`, NaN and infinity included."""
    if len(ours) != len(theirs):
        return False
    return all(
        (math.isnan(a) and math.isnan(b))
        or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for a, b in zip(ours, theirs, strict=True)
    )


def row_of(name: str, found: Results) -> Row:
    cpu, real, shapes = (
        found.get((name, mode), {"status": "not run"}) for mode in ("cpu", "real", "shapes")
    )
    if cpu["status"] == "not run":
        return Row(name, "not run", "not run", "-", "-")
    if cpu["status"] != "ran":
        why = cpu.get("cause") or cpu.get("error", "")
        return Row(name, "-", "-", "-", "-", note=f"not on the CPU either: {why}"[:300])
    row = Row(name, real["status"], shapes["status"], "-", "-")
    if real["status"] == "ran":
        row.allocated, row.reserved = real["allocated"], real["reserved"]
        if not cpu["losses"]:
            row.losses = "none"
        elif equal(real["losses"], cpu["losses"]):
            row.losses = "equal"
        elif real.get("drawn"):
            row.losses = "draws on the device"
        else:
            row.losses = "differ"
            row.note = f"losses {real['losses'][:4]}, on the CPU {cpu['losses'][:4]}"
        if shapes["status"] == "ran":
            same = all(real[key] == shapes[key] for key in ("allocated", "reserved"))
            row.peaks = "equal" if same else _not_equal(real, shapes)
            if not same:
                decided = [text for text in shapes.get("assumed", ()) if _BOUND.search(text)]
                row.note = (
                    f"peaks {real['allocated']}/{real['reserved']} with values, "
                    f"{shapes['allocated']}/{shapes['reserved']} in shapes"
                    + (f"; {decided[0]}" if decided else "")
                )
    for mode, result in (("real", real), ("shapes", shapes)):
        if result["status"] not in ("ran", "not run"):
            text = result.get("error", "")
            if result.get("cause"):
                text = f"{text} ({result['cause']})"
            row.note = f"{row.note + '; ' if row.note else ''}{mode}: {text}"[:400]
    return row


_BOUND = re.compile("which is the most that can be|what is done only then is done")
"""In what an estimate assumes, where a size is the largest possible."""


def _not_equal(real: dict[str, Any], shapes: dict[str, Any]) -> str:
    """Why peaks are not the same. Where sizes depend on values, and are the largest possible in
    shapes, the work is not the same, and no peak may be less than with values.
    """
    bound = any(_BOUND.search(text) for text in shapes.get("assumed", ()))
    more = all(shapes[key] >= real[key] for key in ("allocated", "reserved"))
    return "a bound" if bound and more else "differ"


def summary(found: Results, names: list[str]) -> Summary:
    rows = [row_of(name, found) for name in names]
    tried = [row for row in rows if row.real != "-" and "not run" not in (row.real, row.shapes)]
    counts = Counter[str]()
    counts["programs"] = len(rows)
    counts["tried"] = len(tried)
    counts["run_real"] = sum(row.real == "ran" for row in tried)
    counts["run_shapes"] = sum(row.shapes == "ran" for row in tried)
    counts["run_either"] = sum("ran" in (row.real, row.shapes) for row in tried)
    counts["losses_equal"] = sum(row.losses == "equal" for row in tried)
    counts["losses_compared"] = sum(row.losses in ("equal", "differ") for row in tried)
    counts["peaks_equal"] = sum(row.peaks == "equal" for row in tried)
    counts["bounds"] = sum(row.peaks == "a bound" for row in tried)
    counts["peaks_compared"] = sum(row.peaks in ("equal", "differ") for row in tried)
    failed = [
        result
        for row in tried
        for result in (found[row.name, "real"], found[row.name, "shapes"])
        if result["status"] != "ran"
    ]
    counts["failures"] = len(failed)
    counts["failures_clear"] = sum(bool(result.get("clear")) for result in failed)
    unclear = [f"{r['name']} ({r['mode']})" for r in failed if not r.get("clear")]
    return Summary(rows, dict(counts), unclear)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.1f} %)" if whole else "")


def sentences(counts: dict[str, int]) -> list[tuple[str, str]]:
    return [
        ("programs in the corpus", str(counts["programs"])),
        ("run on the CPU, and were tried", str(counts["tried"])),
        ("run with values", _share(counts["run_real"], counts["tried"])),
        ("run in shapes", _share(counts["run_shapes"], counts["tried"])),
        ("run in either, as --compute auto does", _share(counts["run_either"], counts["tried"])),
        ("losses equal to the CPU's", _share(counts["losses_equal"], counts["losses_compared"])),
        ("peaks of both equal", _share(counts["peaks_equal"], counts["peaks_compared"])),
        ("peaks in shapes that are a bound", str(counts["bounds"])),
        ("failures that are one clear line", _share(counts["failures_clear"], counts["failures"])),
    ]


def text(found: Summary) -> str:
    lines = [
        f"{row.name:52} {row.real:8} {row.shapes:8} {row.losses:20} {row.peaks:8} {row.note}"
        for row in found.rows
        if (row.real, row.shapes, row.peaks) != ("ran", "ran", "equal")
        or row.losses in ("differ", "-")
    ]
    lines.append("")
    lines += [f"{name:34} {value}" for name, value in sentences(found.counts)]
    return "\n".join(lines)


_PLACE = re.compile(r"(?:/[\w.+-]+)+/(?:site-packages|benchmarks)/|/tmp/[\w.+-]+/")


def publish(found: Summary) -> None:
    """Write `PUBLISHED`, with the versions of the libraries that are installed here, and without
    the folders of this machine.
    """
    rows = [{**asdict(row), "note": _PLACE.sub("", row.note)} for row in found.rows]
    document = {
        "figures": sentences(found.counts),
        "counts": found.counts,
        "versions": versions({row["name"].split("/")[0] for row in rows} | {"torch"}),
        "rows": rows,
    }
    PUBLISHED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def versions(families: set[str]) -> dict[str, str]:
    """The installed version of each library, where the family has its name."""
    found = {}
    for family in sorted(families):
        name = DISTRIBUTIONS.get(family, family)
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[family] = metadata.version(name).split("+")[0]
    return found


DISTRIBUTIONS = {
    "hf": "transformers",
    "pyg": "torch-geometric",
    "pyro": "pyro-ppl",
    "segmentation-models": "segmentation-models-pytorch",
}
"""Names in the package index, where they are not the family's."""
