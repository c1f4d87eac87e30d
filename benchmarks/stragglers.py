"""Whether the rank that sleeps is named, with the phase it sleeps in, and none where none does.

    python benchmarks/stragglers.py [--injected 32] [--balanced 100] [--results FILE.jsonl]

Each run trains a small model with DistributedDataParallel in real processes over gloo, recorded by
gpuprobe; the processes make several runs, each with a new model. In an injected run one rank sleeps
in each step: while it loads data, moves it to the device, or in its forward pass, backward pass or
optimizer; rank and phase go through all combinations. In a balanced run no rank sleeps. Whoever
sleeps must be named with the phase; in a balanced run no rank may be. Results are written as they
come; with ``--results`` runs that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("data", "copy", "forward", "backward", "optimizer")
SLEEP_MS = 25
AT_ONCE = 10


def train(options: argparse.Namespace) -> None:
    """One rank."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gpuprobe

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    sleeper: list[Any] = [-1, ""]  # rank and phase of this run

    def nap(phase: str) -> None:
        if [rank, phase] == sleeper:
            time.sleep(SLEEP_MS / 1000)

    parts = _parts(nap, options.steps * 8)
    torch.manual_seed(0)
    for number, planned in enumerate(json.loads(options.plan)):
        sleeper[:] = planned
        model = DistributedDataParallel(parts.net())
        optimizer = parts.optimizer(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(parts.data(), batch_size=8)
        dist.barrier()
        with gpuprobe.record(f"{options.output}-{number}", model=model, optimizer=optimizer):
            for batch in loader:
                optimizer.zero_grad()
                batch = batch.as_subclass(parts.batch).to("cpu").as_subclass(torch.Tensor)
                model(batch).square().mean().backward()
                optimizer.step()
    dist.destroy_process_group()


class _Parts(NamedTuple):
    """The classes of a training whose phases may sleep."""

    net: type[Any]
    data: type[Any]
    batch: type[Any]
    optimizer: type[Any]


def _parts(nap: Callable[[str], None], samples: int) -> _Parts:
    """A training with ``samples`` samples, which calls ``nap`` with the name of each phase."""
    import torch

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            nap("forward")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            nap("backward")
            return gradient

    class Batch(torch.Tensor):
        """Takes its time to get to the device."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.to:
                nap("copy")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(Sleeps.apply(torch.relu(self.first(x))))

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> torch.Tensor:
            if index % 8 == 0:
                nap("data")
            return torch.ones(256)

    class Sgd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nap("optimizer")
            return super().step(closure)

    return _Parts(Net, Data, Batch, Sgd)


def run(ranks: int, steps: int, plan: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """What the report names in each run of the plan: the rank that sleeps, and where."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, __file__, "--train", "--output", str(output)]
        command += ["--steps", str(steps), "--plan", json.dumps(plan)]
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank failed")
        import gpuprobe

        found = []
        for number, (slow, phase) in enumerate(plan):
            time = gpuprobe.report(f"{output}-{number}")["rank_comparison"]["time"]
            found.append({"ranks": ranks, "slow": slow, "phase": phase, **time})
    return found


def planned_runs(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    for number in range(options.injected):
        slow = number // len(PHASES) % options.ranks
        yield f"injected {number}", slow, PHASES[number % len(PHASES)]
    for number in range(options.balanced):
        yield f"balanced {number}", -1, ""


def right(found: dict[str, Any]) -> bool:
    if found["slow"] < 0:
        return not found["stands_out"]
    named = found["stands_out"] and found["slowest"] == found["slow"]
    return bool(named and found["cause"] == found["phase"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--injected", type=int, default=32)
    parser.add_argument("--balanced", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--seconds", type=float, help="begin no run after so long")
    for hidden in ("--output", "--plan"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options)
        return
    import time

    began = time.monotonic()
    done: dict[str, dict[str, Any]] = {}
    if options.results is not None and options.results.exists():
        rows = map(json.loads, options.results.read_text().splitlines())
        done = {row["name"]: row for row in rows}
    left = [item for item in planned_runs(options) if item[0] not in done]
    while left and not (options.seconds and time.monotonic() - began > options.seconds):
        now, left = left[:AT_ONCE], left[AT_ONCE:]
        rows = run(options.ranks, options.steps, [(slow, phase) for _, slow, phase in now])
        for (name, _, _), row in zip(now, rows, strict=True):
            done[name] = {"name": name, **row}
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps(done[name]) + "\n")
    for what in ("injected", "balanced"):
        rows = [row for name, row in done.items() if name.startswith(what)]
        good = sum(map(right, rows))
        print(f"{what:<9} {good} of {len(rows)} right")
        for row in rows:
            if not right(row):
                keys = ("slow", "phase", "slowest", "cause", "stands_out", "late_ns", "chance_ns")
                print("   ", row["name"], {key: row[key] for key in keys}, row["late_steps"])


if __name__ == "__main__":
    main()
