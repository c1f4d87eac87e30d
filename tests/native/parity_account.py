"""What a report says of a program, and how two such accounts differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

GPUS: Final = "2xh100-80gb"
TOLERANCE: Final = 0.01
"""Of the peak: what one row may differ by."""
WHAT_IFS: Final = ("expandable_segments:True", "max_split_size_mb:32")
NOWHERE: Final = ("(unknown)", "(before the trace)")


def environment() -> dict[str, str]:
    """As of a user's shell: without what `make test-native` gives the tests' own process."""
    own = ("LD_PRELOAD", "GPUPROBE_NATIVE", "GPUPROBE_TEST_NATIVE")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return {**kept, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def account_of(text: str, engine: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a program under ``gpuprobe run --level trace`` on an engine, and its report's account.
    Raises RuntimeError with the output where it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "gpuprobe", "run", "--gpu", GPUS, "--engine", engine]
    options = ["--level", "trace", "--force", "-q", "-o", "run.gpuprobe", "program.py"]
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()[-2000:]}")

    import gpuprobe

    recording = gpuprobe.load(folder / "run.gpuprobe")
    return account(gpuprobe.report(recording)) | simulated(recording)


def simulated(recording: Any) -> dict[str, Any]:
    """Whether replays are exact, and the reserved bytes of what-ifs by device and setting."""
    import gpuprobe

    exact, found = True, {}
    for conf in WHAT_IFS:
        result = gpuprobe.replay(recording, conf)
        exact = exact and result.exact
        for trace in result.traces:
            if trace.what_if is not None:
                most = trace.what_if.peak_reserved.most
                found[f"{trace.recorded.device} {conf}"] = most
    return {"replay is exact": exact, "what-ifs": found}


def account(report: dict[str, Any]) -> dict[str, Any]:
    peak = report["peak"]
    end = (report["fragmentation"].get("end") or {}).get("total", {})
    outside = report["non_tensor_memory"]
    return {
        "device": peak["device"],
        "phase": peak["phase"],
        "allocated": peak["allocated"]["at_most"],
        "reserved": peak["reserved"]["at_most"],
        "categories": _rows(report["categories"]),
        "lines": _rows(report["top_lines"]),
        "modules": _rows(report["top_modules"]),
        "step peaks": [
            [device["device"], device["peak_allocated"]["at_most"]]
            for row in report["steps"]["rows"]
            for device in row["devices"]
        ],
        "phases": sorted(
            {phase["path"] for row in report["steps"]["rows"] for phase in row.get("phases", ())}
        ),
        "steps": [row["ended_by"] for row in report["steps"]["rows"]],
        "fragmentation": {
            what: end.get(what, 0)
            for what in ("reserved", "allocated", "pending", "free", "returnable")
        },
        "outside tensors": {
            row["device"]: row["not_torch"]
            for row in outside["devices"]
            if isinstance(row["not_torch"], int)
        }
        | {f"pinned, {what}": outside["pinned"][what] for what in ("in_use", "held")},
        "findings": sorted({finding["rule"] for finding in report["findings"]}),
        "advice": [item["id"] for item in report["advice"]],
        "held at the end": sorted(
            {
                line["key"].rpartition(os.sep)[2]
                for pin in (report["fragmentation"].get("end") or {}).get("pins", ())
                for line in pin["lines"]
            }
            & set(NOWHERE)
        ),
    }


def _rows(table: dict[str, Any]) -> dict[str, int]:
    if "rows" not in table:
        return {}
    found: dict[str, int] = {}
    for row in table["rows"]:
        name = row["key"].rpartition("/")[2]
        found[name] = found.get(name, 0) + row["bytes"]
    return found


def nowhere(found: dict[str, Any]) -> float:
    """The part of the peak that no line of the program is named for."""
    lines = sum(found["lines"].get(name, 0) for name in NOWHERE)
    return float(lines / found["allocated"]) if found["allocated"] else 0.0


def differences(native: dict[str, Any], virtual: dict[str, Any]) -> list[str]:
    """What the two say differently, a line each."""
    found = []
    most = TOLERANCE * virtual["allocated"]
    same = ("device", "phase", "phases", "steps", "findings", "advice", "held at the end")
    for what in (*same, "replay is exact"):
        if native[what] != virtual[what]:
            found.append(f"{what}: {native[what]} / {virtual[what]}")
    for what in ("allocated", "reserved"):
        if abs(native[what] - virtual[what]) > most:
            found.append(f"{what}: {native[what]:,} / {virtual[what]:,}")
    for what in ("categories", "lines", "modules"):
        mine, theirs = native[what], virtual[what]
        for key in {**theirs, **mine}:
            # A row that only one table has room for is as large as the other's smallest at most.
            a = mine[key] if key in mine else _beyond(mine, theirs[key])
            b = theirs[key] if key in theirs else _beyond(theirs, mine[key])
            if abs(a - b) > most:
                found.append(f"{what}: {key}: {mine.get(key, 0):,} / {theirs.get(key, 0):,}")
    for what in ("fragmentation", "outside tensors", "what-ifs"):
        mine, theirs = native[what], virtual[what]
        for key in {**theirs, **mine}:
            a, b = mine.get(key, 0), theirs.get(key, 0)
            if abs(a - b) > most:
                found.append(f"{what}: {key}: {a:,} / {b:,}")
    mine, theirs = native["step peaks"], virtual["step peaks"]
    if [device for device, _ in mine] != [device for device, _ in theirs] or any(
        abs(a - b) > most for (_, a), (_, b) in zip(mine, theirs, strict=True)
    ):
        found.append(f"step peaks: {mine} / {theirs}")
    return found


def _beyond(table: dict[str, int], nbytes: int) -> int:
    """What a row may have that a table of ten has no room for, next to ``nbytes`` elsewhere."""
    return min(nbytes, min(table.values())) if len(table) >= 10 else 0
