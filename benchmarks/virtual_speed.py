"""What the virtual GPU costs in time, in shapes and with values.

    python benchmarks/virtual_speed.py [--pairs 10] [--only small large process values]

Against execution without tracking: in pairs, one after the other, as medians of the ratios. Times
are seconds of one CPU, so that a busy machine does not count.

small    The training step of GPT-2 small (bf16 autocast, AdamW) in shapes, and the same step on
         fake CPU tensors without tracking. Goal: at most 2 times. (torch's MemTracker costs about
         5 times.)
large    `gpuprobe.estimate` of GPT-2 XL, from building it to the result, and the same program (the
         model is built, three training steps) on bare meta tensors. Goal: at most 1.5 times.
process  `gpuprobe.estimate` of GPT-2 XL, three steps, in a separate process. Goals: 60 seconds,
         2 GB.
values   Training steps of ten programs with all values on the virtual GPU, and on the CPU. Goal:
         a median of about 1.1 times.
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

from reference_models.language import GPT, bert, gpt, llama, t5  # noqa: E402
from reference_models.other import lstm, recommender  # noqa: E402
from reference_models.training import Step, Training, Work  # noqa: E402
from reference_models.vision import convnext, resnet50, unet, vit  # noqa: E402

import gpuprobe  # noqa: E402

GPU = "h100-80gb"
SMALL = (50257, 1024, 768, 12, 12)
XL = (50257, 1024, 1600, 48, 25)
STEPS = 3  # of an estimate

PROGRAMS: dict[str, tuple[Callable[[], Work], Training]] = {
    "GPT-2": (lambda: gpt(width=256, depth=4, head_count=4, batch=4, length=128), Training()),
    "Llama": (
        lambda: llama(width=256, depth=4, head_count=8, kv_heads=2, batch=4, length=128),
        Training(clip=1.0),
    ),
    "BERT": (lambda: bert(width=256, depth=4, head_count=4, batch=8, length=64), Training()),
    "T5": (
        lambda: t5(width=256, depth=3, head_count=4, batch=4, length=64),
        Training("adafactor"),
    ),
    "ViT": (lambda: vit(size=96, width=256, depth=6, heads=4, batch=8), Training()),
    "ResNet-50": (
        lambda: resnet50(size=96, batch=4),
        Training("sgd-momentum", channels_last=True),
    ),
    "ConvNeXt": (
        lambda: convnext(depths=(1, 1, 3, 1), widths=(48, 96, 192, 384), size=96, batch=4),
        Training(),
    ),
    "U-Net": (lambda: unet(width=32, levels=3, size=32, batch=4), Training()),
    "LSTM": (lambda: lstm(width=256, batch=16, length=35), Training("sgd", clip=0.25)),
    "recommender": (
        lambda: recommender(rows=(100_000, 50_000, 10_000, 1_000), width=32, batch=1024),
        Training("adagrad"),
    ),
}
"""Small enough for a CPU, each with different kernels: their steps take a tenth of a second to
two seconds.
"""


def step_of(
    sizes: tuple[int, ...], device: str, batch: int, autocast: bool = True
) -> Callable[[], None]:
    vocabulary, context, width, depth, heads = sizes
    with torch.device(device):
        model = GPT(vocabulary, context, width, depth, heads, 0.1, checkpointed=False)
        ids = torch.zeros(batch, context, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    kind = "cpu" if device == "meta" else device

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=autocast):
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], Any]) -> float:
    """Seconds of CPU time."""
    began = time.process_time()
    step()
    return time.process_time() - began


def median_ratio(found: list[tuple[float, float]]) -> float:
    return statistics.median(other / one for one, other in found)


# -- without values


def small(count: int) -> list[tuple[float, float]]:
    """(bare, tracked) seconds of a step, one after the other."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode()
    with fake:
        bare = step_of(SMALL, "cpu", 8)
        bare()
    found = []
    with gpuprobe.virtual_gpu(GPU, compute="shapes"):
        step_of(SMALL, "cuda", 8)()
    for _ in range(count):
        with fake:
            one = timed(bare)
        with gpuprobe.virtual_gpu(GPU, compute="shapes"):
            fresh = step_of(SMALL, "cuda", 8)
            fresh()
            other = timed(fresh)
        found.append((one, other))
    return found


def large(count: int) -> list[tuple[float, float]]:
    """(bare, estimate) seconds of the whole program: without autocast, of which there is none for
    meta tensors.
    """

    def bare() -> None:
        step = step_of(XL, "meta", 1, autocast=False)
        for _ in range(STEPS):
            step()

    def tracked() -> None:
        gpuprobe.estimate(lambda: step_of(XL, "cuda", 1, autocast=False), GPU, steps=STEPS)

    for once in (bare, tracked):  # what is imported and built once
        once()
    return [(timed(bare), timed(tracked)) for _ in range(count)]


def in_process() -> dict[str, Any]:
    """In this process: seconds, peak resident bytes, and the estimate."""
    began = time.perf_counter()
    found = gpuprobe.estimate(lambda: step_of(XL, "cuda", 1), GPU, steps=STEPS)
    return {
        "seconds": time.perf_counter() - began,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "allocated": found.peak_allocated,
        "verdict": found.verdict,
    }


# -- with values


def with_values(name: str, count: int) -> list[tuple[float, float]]:
    """(CPU, virtual GPU) seconds of a step, one after the other."""
    make, training = PROGRAMS[name]

    def start(device: str) -> Step:
        torch.manual_seed(0)
        return training.start(make, device)

    bare = start("cpu")
    bare()
    found = []
    for _ in range(count):
        one = timed(bare)
        with gpuprobe.virtual_gpu(GPU):
            tracked = start("cuda")
            tracked()
            found.append((one, timed(tracked)))
            del tracked
    return found


# -- the whole


def report_process() -> bool:
    done = subprocess.run([sys.executable, __file__, "--child"], stdout=subprocess.PIPE, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    print("GPT-2 XL, estimate of three steps in a process of its own")
    print(f"  {answer['seconds']:.1f} s (goal: 60)")
    print(f"  {answer['resident'] / 2**30:.2f} GiB resident at most (goal: 2)")
    print(f"  {answer['allocated'] / 2**30:.1f} GiB would be allocated: {answer['verdict']}")
    return bool(answer["seconds"] <= 60 and answer["resident"] <= 2 * 2**30)


def report_pairs(what: str, names: tuple[str, str], found: Any, goal: float) -> bool:
    one, other = (statistics.median(column) for column in zip(*found, strict=True))
    ratio = median_ratio(found)
    print(what)
    print(f"  {names[0]:20} {one:8.3f} s")
    print(f"  {names[1]:20} {other:8.3f} s   {ratio:.2f} x   (goal: at most {goal:g})")
    return ratio <= goal


def report_values(count: int) -> bool:
    print("training steps with all values")
    print(f"  {'program':14} {'CPU':>8} {'virtual GPU':>12}")
    ratios = []
    for name in PROGRAMS:
        found = with_values(name, count)
        one, other = (statistics.median(column) for column in zip(*found, strict=True))
        ratios.append(median_ratio(found))
        print(f"  {name:14} {one:6.3f} s {other:10.3f} s   {ratios[-1]:.2f} x", flush=True)
    middle = statistics.median(ratios)
    print(f"  {'median':39} {middle:.2f} x   (goal: about 1.1)")
    return middle <= 1.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parts = ("small", "large", "process", "values")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(in_process()))
        return 0
    good = []
    if "small" in args.only:
        what = "GPT-2 small, one training step in shapes"
        good.append(report_pairs(what, ("fake tensors", "virtual GPU"), small(args.pairs), 2))
    if "large" in args.only:
        what = "GPT-2 XL, built and three training steps"
        good.append(report_pairs(what, ("meta tensors", "estimate"), large(args.pairs), 1.5))
    if "process" in args.only:
        good.append(report_process())
    if "values" in args.only:
        good.append(report_values(args.pairs))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
