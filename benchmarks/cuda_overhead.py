"""What gpuprobe costs a training step on torch's CUDA code, in processor time of the host.

    python benchmarks/cuda_overhead.py [--gpu h100-80gb] [--rounds 15] [--steps 8] [--only NAME ...]

Kernels take no time on the native engine, so a step is nothing but the host's work, and what
watching adds is as large a part of it as it can be. The step is that of a GPT of 12 layers
(AdamW, autocast to bfloat16). All of it runs in one process: a round measures the bare step, then
the step under each way of watching, then the bare step again; a ratio is that of the processor
time of all threads to the mean of the two bare ones. The table has medians and quartiles.

Starting and stopping is not counted, and the first nine watched steps are left out, unless a row
is one of so many steps:

* ``counters``: steps under ``gpuprobe.record``.
* ``history``: ``torch.cuda.memory._record_memory_history()`` alone, as torch's documentation has
  it; ``history, of Python``: with the settings with which a trace switches it on.
* ``trace, in a traced step``: level ``trace`` between the step's marks, without what is done when
  the step has ended; ``trace, with its end``: that as well (snapshot, conversion, writing).
  ``trace, 50 steps``: a recording of so many, of which those are traced that are by default.
* ``hazards``, and torch's own sanitizer; ``profiler``: torch.profiler with memory and stacks.
  The sanitizer cannot be switched off again: it comes last, compared with the bare steps before.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

LAYERS: Final = 12
SANITIZER: Final = "sanitizer"
WARM: Final = 9
"""Watched steps that are left out: where tensors are is checked at the end of each of the first."""
LONG: Final = 50
"""Steps of the recording that traces only some of them."""

Step = Callable[[], None]
Watch = Callable[[Path], AbstractContextManager[Any]]


def gpt_step() -> Step:
    """One step of a GPT of 12 layers, 5,000 tokens and a width of 128."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, d = x.shape
            parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    width, vocabulary = 128, 5000
    embed = nn.Embedding(vocabulary, width)
    head = nn.Linear(width, vocabulary)
    model = nn.Sequential(embed, *(Block(width, 4) for _ in range(LAYERS)), head).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(8, 128, dtype=torch.long, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextlib.contextmanager
def recorded(folder: Path, **options: Any) -> Iterator[None]:
    import gpuprobe

    with gpuprobe.record(folder / "run.gpuprobe", force=True, **options):
        yield


@contextlib.contextmanager
def history(folder: Path, **settings: Any) -> Iterator[None]:
    import torch

    record = torch.cuda.memory._record_memory_history
    record(**settings)
    try:
        yield
    finally:
        record(None)


@contextlib.contextmanager
def hazards(folder: Path) -> Iterator[None]:
    import gpuprobe

    with gpuprobe.detect_hazards():
        yield


@contextlib.contextmanager
def sanitizer(folder: Path) -> Iterator[None]:
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    with CUDASanitizerDispatchMode():
        yield


def profiler(folder: Path) -> AbstractContextManager[Any]:
    from torch import profiler as torch_profiler

    kinds = [torch_profiler.ProfilerActivity.CPU]
    return torch_profiler.profile(activities=kinds, profile_memory=True, with_stack=True)


class Traced:
    """Level ``trace`` in steps that are all traced, with or without what a step's end costs."""

    def __init__(self, *, with_end: bool) -> None:
        self._with_end = with_end
        self.ends = 0.0
        """Processor time of the ends of steps, in seconds."""

    @contextlib.contextmanager
    def __call__(self, folder: Path) -> Iterator[None]:
        from gpuprobe.sampler.recorder import Recorder

        close = Recorder._close_step

        def timed(recorder: Recorder, *args: Any, **kwargs: Any) -> None:
            began = time.process_time()
            try:
                close(recorder, *args, **kwargs)
            finally:
                self.ends += time.process_time() - began

        with contextlib.ExitStack() as stack:
            if not self._with_end:
                Recorder._close_step = timed  # type: ignore[method-assign]
                stack.callback(setattr, Recorder, "_close_step", close)
            stack.enter_context(recorded(folder, level="trace", trace_steps="all"))
            yield


def watchers() -> dict[str, tuple[Watch, int]]:
    """Each way of watching, and the number of steps that it is measured in; 0: as usual."""
    return {
        "counters": (recorded, 0),
        "history": (history, 0),
        "history, of Python": (
            lambda folder: history(folder, stacks="python", max_entries=1_000_000),
            0,
        ),
        "trace, in a traced step": (Traced(with_end=False), 0),
        "trace, with its end": (Traced(with_end=True), 0),
        f"trace, {LONG} steps": (lambda folder: recorded(folder, level="trace"), LONG),
        "hazards": (hazards, 0),
        "profiler": (profiler, 0),
        SANITIZER: (sanitizer, 0),
    }


def timed(step: Step, count: int, watch: Any = None) -> float:
    """Processor time of a step, in seconds."""
    gc.collect()
    before = getattr(watch, "ends", 0.0)
    began = time.process_time()
    for _ in range(count):
        step()
    spent = time.process_time() - began
    return (spent - getattr(watch, "ends", 0.0) + before) / count


def ratios(step: Step, watch: Watch, steps: int, whole: int) -> tuple[float, float]:
    """Of one round: the watched step's time in seconds, and its ratio to the bare one's."""
    count = whole or steps
    before = timed(step, steps)
    with tempfile.TemporaryDirectory() as folder, watch(Path(folder)):
        if not whole:
            timed(step, WARM)
        watched = timed(step, count, watch)
    after = timed(step, steps)
    return watched, watched / ((before + after) / 2)


def sanitized(
    step: Step, watch: Watch, rounds: int, steps: int, bare: list[float]
) -> list[tuple[float, float]]:
    """Of as many rounds, within one use of it."""
    with watch(Path()):
        timed(step, WARM)
        times = [timed(step, steps) for _ in range(rounds)]
    return [(spent, spent / statistics.median(bare)) for spent in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100-80gb", help="a GPU of the native engine")
    parser.add_argument("--real", action="store_true", help="the machine's own GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="steps of one block")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    args = parser.parse_args()
    if not args.real:
        from gpuprobe.catalogue.gpus import parse_spec
        from gpuprobe.native.process import load

        load(parse_spec(args.gpu))
        from gpuprobe.sampler import gpu_clock

        # On a GPU phases are timed by events, here by none: there is nothing to time.
        gpu_clock.takes_time = lambda: True
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    step = gpt_step()
    timed(step, 10)
    found: dict[str, list[tuple[float, float]]] = {}
    bare = []
    chosen = {name: way for name, way in watchers().items() if not args.only or name in args.only}
    last = chosen.pop(SANITIZER, None)
    for _ in range(args.rounds):
        bare.append(timed(step, args.steps))
        for name, (watch, whole) in chosen.items():
            found.setdefault(name, []).append(ratios(step, watch, args.steps, whole))
    if last is not None:
        found[SANITIZER] = sanitized(step, last[0], args.rounds, args.steps, bare)
    print(f"torch {torch.__version__}, {LAYERS} layers; processor time of a step")
    print(f"{'watched by':<28}{'ms':>8}{'median':>9}{'quartiles':>16}")
    print(f"{'nothing':<28}{statistics.median(bare) * 1e3:>8.2f}{1:>9.3f}")
    medians = {}
    for name, rows in found.items():
        values = [ratio for _, ratio in rows]
        low, middle, high = statistics.quantiles(values, n=4)
        medians[name] = middle
        spent = statistics.median(seconds for seconds, _ in rows) * 1e3
        print(f"{name:<28}{spent:>8.2f}{middle:>9.3f}{low:>9.3f}–{high:.3f}")
    goals(medians)


def goals(medians: dict[str, float]) -> None:
    """What is aimed at, of what was measured."""
    if "counters" in medians:
        print(f"counters: {medians['counters']:.3f} of a bare step (goal: at most 1.05)")
    for name in medians:
        for history in ("history", "history, of Python"):
            if name.startswith("trace") and history in medians:
                ratio = medians[name] / medians[history]
                goal = " (goal: at most 1.15)" if history == "history" else ""
                print(f"{name}: {ratio:.3f} of a step under {history}{goal}")
    if {"hazards", SANITIZER} <= set(medians):
        ratio = (medians["hazards"] - 1) / (medians[SANITIZER] - 1)
        print(f"hazards: {ratio:.3f} of what the sanitizer adds (goal: at most 0.33)")


if __name__ == "__main__":
    main()
