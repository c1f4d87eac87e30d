"""What the native engine costs in time and memory, next to the virtual GPU.

    python benchmarks/native_speed.py --native PYTHON [--virtual PYTHON] [--rounds 3] [--steps 5]

The ten programs of ``virtual_speed.py``, without values (``shapes``) and with all of them
(``real``). Each runs in a process of its own, on the virtual GPU with ``--virtual`` (by default
this Python) and then on the native engine with ``--native``, a Python whose torch is built for
CUDA; a ratio is native / virtual of one such pair. Compared are the processor time of a step,
which is the median of those after the second, and the most memory that the process had.

Goals, as medians over the programs: 0.7 of the time in shapes, 0.3 with values, 1.3 of the memory.
The exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
GPU = "h100-80gb"
WARM = 2
GOALS = {"shapes": 0.7, "real": 0.3}
MEMORY_GOAL = 1.3
NAMES = (
    *("GPT-2", "Llama", "BERT", "T5", "ViT"),
    *("ResNet-50", "ConvNeXt", "U-Net", "LSTM", "recommender"),
)


def work(engine: str, compute: str, name: str, steps: int) -> None:
    """Run a program and print what it took, as JSON."""
    warnings.filterwarnings("ignore")
    import gpuprobe

    with gpuprobe.virtual_gpu(GPU, engine=engine, compute=compute):
        import torch
        from reference_models.training import Step
        from virtual_speed import PROGRAMS

        torch.set_num_threads(1)
        make, training = PROGRAMS[name]
        step: Step = training.start(make, "cuda")
        times = []
        for _ in range(steps):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": statistics.median(times[WARM:]), "bytes": memory}))


def taken(python: str, engine: str, compute: str, name: str, steps: int) -> dict[str, float]:
    words = ["--work", engine, compute, name, "--steps", str(steps)]
    done = subprocess.run(
        [python, str(HERE / "native_speed.py"), *words],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{HERE}:{HERE / 'gpu'}",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{engine} {compute} {name}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--native", metavar="PYTHON")
    parser.add_argument("--virtual", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work, args.steps)
        return 0
    if not args.native:
        parser.error("--native is required")
    missed = False
    print(f"{'program':<14}{'compute':<9}{'virtual':>11}{'native':>11}{'time':>8}{'memory':>8}")
    for compute, goal in GOALS.items():
        times, memory = [], []
        for name in args.only:
            pairs = []
            for _ in range(args.rounds):
                virtual = taken(args.virtual, "virtual", compute, name, args.steps)
                pairs.append((virtual, taken(args.native, "native", compute, name, args.steps)))
            ratio = statistics.median(n["seconds"] / v["seconds"] for v, n in pairs)
            more = statistics.median(n["bytes"] / v["bytes"] for v, n in pairs)
            milliseconds = [1e3 * statistics.median(p[i]["seconds"] for p in pairs) for i in (0, 1)]
            print(
                f"{name:<14}{compute:<9}{milliseconds[0]:>8.1f} ms{milliseconds[1]:>8.1f} ms"
                f"{ratio:>8.2f}{more:>8.2f}",
                flush=True,
            )
            times.append(ratio)
            memory.append(more)
        time_ratio, memory_ratio = statistics.median(times), statistics.median(memory)
        missed |= time_ratio > goal or memory_ratio > MEMORY_GOAL
        print(
            f"{compute}: median {time_ratio:.2f} of the time (goal {goal}), "
            f"{memory_ratio:.2f} of the memory (goal {MEMORY_GOAL})"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
