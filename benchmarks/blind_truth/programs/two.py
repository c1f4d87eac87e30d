"""Two GPUs: optimizers and layers that share their state, of three sources. Models are made on the
GPU without values, in the order that ``.to(device)`` makes them in, and with fewer steps.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import itertools
import json
import os
import re
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import figure, source, stand_in, without_versions


def on_the_gpu(plain: Any, rank: int) -> Any:
    """A class of models that are made on a GPU, without values."""

    def build(*rest: Any, **named: Any) -> Any:
        with torch.device("meta"):
            model = plain(*rest, **named)
        return model.to_empty(device=f"cuda:{rank}")

    return build


CALLS = itertools.count()


def gathered(rank: int, value: Any, into: list[Any] | None, dst: int) -> None:
    """`torch.distributed.gather_object` of two ranks, by files: what is sent is not computed."""
    number = next(CALLS)
    folder = Path(os.environ["BLIND_WORK"])
    if into is None:
        own = folder / f"gathered-{os.getppid()}-{number}"
        own.with_suffix(".part").write_text(json.dumps(value), encoding="utf-8")
        own.with_suffix(".part").rename(own)
        return
    other = folder / f"gathered-{os.getppid()}-{number}"
    while not other.exists():
        time.sleep(0.1)
    into[:] = [value, json.loads(other.read_text(encoding="utf-8"))]


def snider(rank: int, batch: int, sharded: bool) -> None:
    without_versions()
    source("brandon-snider+cs336-a2", "cs336-basics", ".")
    module: Any = importlib.import_module("cs336_systems.ddp_benchmarking")
    module.Transformer = on_the_gpu(module.Transformer, rank)
    module.dist.gather_object = partial(gathered, rank)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.run(
            rank,
            2,
            warmup=2,
            steps=2,
            batch_size=batch,
            seq_len=128,
            shard_optimizer=sharded,
            report_memory=True,
        )
    for when, size in re.findall(
        r"(after init|before step|after step) +: ([\d.]+)", printed.getvalue()
    ):
        key = f"{'sharded' if sharded else 'whole'} {when}"
        figure(f"{key} b{batch}", float(size) * 2**20)


def kbjiang(rank: int, batch: int) -> None:
    without_versions()
    source("kbjiang+cs336-assignment2-systems-mine", "cs336-basics", ".")
    module: Any = importlib.import_module("cs336_systems.sharded_optimizer_accounting")
    module.BasicsTransformerLM = on_the_gpu(module.BasicsTransformerLM, rank)
    plain = module.get_batch  # which looks for "cuda" in the device's name
    module.get_batch = lambda data, batch, length, device: plain(data, batch, length, str(device))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.worker(rank, 2, batch, 2, 3)
    if rank:
        return
    for result in json.loads(printed.getvalue()[printed.getvalue().index("{") :])["results"]:
        for row in result["phase_means"]:
            phase = row["phase"].split("/")[0].replace("_", " ")
            key = f"{result['scenario']} {phase} b{batch}"
            figure(f"{key} current", row["current_GB_mean"] * 2**30)
            figure(f"{key} peak", row["peak_GB_mean"] * 2**30)


def process(rank: int, name: str, words: list[str]) -> None:
    if name == "snider":
        snider(rank, int(words[0]), words[1] == "sharded")
    else:
        kbjiang(rank, int(words[0]))


def zero(stage: str, width: str) -> None:
    """One rank of ``zero1.py`` to ``zero3.py``, without its profiler."""
    folder = source("xo-toybox+distributed-training-sandbox") / "zero"
    sys.path.insert(0, str(folder))
    data = stand_in("datasets", load_dataset=None)
    data.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    path = folder / f"zero{stage}.py"
    text = path.read_text(encoding="utf-8").replace("10_000", width).replace("10000", width)
    text = text.replace(
        "if rank == 0:\n        profiler_schedule", "if False:\n        profiler_schedule"
    )
    text = text.replace("num_steps = 20", "num_steps = 3")
    copy = Path(os.environ["BLIND_WORK"]) / f"zero{stage}.py"
    copy.write_text(text, encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(copy), run_name="__main__")
    part = "regular"
    names = {
        "Total allocated": "total",
        "Max allocated": "max",
        "Before backward": "before_backward",
        "Peak memory this step": "step_peak",
        "Final peak memory": "final_peak",
    }
    for line in printed.getvalue().splitlines():
        if "Testing with" in line:
            part = "regular" if "regular" in line else "sharded"
        found = re.match(r" *([A-Z][a-z ]+): ([\d.]+) MB", line)
        if found and found[1] in names:
            figure(f"zero{stage} {part} {names[found[1]]}", float(found[2]) * 2**20)


def main(name: str, *words: str) -> None:
    if name == "zero":
        zero(*words)
        return
    context: Any = importlib.import_module("torch.multiprocessing")
    context.spawn(process, args=(name, list(words)), nprocs=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
