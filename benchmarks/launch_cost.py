"""What counting launches costs a recording at level ``trace`` on the native engine.

    python benchmarks/launch_cost.py [--pairs 20] [--compute shapes] [--limit 1.2]

A transformer of four layers of GPT-2's size is trained on an H100 of the native engine, two steps
at a time, each pair of steps recorded at level ``trace``, with launches and without, in turn, in
one process; the order changes from pair to pair. Of the second step the processor time is taken,
from its first line to the end of the step's record. The figure is the median of the pairs' ratios.
A second row compares recordings without launches with one another: this machine's noise.

Then the launches per step, counted and in the runtime's own log, and the bytes of both recordings.
Exit code 1 where the ratio is above ``--limit`` or the counts differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpuprobe
from gpuprobe.model.values import Unavailable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--compute", choices=("real", "shapes"), default="shapes")
    parser.add_argument("--limit", type=float, default=1.2)
    options = parser.parse_args()
    with (
        gpuprobe.virtual_gpu("h100-80gb", compute=options.compute),
        tempfile.TemporaryDirectory() as folder,
    ):
        return measure(Path(folder), options.pairs, options.limit)


def gpt() -> tuple[Any, Any, Any]:
    """A model, its optimizer, and a batch."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(
        768, 12, 3072, activation="gelu", batch_first=True, norm_first=True
    )
    model = torch.nn.Sequential(
        torch.nn.Embedding(50257, 768),
        torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        torch.nn.Linear(768, 50257, bias=False),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.randint(0, 50257, (2, 64), device="cuda")


def measure(folder: Path, pairs: int, limit: float) -> int:
    import torch

    from gpuprobe.native.process import LogKind, loaded
    from gpuprobe.torch_support.engine_reports import launch_counter, set_launch_counter

    model, optimizer, x = gpt()
    counter = launch_counter()
    runtime = loaded()
    if counter is None or runtime is None:
        print("the native engine is not loaded", file=sys.stderr)
        return 2

    def step() -> None:
        logits = model(x)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    made = 0

    def recorded(*, counted: bool) -> tuple[float, Path]:
        """Processor time of a step, and its recording."""
        nonlocal made
        made += 1
        path = folder / f"{made}.gpuprobe"
        end = None if counted else set_launch_counter(counter)
        if end is not None:
            end()
        with gpuprobe.record(
            path, model=model, optimizer=optimizer, level="trace", trace_steps="all"
        ):
            step()
            began = time.process_time()
            step()
            spent = time.process_time() - began
        if end is not None:
            set_launch_counter(counter)
        return spent, path

    recorded(counted=True)
    ratios, noise = [], []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        times = {counted: recorded(counted=counted)[0] for counted in order}
        ratios.append(times[True] / times[False])
        first, second = (recorded(counted=False)[0] for _ in range(2))
        noise.append(second / first)
    ratio = statistics.median(ratios)
    print(f"with launches / without   {ratio:.3f}  ({pairs} pairs)")
    print(f"without / without         {statistics.median(noise):.3f}")

    runtime.start_log()
    step()
    runtime.stop_log()
    kinds = (LogKind.LAUNCH, LogKind.LIBRARY, LogKind.COLLECTIVE, LogKind.GRAPH_LAUNCH)
    logged = sum(call.kind in kinds for call in runtime.take_log())
    _, path = recorded(counted=True)
    _, other = recorded(counted=False)
    report = gpuprobe.report(gpuprobe.load(path))["launches"]
    print(f"launches of a step        {report['count']}, in the log {logged}")
    for name, one in (("with", path), ("without", other)):
        size = sum(file.stat().st_size for file in one.iterdir())
        print(f"bytes of two steps        {size:,} {name} launches")
    assert not any(
        not isinstance(one.launches, Unavailable) for one in gpuprobe.load(other).ranks[0].steps
    )
    return int(ratio > limit or report["count"] != logged)


if __name__ == "__main__":
    sys.exit(main())
