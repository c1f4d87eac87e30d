"""What the pytest plugin costs a suite that does not use it.

    python benchmarks/plugin_overhead.py [--tests 500] [--pairs 40] [--limit 1.01]

A suite of ``--tests`` small tests, some with a fixture, in ten files, is run with the plugin and
with ``-p no:gpuprobe``, in turn, the order changing from pair to pair. Each run is a separate
process; its processor time (user and system, of the process and its children) and its wall time
are taken. The figure is the median of the pairs' ratios: 1.01 is one percent.

A second row compares two runs without the plugin: the noise of this machine as such a figure. The
last line has none: it counts the calls of functions, Python's and C's, that the interpreter makes,
with and without. Exit code 1 where the ratio of processor times is above ``--limit``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = 10
HEAD = """\
import pytest


@pytest.fixture
def numbers():
    return list(range(10))
"""
PLAIN = """

def test_plain_{index}():
    assert {index} + 1 > {index}
"""
FIXTURE = """

def test_fixture_{index}(numbers):
    assert sum(numbers) == 45
"""


def write_suite(folder: Path, tests: int) -> None:
    for file in range(FILES):
        mine = range(file, tests, FILES)
        bodies = [(FIXTURE if index % 3 else PLAIN).format(index=index) for index in mine]
        (folder / f"test_{file}.py").write_text(HEAD + "".join(bodies), encoding="utf-8")


COUNTER = """\
import sys
import pytest

calls = 0


def count(frame, event, argument):
    global calls
    if event in ("call", "c_call"):
        calls += 1


sys.setprofile(count)
code = pytest.main(sys.argv[1:])
sys.setprofile(None)
print("calls", calls)
sys.exit(code)
"""


def calls(folder: Path, *options: str) -> int:
    """How many calls one run makes; the same each time."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTER, "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.rpartition("calls ")[2])


def once(folder: Path, *options: str) -> tuple[float, float]:
    """(processor seconds, wall seconds) of one run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    wall = time.perf_counter()
    with tempfile.TemporaryFile() as talk:
        with subprocess.Popen(command, cwd=folder, stdout=talk, stderr=talk) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - wall
        if process.returncode:
            talk.seek(0)
            raise SystemExit(talk.read().decode(errors="replace"))
    return usage.ru_utime + usage.ru_stime, wall


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--limit", type=float, default=1.01)
    args = parser.parse_args()
    without = ("-p", "no:gpuprobe")
    cases: dict[str, tuple[str, ...]] = {"with the plugin": (), "without, again": without}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        write_suite(folder, args.tests)
        for options in ((), without):  # bytecode and file caches
            once(folder, *options)
        for pair in range(args.pairs):
            for case, options in cases.items():
                turns = [options, without]
                if pair % 2:
                    turns.reverse()
                first, second = (once(folder, *turn) for turn in turns)
                (cpu, wall), (base_cpu, base_wall) = (
                    (second, first) if pair % 2 else (first, second)
                )
                pairs[case].append((cpu / base_cpu, wall / base_wall))
        more, base = calls(folder), calls(folder, *without)
    print(f"{args.tests} tests, {args.pairs} pairs; median ratio to -p no:gpuprobe (quartiles)")
    print(f"{'':<20}{'processor time':>26}{'wall time':>26}")
    for case, ratios in pairs.items():
        row = f"{case:<20}"
        for kind in (0, 1):
            low, middle, high = statistics.quantiles([ratio[kind] for ratio in ratios], n=4)
            row += f"{f'{middle:.4f} ({low:.3f}-{high:.3f})':>26}"
        print(row)
    print(f"calls of functions  {more / base:.4f} ({more:,} / {base:,})")
    figure = statistics.median(ratio[0] for ratio in pairs["with the plugin"])
    return 1 if figure > args.limit else 0


if __name__ == "__main__":
    raise SystemExit(main())
