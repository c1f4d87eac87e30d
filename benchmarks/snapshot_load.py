"""Loading and analysing a snapshot of a million events, next to what others need for it.

    python benchmarks/snapshot_load.py [--events 1000000] [--rounds 3] [--snapshot FILE]

Each candidate runs in a separate process, in turn, ``--rounds`` times; medians are printed,
and ratios, which mean more than seconds on a shared machine. Memory is the peak resident
size of the process. gpuprobe reads a snapshot in a child that has ended before the analysis
begins: what counts is the larger of the child's peak plus the parent's so far, and the parent's.

* bare: ``pickle.load`` and nothing else (``bare, gc off``: without garbage collection)
* load: ``gpuprobe.load`` and the columns of the trace
* load + analysis: and timeline, high water mark by category, module, line and stack,
  fragmentation and leaks
* torch trace_plot: ``pickle.load`` and ``torch.cuda._memory_viz.trace_plot``
* mosaic: its categorical memory profile, where the package is installed

The last line compares whole processes, from their start to their end: ``gpuprobe report --json``
next to a Python that loads the pickle and ends. Its ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BARE = "import pickle\npickle.load(open(FILE, 'rb'))"
LOAD = "import gpuprobe\nnext(gpuprobe.load(FILE).ranks[0].traces)"
CANDIDATES = {
    "bare": BARE,
    "bare, gc off": "import gc\ngc.disable()\n" + BARE,
    "load": LOAD,
    "load + analysis": f"""
import gpuprobe
from gpuprobe.analysis.fragmentation import fragmentation
from gpuprobe.analysis.peak.peaks import by_category, by_line, by_module, high_water
from gpuprobe.analysis.leaks import leaks
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.analysis.trace.timeline import timeline
trace = {LOAD.splitlines()[1]}
after_loading = peaks()[0]
ledger = ledger_of(trace)
timeline(ledger)
mark = high_water(ledger)
for by in (by_category, by_module, by_line):
    assert sum(share.bytes for share in by(mark)) == mark.allocated
fragmentation(trace)
leaks(ledger)
""",
    "torch trace_plot": """
import pickle
from torch.cuda import _memory_viz
_memory_viz.trace_plot(pickle.load(open(FILE, 'rb')))
""",
    "mosaic": """
from mosaic.libmosaic.analyzer.memory_abstract import MemoryAbstract
memory = MemoryAbstract(memory_snapshot_file=FILE)
memory.load_memory_snapshot()
memory.memory_snapshot.analyze_memory_snapshot(opt="categorical")
""",
}

# What the timed part runs in: the interpreter's own start is not counted, imports are.
FRAME = """
import json, os, resource, sys, time
sys.path.insert(0, {root!r})
FILE = {file!r}

def peaks():
    return [resource.getrusage(who).ru_maxrss / 1024
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]

after_loading = None
start = time.perf_counter()
{body}
seconds = time.perf_counter() - start
own, child = peaks()
peak = max(own, child + (own if after_loading is None else after_loading))
cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF,
                                                       resource.RUSAGE_CHILDREN))
print(json.dumps([seconds, cpu, peak]), flush=True)
os._exit(0)
"""


def measure(body: str, file: Path) -> list[float]:
    code = FRAME.format(root=str(ROOT), file=str(file), body=body)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    result: list[float] = json.loads(run.stdout.splitlines()[-1])
    return result


def seconds_of(*command: str | Path) -> float:
    """A process, from its start to its end."""
    before = time.perf_counter()
    subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return time.perf_counter() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--snapshot", type=Path, help="measure this file instead of a new one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = args.snapshot
        if file is None:
            file = Path(folder) / "snapshot.pickle"
            maker = Path(__file__).with_name("make_snapshot.py")
            subprocess.run([sys.executable, maker, file, "--events", str(args.events)], check=True)
        chosen = dict(CANDIDATES)
        for package, name in (("torch", "torch trace_plot"), ("mosaic.libmosaic", "mosaic")):
            try:
                found = importlib.util.find_spec(package) is not None
            except ModuleNotFoundError:
                found = False
            if not found:
                print(f"{name}: not installed")
                del chosen[name]
        runs: dict[str, list[list[float]]] = {name: [] for name in chosen}
        for _ in range(args.rounds):
            for name, body in chosen.items():
                runs[name].append(measure(body, file.resolve()))
        pairs = [
            (
                seconds_of("-c", BARE.replace("FILE", repr(str(file)))),
                seconds_of("-m", "gpuprobe", "report", "--json", file),
            )
            for _ in range(args.rounds)
        ]
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in runs.items()
    }
    bare, bare_off = medians["bare"], medians["bare, gc off"]
    print(f"{'':18} {'s':>6} {'CPU s':>6} {'MiB':>6} {'× bare':>7} {'× gc off':>8} {'× MiB':>6}")
    for name, (seconds, cpu, peak) in medians.items():
        print(
            f"{name:18} {seconds:6.2f} {cpu:6.2f} {peak:6.0f} {seconds / bare[0]:7.2f} "
            f"{seconds / bare_off[0]:8.2f} {peak / bare[2]:6.2f}"
        )
    ratios = sorted(report / bare for bare, report in pairs)
    print(
        f"report --json: {statistics.median(report for _, report in pairs):.2f} s, "
        f"{statistics.median(ratios):.2f} of a process that loads the pickle "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
