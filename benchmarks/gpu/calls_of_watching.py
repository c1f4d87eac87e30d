"""Which calls of the CUDA runtime each kind of recording adds to a training step, by CUPTI.

    python benchmarks/gpu/calls_of_watching.py [--out FILE]

torch.profiler counts the runtime's calls in steps of a small model, bare and under each level: none
of those added may wait for the GPU. `tests/native/test_calls_of_watching.py` does it on the native
engine. Exit code 1 if a call that waits was added, 3 without a CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

LEVELS: Final = ("bare", "counters", "trace", "hazards")
STEPS: Final = 5
WAITING: Final = ("Synchronize", "cudaMemcpy", "cudaFree", "cudaMalloc", "cudaHostAlloc")
"""Parts of the names of calls that wait, or may (``cudaMemcpyAsync`` does not)."""


def child(level: str) -> dict[str, int]:
    import torch

    import gpuprobe

    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 512, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if level == "hazards":
            stack.enter_context(gpuprobe.detect_hazards())
        elif level != "bare":
            stack.enter_context(
                gpuprobe.record(
                    f"{folder}/r.gpuprobe", model=model, optimizer=optimizer, level=level
                )
            )
        for _ in range(6):  # a trace names what there is in its first steps
            step()
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(STEPS):
                step()
    events: list[Any] = found.events()
    return dict(Counter(event.name for event in events if event.name.startswith(("cuda", "cu"))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child)))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 3
    found: dict[str, dict[str, int]] = {}
    waits = 0
    for level in LEVELS:
        done = subprocess.run(
            [sys.executable, __file__, "--child", level],
            capture_output=True,
            text=True,
            check=True,
        )
        found[level] = json.loads(done.stdout.splitlines()[-1])
        added = Counter(found[level])
        added.subtract(found["bare"])
        changed = {name: count for name, count in sorted(added.items()) if count}
        print(f"{level:9} {changed if level != 'bare' else found[level]}", flush=True)
        waits += sum(
            count > 0 and any(part in name for part in WAITING) and not name.endswith("Async")
            for name, count in changed.items()
            if level != "bare"
        )
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "schema_version": 1,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(0),
            "steps": STEPS,
            "calls": found,
        }
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(waits > 0)


if __name__ == "__main__":
    raise SystemExit(main())
