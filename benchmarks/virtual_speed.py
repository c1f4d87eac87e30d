"""What the virtual GPU costs: beside a bare FakeTensorMode, and for a large model.

    python benchmarks/virtual_speed.py [--pairs 10] [--skip-xl]

1. The training step of GPT-2 small (bf16 autocast, AdamW) without values, tracked by the virtual
   GPU, and the same step on fake CPU tensors that nobody tracks; in pairs, medians. Goal: at most
   2 times. (torch's MemTracker costs about 5 times.)
2. `gpuprobe.estimate` of GPT-2 XL, three steps, in a process of its own. Goals: 60 seconds, 2 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
if str(HERE / "gpu") not in sys.path:
    sys.path.insert(0, str(HERE / "gpu"))

from reference_models.language import GPT  # noqa: E402

import gpuprobe  # noqa: E402

SMALL = (50257, 1024, 768, 12, 12)
XL = (50257, 1024, 1600, 48, 25)


def step_of(sizes: tuple[int, ...], device: str, batch: int) -> Callable[[], None]:
    vocabulary, context, width, depth, heads = sizes
    with torch.device(device):
        model = GPT(vocabulary, context, width, depth, heads, 0.1, checkpointed=False)
        ids = torch.zeros(batch, context, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def pairs(count: int) -> list[tuple[float, float]]:
    """(bare, tracked) seconds of a step, one after the other."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode()
    with fake:
        bare = step_of(SMALL, "cpu", 8)
        bare()
    found = []
    with gpuprobe.virtual_gpu("h100-80gb", compute="shapes"):
        tracked = step_of(SMALL, "cuda", 8)
        tracked()
    for _ in range(count):
        with fake:
            one = timed(bare)
        with gpuprobe.virtual_gpu("h100-80gb", compute="shapes"):
            fresh = step_of(SMALL, "cuda", 8)
            fresh()
            other = timed(fresh)
        found.append((one, other))
    return found


def xl() -> dict[str, Any]:
    """In this process: seconds, peak resident bytes, and the estimate."""
    began = time.perf_counter()
    found = gpuprobe.estimate(lambda: step_of(XL, "cuda", 1), gpu="h100-80gb", steps=3)
    return {
        "seconds": time.perf_counter() - began,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "allocated": found.peak_allocated,
        "verdict": found.verdict,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--skip-xl", action="store_true")
    parser.add_argument("--xl-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.xl_child:
        print(json.dumps(xl()))
        return 0
    found = pairs(args.pairs)
    bare, tracked = (statistics.median(column) for column in zip(*found, strict=True))
    ratio = statistics.median(other / one for one, other in found)
    print("GPT-2 small, one training step without values")
    print(f"  bare FakeTensorMode  {bare:8.3f} s")
    print(f"  virtual GPU          {tracked:8.3f} s   {ratio:.2f} x   (goal: at most 2)")
    ok = ratio <= 2
    if not args.skip_xl:
        done = subprocess.run(
            [sys.executable, __file__, "--xl-child"], stdout=subprocess.PIPE, check=True
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        print("GPT-2 XL, estimate of three steps")
        print(f"  {answer['seconds']:.1f} s (goal: 60)")
        print(f"  {answer['resident'] / 2**30:.2f} GiB resident at most (goal: 2)")
        print(f"  {answer['allocated'] / 2**30:.1f} GiB would be allocated: {answer['verdict']}")
        ok = ok and answer["seconds"] <= 60 and answer["resident"] <= 2 * 2**30
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
