"""Memory before and after a step with a sharded optimizer, on the first of two GPUs."""

from __future__ import annotations

import contextlib
import io
import re
import runpy

from figures import figure, source, without_versions

SCRIPT = "cs336_systems/benchmarking_scripts/optimizer_state_sharding_accounting.py"
NAMES = {
    "Mem after model and optimizer creation": "created",
    "Mem before step": "before_step",
    "Mem after step": "after_step",
}


def main() -> None:
    without_versions()
    folder = source("damek+cs336-assignment2-systems", "cs336-basics", ".")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(folder / SCRIPT), run_name="__main__")
    key = ""
    for line in printed.getvalue().splitlines():
        started = re.match(r"Training DDP model, .*seq_len: (\d+), sharded: (\w+)", line)
        if started:
            key = f"s{started[1]} {'sharded' if started[2] == 'True' else 'whole'}"
        measured = re.match(r"(Mem [^:]+): (?:tensor\(\[)?([\d.]+)", line)
        if measured:
            figure(f"{key} {NAMES[measured[1]]}", float(measured[2]) * 2**30)


if __name__ == "__main__":
    main()
