"""The cost of recording on a GPU, as a ratio of step time, compared with torch's own tools.

    python benchmarks/gpu/overhead.py                               about two minutes
    python benchmarks/gpu/overhead.py --device cpu --tiny --blocks 2    a dry run, no GPU

Two steps: GPT-2 small in bf16, and 2,000 operators on a few numbers (the worst case). Each is
recorded by each tool in a separate process, where recorded and bare blocks alternate; a
ratio is that of a recorded block to the mean of its two bare neighbours. torch's sanitizer
cannot be switched off again: its blocks come after the bare ones, and are not paired.
The figures are printed and written to ``tests/recorded/GPU/overhead.json``. Exit code: 0, 1 if a
tool failed, 3 without a CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from record_truth import destination
from reference_models import Step, case

HERE = Path(__file__).resolve().parent
CHILD_LIMIT = 120  # seconds for one tool and one step


def gpt(device: str, tiny: bool) -> Step:
    return case("gpt2-small-bf16-fused").build(device, tiny=tiny)


def tiny_ops(device: str, tiny: bool) -> Step:
    import torch

    weight = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([weight], 1e-6)

    def step() -> Any:
        x = weight
        for _ in range(50 if tiny else 1000):
            x = x * 1.0001
            x = x + 0.5
        optimizer.zero_grad()
        loss = x.sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


STEPS: dict[str, Callable[[str, bool], Step]] = {"GPT-2 small": gpt, "2,000 ops": tiny_ops}


# -- the tools


def recorded(level: str) -> Callable[[Path], AbstractContextManager[Any]]:
    def watch(folder: Path) -> AbstractContextManager[Any]:
        import gpuprobe

        return gpuprobe.record(folder / "r.gpuprobe", level=level, force=True)

    return watch


def hazards(folder: Path) -> AbstractContextManager[Any]:
    import gpuprobe

    detect: Callable[[], AbstractContextManager[Any]] | None
    detect = getattr(gpuprobe, "detect_hazards", None)
    if detect is None:
        raise NotImplementedError("this gpuprobe has no detect_hazards()")
    return detect()


def profiler(folder: Path) -> AbstractContextManager[Any]:
    import torch

    return torch.profiler.profile(profile_memory=True, with_stack=True)


@contextlib.contextmanager
def history(folder: Path) -> Iterator[None]:
    import torch

    torch.cuda.memory._record_memory_history("all", stacks="python")
    try:
        yield
        torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)


def sanitizer(folder: Path) -> AbstractContextManager[Any]:
    import torch.cuda._sanitizer

    return torch.cuda._sanitizer.CUDASanitizerDispatchMode()


WATCHERS: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "gpuprobe counters": recorded("counters"),
    "gpuprobe trace": recorded("trace"),
    "gpuprobe hazards": hazards,
    "torch.profiler memory+stack": profiler,
    "torch memory history": history,
    "torch sanitizer": sanitizer,
}
NEED_CUDA = ("torch memory history", "torch sanitizer")
NOT_PAIRED = ("torch sanitizer",)


# -- one tool on one step, in a separate process


def timed(step: Step, count: int, device: str) -> float:
    import torch

    start = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, watcher: str, args: argparse.Namespace) -> dict[str, Any]:
    """The plain step in seconds, and a ratio for each block."""
    warnings.filterwarnings("ignore")
    step = STEPS[name](args.device, args.tiny)
    watch = WATCHERS[watcher]
    count = args.count
    timed(step, 3, args.device)

    def watched() -> float:
        with watch(Path(folder)):
            timed(step, 1, args.device)  # starting to watch is not a step
            return timed(step, count, args.device)

    plain = [timed(step, count, args.device)]
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        if watcher in NOT_PAIRED:
            plain += [timed(step, count, args.device) for _ in range(args.blocks - 1)]
            middle = statistics.median(plain)
            ratios = [watched() / middle for _ in range(args.blocks)]
        else:
            for _ in range(args.blocks):
                seconds = watched()
                plain.append(timed(step, count, args.device))
                ratios.append(seconds / ((plain[-2] + plain[-1]) / 2))
    return {"plain": statistics.median(plain) / count, "ratios": ratios}


def apart(name: str, watcher: str, args: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a fresh process; ``{"problem": why}`` where it failed."""
    command = [sys.executable, str(HERE / "overhead.py"), "--child", name, watcher]
    command += ["--device", args.device, "--blocks", str(args.blocks), "--count", str(args.count)]
    command += ["--tiny"] if args.tiny else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer in {CHILD_LIMIT} s"}
    lines = done.stderr.strip().splitlines() if done.returncode else done.stdout.splitlines()
    if done.returncode:
        return {"problem": lines[-1] if lines else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def line(name: str, watcher: str, found: dict[str, Any]) -> str:
    if "problem" in found:
        return f"{name:<12} {watcher:<28} {found['problem']}"
    low, middle, high = statistics.quantiles(found["ratios"], n=4)
    return (
        f"{name:<12} {watcher:<28} {found['plain'] * 1e3:8.2f} ms {middle:8.3f} "
        f"{low:8.3f}–{high:.3f}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small numbers")
    parser.add_argument("--blocks", type=int, default=8, help="watched blocks (at least 2)")
    parser.add_argument("--count", type=int, default=5, help="steps in a block")
    parser.add_argument("--out", type=Path, help="file to write (default: tests/recorded/GPU)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(measure(*args.child, args)))
        return 0
    import torch

    out = args.out
    if args.device == "cuda":
        if not torch.cuda.is_available():
            print("torch sees no CUDA device here (--device cpu is a dry run)", file=sys.stderr)
            return 3
        out = out or destination(torch.cuda.get_device_name(0)).parent / "overhead.json"
    results: dict[str, dict[str, Any]] = {}
    print(f"torch {torch.__version__}: step, watched by, plain, median ratio, quartiles")
    for name in STEPS:
        for watcher in WATCHERS:
            if args.device == "cpu" and watcher in NEED_CUDA:
                continue
            found = results.setdefault(name, {})[watcher] = apart(name, watcher, args)
            print(line(name, watcher, found), flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        document = {"schema_version": 1, "torch": torch.__version__, "results": results}
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    failed = any("problem" in found for tools in results.values() for found in tools.values())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
