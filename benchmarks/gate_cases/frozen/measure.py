"""What each cause of the frozen set costs: writes ``truth.json``.

    python benchmarks/gate_cases/frozen/measure.py [--only TEXT] [--check]

Every program runs on a virtual GPU as it was, with the whole change, with each cause taken back,
and with all causes taken back, in one process. Compared are `torch.cuda.max_memory_allocated`
and `max_memory_reserved`. The virtual GPU is deterministic: a second run writes the same file.
``--only`` measures the cases with this text in their name and keeps the others; ``--check``
measures without writing.

A case is wrong, and the exit code 1, where its change or one of its causes adds at most 1 MiB or
0.1 % of the peak, or where a change that is harmless, or what is left without the causes, adds more
than that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.gate_cases.frozen.case import SCRIPT, Case, changed, files_of, lines_of, write
from benchmarks.gate_cases.frozen.cases import COSTLY, HARMLESS

GPU = "a100-40gb"
TRUTH = Path(__file__).with_name("truth.json")


class Peak(NamedTuple):
    """Bytes."""

    allocated: int
    reserved: int


def ignored(before: int) -> int:
    """The growth in bytes that is none: 1 MiB or 0.1 %."""
    return max(2**20, before // 1000)


def peak(files: dict[str, str]) -> Peak:
    """Run a program in this process."""
    import torch

    import gpuprobe

    with tempfile.TemporaryDirectory(prefix="frozen-") as name:
        folder = Path(name).resolve()
        write(folder, files)
        here, path, arguments, known = Path.cwd(), list(sys.path), sys.argv, set(sys.modules)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        sys.argv = [SCRIPT]
        gc.collect()
        try:
            with (
                gpuprobe.virtual_gpu(GPU),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                runpy.run_path(SCRIPT, run_name="__main__")
                return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        finally:
            os.chdir(here)
            sys.path[:] = path
            sys.argv = arguments
            for module in set(sys.modules) - known:
                file = getattr(sys.modules[module], "__file__", None) or ""
                if file.startswith(str(folder)) or _is_package_of(sys.modules[module], folder):
                    del sys.modules[module]


def _is_package_of(module: Any, folder: Path) -> bool:
    return any(str(path).startswith(str(folder)) for path in getattr(module, "__path__", ()))


class Measured(NamedTuple):
    row: dict[str, Any]
    complaints: list[str]


def measured(case: Case, before: Peak) -> Measured:
    """The row of a case in ``truth.json``, and what is wrong with it."""
    after = peak(changed(case))
    least = ignored(before.allocated)
    row: dict[str, Any] = {
        "program": case.program,
        "kind": case.kind,
        "source": case.source,
        "before": before._asdict(),
        "after": after._asdict(),
        "growth": after.allocated - before.allocated,
    }
    if not case.causes:
        wrong = row["growth"] > least or after.reserved - before.reserved > 2**21
        return Measured(row, [f"grows by {row['growth']}"] if wrong else [])
    complaints = [] if row["growth"] > least else [f"grows by {row['growth']} only"]
    row["causes"] = []
    for cause in case.causes:
        without = peak(changed(case, (cause,)))
        saved = after.allocated - without.allocated
        if saved <= least:
            complaints.append(f"taking {cause} back saves {saved}")
        row["causes"].append(
            {
                "lines": [lines._asdict() for lines in lines_of(case, cause)],
                "saves": saved,
                "saves_reserved": after.reserved - without.reserved,
            }
        )
    rest = without if len(case.causes) == 1 else peak(changed(case, case.causes))
    row["companions"] = rest.allocated - before.allocated
    if abs(row["companions"]) > least // 4:
        complaints.append(f"the rest adds {row['companions']}")
    return Measured(row, complaints)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="only cases with this in their name or program")
    parser.add_argument("--check", action="store_true", help="do not write")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    cases = {**COSTLY, **HARMLESS}
    truth = json.loads(TRUTH.read_text()) if TRUTH.exists() and options.only else {}
    before: dict[str, Peak] = {}
    wrong = 0
    for name, case in sorted(cases.items(), key=lambda item: item[1].program):
        if options.only not in f"{case.program}: {name}":
            continue
        if case.program not in before:
            before[case.program] = peak(files_of(case.program))
        row, complaints = measured(case, before[case.program])
        truth[name] = row
        wrong += bool(complaints)
        saves = ", ".join(
            f"{part['saves'] / 2**20:.2f} MiB ({part['saves'] / row['before']['allocated']:.1%})"
            for part in row.get("causes", ())
        )
        print(
            f"{case.program}: {name}: {saves or row['growth']} {'; '.join(complaints)}", flush=True
        )
    if not options.check:
        kept = {name: truth[name] for name in cases if name in truth}
        TRUTH.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
