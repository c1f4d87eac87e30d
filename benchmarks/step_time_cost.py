"""What predicting the time of a step costs an estimate of Llama 3.1 8B.

    python benchmarks/step_time_cost.py [--pairs 5]

Estimates with and without the recording of calls and the prediction, in pairs, which alternate: the
medians of their processor time in seconds, and their ratio.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "step_time_programs" / "llama_8b.py"


def estimate(*, with_time: bool) -> int:
    """In a process of its own: the exit code."""
    if not with_time:
        from gpuprobe.model.values import Unavailable
        from gpuprobe.step_time import recorded
        from gpuprobe.torch_support import engine_reports

        engine_reports.call_log = lambda: None
        recorded.step_time_of = lambda *args, **kwargs: Unavailable("left out")
    from gpuprobe.cli import main

    return main(["estimate", "--gpu", "h200", "--no-suggestions", "--json", str(PROGRAM)])


def seconds(*, with_time: bool) -> float:
    """Processor time of an estimate, with that of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, "--one", "with" if with_time else "without"]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--one", choices=("with", "without"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return estimate(with_time=options.one == "with")
    pairs = [(seconds(with_time=False), seconds(with_time=True)) for _ in range(options.pairs)]
    without, with_time = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"without {without:.1f} s, with {with_time:.1f} s, ratio of a pair {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
