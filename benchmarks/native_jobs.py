"""Jobs of several real processes on the native engine against the same programs on the CPU.

Runs each program of `tests/native/job_programs` with `gpuprobe run` on simulated GPUs (NCCL), and
compares the lines that its ranks print with those of the CPU (gloo), which `truth.json` next to the
programs holds. A program is *same*, *named* (it ends with an error that names the reason), or
*different*: another path or other numbers, and no word about it. One that differs is run on the
CPU here, too: rounding depends on the processor, and grows in a loss that diverges. Needs a CUDA
build of torch.

    python benchmarks/native_jobs.py [--compute real|shapes] [PROGRAM ...]
    python benchmarks/native_jobs.py --truth       # write truth.json again
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
PROGRAMS: Final = ROOT / "tests" / "native" / "job_programs"
TRUTH: Final = PROGRAMS / "truth.json"
CLOSE: Final = 2e-3
_NUMBER: Final = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?|inf|nan")
_RANKS: Final = re.compile(r"^# ranks: (\d+)", re.MULTILINE)


class Outcome(NamedTuple):
    """What a program printed (lines of its ranks, sorted), its exit code, and all of stderr."""

    lines: list[str]
    code: int
    errors: str


def names() -> list[str]:
    """The programs, by name."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "job")


def command_of(name: str) -> list[str]:
    """The command that a user would start the program with."""
    path = PROGRAMS / f"{name}.py"
    ranks = _RANKS.search(path.read_text(encoding="utf-8"))
    if ranks is None:
        return ["python", str(path)]
    return ["torchrun", "--standalone", "--nproc-per-node", ranks[1], str(path)]


def environment() -> dict[str, str]:
    """As of a user's shell: without an engine, with this environment's commands first."""
    own = ("LD_PRELOAD", "GPUPROBE_NATIVE", "GPUPROBE_TEST_NATIVE")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    folder = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{folder}{os.pathsep}{kept.get('PATH', '')}", "OMP_NUM_THREADS": "1"}


def run(command: Sequence[str], env: dict[str, str], timeout: float = 600) -> Outcome:
    """Run a command in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return Outcome([], -1, f"did not end in {late.timeout:.0f} s")
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    return Outcome(lines, done.returncode, done.stderr)


def on_cpu(name: str) -> Outcome:
    """The program on the CPU: with the engine's libraries, which torch needs here, and no GPU."""
    from gpuprobe.native.libraries import libraries_for, torch_build
    from gpuprobe.native.process import add_to_environment, settings_text

    build = torch_build()
    assert build is not None
    env = environment()
    add_to_environment(env, libraries_for(build), settings_text([], build), build)
    return run(command_of(name), env)


def simulated(
    name: str, compute: str = "real", gpu: str = "4xt4", more: Mapping[str, str] | None = None
) -> Outcome:
    """The program on simulated GPUs, with ``more`` in its environment."""
    options = ["--gpu", gpu, "--compute", compute]
    command = ["gpuprobe", "run", *options, "--", *command_of(name)]
    return run(command, {**environment(), **(more or {})})


def differences(lines: Iterable[str], truth: Iterable[str]) -> list[str]:
    """The lines that differ by more than rounding, each with the right one."""
    mine, right = list(lines), list(truth)
    if len(mine) != len(right):
        return [f"{len(mine)} lines, right are {len(right)}", *sorted(set(mine) ^ set(right))[:4]]
    return [f"{a}   (right: {b})" for a, b in zip(mine, right, strict=True) if not _equal(a, b)]


def _equal(first: str, second: str) -> bool:
    if _NUMBER.sub("#", first) != _NUMBER.sub("#", second):
        return False
    pairs = zip(_NUMBER.findall(first), _NUMBER.findall(second), strict=True)
    return all(a == b or _close(float(a), float(b)) for a, b in pairs)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(abs(a), abs(b), 0.05)


def kind_of(outcome: Outcome, truth: Sequence[str]) -> tuple[str, str]:
    """``same``, ``named``, ``failed`` or ``different``, and why."""
    if outcome.code == 0:
        found = differences(outcome.lines, truth)
        named = [line for line in outcome.errors.splitlines() if "assumed:" in line]
        if found and named:
            return "named", named[0]
        return ("different", found[0]) if found else ("same", "")
    lines = [line for line in outcome.errors.splitlines() if line.strip()]
    reasons = [
        line for line in lines if "ValueNeeded" in line or line.startswith("gpuprobe: error")
    ]
    errors = [line for line in lines if re.search(r"\w+(Error|Exception)\b", line)]
    return ("named", reasons[-1]) if reasons else ("failed", (errors or lines or ["no word"])[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--truth", action="store_true", help="run on the CPU, and keep the lines")
    parser.add_argument("--compute", default="real", choices=("real", "shapes", "auto"))
    parser.add_argument("programs", nargs="*", metavar="PROGRAM")
    args = parser.parse_args()
    chosen = args.programs or names()
    truth = json.loads(TRUTH.read_text(encoding="utf-8")) if TRUTH.exists() else {}
    counts: dict[str, int] = {}
    for name in chosen:
        start = time.monotonic()
        if args.truth:
            outcome = on_cpu(name)
            kind, why = ("kept", "") if outcome.code == 0 else ("failed", outcome.errors[-2000:])
            if outcome.code == 0:
                truth[name] = outcome.lines
                text = json.dumps(truth, indent=1, sort_keys=True)
                TRUTH.write_text(text + "\n", encoding="utf-8")
        else:
            outcome = simulated(name, args.compute)
            kind, why = kind_of(outcome, truth[name])
            if kind == "different" and not differences(outcome.lines, on_cpu(name).lines):
                kind, why = "same", f"as on this machine's CPU; {TRUTH.name}: {why}"
        counts[kind] = counts.get(kind, 0) + 1
        print(f"{kind:10} {name:22} {time.monotonic() - start:5.1f} s  {why[:400]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
