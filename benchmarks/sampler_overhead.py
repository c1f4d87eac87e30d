"""What watching costs, as a ratio of step time, on the CPU.

    python benchmarks/sampler_overhead.py [--blocks 12]

Watched and unwatched steps alternate in blocks within one process; a ratio is that of a
watched block to the mean of its two unwatched neighbours, and the table shows the median and
the quartiles of those ratios. ``torch.profiler`` is run the same way for comparison.

A recording is there to be read. ``whole`` is the median of all the time that a watched block
takes, starting and stopping included, until it is known who held how much: for gpuprobe until
its report is made, for torch.profiler until its events are (``events()``: sums by operator and
source line; what was alive at the peak it does not say). The empty dispatch mode shows what any
account of every storage on the CPU costs in the step itself, before it counts anything.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpuprobe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

Step = Callable[[], None]


def gpt_step() -> Step:
    """One step of the model of examples/train_gpt.py."""
    from train_gpt import GPT  # the example, as it ships

    torch.manual_seed(0)
    model = GPT(vocabulary=64, layers=4, embed=128, context=64)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (16, 65))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def tiny_ops_step() -> Step:
    """2,000 operators on a few numbers, and the smallest optimizer step: the worst case."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 1e-6)

    def step() -> None:
        x = weight
        for _ in range(1000):
            x = x * 1.0001
        for _ in range(1000):
            x = x + 0.5
        optimizer.zero_grad()
        x.sum().backward()
        optimizer.step()

    return step


class Recorded:
    """A recording, and its report."""

    def __init__(self, folder: Path, level: str) -> None:
        self._path = folder / "r.gpuprobe"
        self._recorder = gpuprobe.record(self._path, level=level, force=True)
        self.start, self.stop = self._recorder.__enter__, self._recorder.finish

    def read(self) -> object:
        return gpuprobe.report(gpuprobe.load(self._path))


class Profiled:
    """torch.profiler, and its events."""

    def __init__(self, folder: Path) -> None:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, with_stack=True
        )
        self.start, self.stop = self._profile.start, self._profile.stop

    def read(self) -> object:
        return self._profile.events()


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that does nothing: what level ``trace`` on the CPU cannot go below."""

    def __init__(self, _: Path) -> None:
        super().__init__()
        self.start = self.__enter__

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def stop(self) -> None:
        self.__exit__(None, None, None)

    def read(self) -> None:
        """There is nothing to read."""


WATCHERS: dict[str, Callable[[Path], Any]] = {
    "counters": lambda folder: Recorded(folder, "counters"),
    "trace": lambda folder: Recorded(folder, "trace"),
    "an empty dispatch mode": EmptyMode,
    "torch.profiler memory+stack": Profiled,
}


def timed(step: Step, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start


def ratios(
    step: Step, watcher: Callable[[Path], Any], blocks: int, count: int
) -> tuple[list[float], list[float]]:
    """The ratios of the steps' time, and of the whole block's."""
    found, whole = [], []
    with tempfile.TemporaryDirectory() as name:
        before = timed(step, count)
        for _ in range(blocks):
            began = time.perf_counter()
            watching = watcher(Path(name))
            watching.start()
            started = time.perf_counter()
            step()  # the first watched step is no step like the others
            watched = timed(step, count)
            ended = time.perf_counter()
            watching.stop()
            watching.read()
            around = started - began + time.perf_counter() - ended
            after = timed(step, count)
            plain = (before + after) / 2
            found.append(watched / plain)
            whole.append((watched + around) / plain)
            before = after
    return found, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="steps in one block")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratio of step time")
    print(f"{'step':<12}{'watched by':<30}{'ms':>8}{'median':>9}{'quartiles':>16}{'whole':>9}")
    for name, make in (("GPT", gpt_step), ("2,000 ops", tiny_ops_step)):
        step = make()
        timed(step, 5)
        plain = timed(step, options.steps) / options.steps * 1e3
        for watcher, context in WATCHERS.items():
            values, whole = ratios(step, context, options.blocks, options.steps)
            low, middle, high = statistics.quantiles(values, n=4)
            print(
                f"{name:<12}{watcher:<30}{plain:>8.1f}{middle:>9.3f}{low:>9.3f}–{high:.3f}"
                f"{statistics.median(whole):>9.2f}"
            )


if __name__ == "__main__":
    main()
