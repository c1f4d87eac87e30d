"""Whether `gpuprobe estimate` names what bounds a step, of programs made to be bound by one thing.

    python benchmarks/step_time_bounds.py [--only TEXT] [--json FILE]

Each program in `benchmarks/step_time_bounds` was written for one of five bounds. Which one, and the
arithmetic for it, is in `truths.json`, which was committed before any of them was run. Counted is
how often the largest share that is printed is that one. Exit code 1 if any is another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_suffix("")
TRUTHS = FOLDER / "truths.json"


def estimated(name: str, arguments: list[str]) -> dict[str, Any]:
    """The step time that an estimate of the program has, or why it has none."""
    command = [sys.executable, "-m", "gpuprobe", "estimate", f"{name}.py", "--json"]
    command += ["--no-suggestions", *arguments]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        return {"unavailable": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}
    step_time: dict[str, Any] = document.get("step_time") or {"unavailable": str(document)}
    return step_time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="programs whose name has this text")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    truths: dict[str, Any] = json.loads(TRUTHS.read_text(encoding="utf-8"))
    results: dict[str, Any] = {}
    for name, truth in truths.items():
        if options.only not in name:
            continue
        start = time.monotonic()
        step = estimated(name, truth["arguments"])
        took = time.monotonic() - start
        total = step.get("expected_ns", 0)
        shares = {row["name"]: round(row["ns"] / total, 3) for row in step.get("bounds", ())}
        first = next(iter(shares), "")
        right = first == truth["bound"]
        results[name] = {
            "right": right,
            "truth": truth["bound"],
            "ms": round(total / 1e6, 3),
            "shares": shares,
            "left_out": step.get("left_out", []),
        }
        if not total:
            results[name]["unavailable"] = step
        text = ", ".join(f"{key} {share:.0%}" for key, share in shares.items()) or str(step)
        print(f"{'right' if right else 'WRONG':5} {took:5.1f} s  {name:30} {total / 1e6:8.2f} ms")
        print(f"{'':15}{text}")
        for line in step.get("left_out", ()):
            print(f"{'':15}left out: {line}")
        sys.stdout.flush()
    count = sum(row["right"] for row in results.values())
    print(f"{count} of {len(results)} right")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if count == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
