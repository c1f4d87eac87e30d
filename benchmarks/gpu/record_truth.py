"""Record how much memory training steps really take, on the GPU of this machine.

    python benchmarks/gpu/record_truth.py                          all cases, 8 minutes at most
    python benchmarks/gpu/record_truth.py --case 'gpt2-*'          some of them
    python benchmarks/gpu/record_truth.py --jobs 6                 six at once, in two minutes
    python benchmarks/gpu/record_truth.py --list
    python benchmarks/gpu/record_truth.py --native h200 --out DIR  on the native engine, no GPU
    python benchmarks/gpu/record_truth.py --compare tests/recorded/h200/truth DIR
    python benchmarks/gpu/record_truth.py --device cpu --tiny --out DIR    a dry run, no GPU

Each case runs in a separate process, so that every peak is counted from a fresh allocator.
Its peaks, the versions and the allocator's trace are written to ``tests/recorded/GPU/``, see
``truth_files.py``. With several at once, what the GPU uses apart from the allocator is unknown.
``--compare`` prints the peaks of two
folders that differ. Exit code: 0 if all were recorded or are equal, 1 if some failed, differ or
there was no time, 3 without a CUDA device.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import platform
import re
import subprocess
import sys
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

if "--native" in sys.argv:  # before anything imports torch
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec(sys.argv[sys.argv.index("--native") + 1]))

from reference_models import Case, cases
from truth_files import (
    NO_GPU,
    NO_LOSS,
    Gpu,
    StepTruth,
    Truth,
    read_truth,
    truth_files,
    write_truth,
)

from gpuprobe.model.trace import Frame, MemoryTrace, StackTable
from gpuprobe.model.values import Unavailable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
STEPS = 3
MIB = 1 << 20
TIME_LIMIT = 480.0  # seconds
MAX_EVENTS = 2_000_000


# -- one case, in a separate process


def record(case: Case, device: str, tiny: bool, steps: int, used_before: int, out: Path) -> Path:
    """Run one case and write what it took."""
    import torch

    on_gpu = device.startswith("cuda")
    starts: list[int] = []
    losses: list[float] = []
    measured: list[StepTruth] = []
    outcome = "ok"
    if on_gpu:
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS
        )
    try:
        starts.append(time.time_ns() // 1000)
        step = case.build(device, tiny=tiny)
        measured.append(_measured(on_gpu, None))
        for _ in range(steps):
            starts.append(time.time_ns() // 1000)
            loss = step()
            losses.append(float(loss))
            del loss
            measured.append(_measured(on_gpu, losses[-1]))
    except torch.OutOfMemoryError:
        outcome = "out of memory"
        measured.append(_measured(on_gpu, None))
    beside: int | Unavailable = NO_GPU
    trace = None
    if on_gpu:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        beside = total - free - torch.cuda.memory_reserved() - used_before
        if used_before < 0:
            beside = Unavailable("what others used before is unknown")
        trace = _trace(starts)
    truth = Truth(
        case=case.name,
        about=case.about,
        device="cuda" if on_gpu else device,
        tiny=tiny,
        outcome=outcome,
        built=measured[0],
        steps=tuple(measured[1:]),
        peak_allocated=_highest(measured, "peak_allocated"),
        peak_reserved=_highest(measured, "peak_reserved"),
        beside=beside,
        allocator_conf=os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        flags=_flags(),
        **_versions(on_gpu),
    )
    return write_truth(out, truth, trace)


def _measured(on_gpu: bool, loss: float | None) -> StepTruth:
    """The counters since the last call, which resets them."""
    import torch

    value = NO_LOSS if loss is None else loss
    if not on_gpu:
        return StepTruth(loss=value)
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    return StepTruth(
        peak_allocated=stats["allocated_bytes.all.peak"],
        peak_reserved=stats["reserved_bytes.all.peak"],
        peak_requested=stats["requested_bytes.all.peak"],
        allocated=stats["allocated_bytes.all.current"],
        reserved=stats["reserved_bytes.all.current"],
        loss=value,
    )


def _highest(measured: list[StepTruth], name: str) -> int | Unavailable:
    values = [getattr(step, name) for step in measured]
    known = [value for value in values if isinstance(value, int)]
    return max(known) if known else NO_GPU


def _flags() -> dict[str, str]:
    """Settings of torch that decide which kernels run, and so what they allocate."""
    import torch

    return {
        "matmul.allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "cudnn.enabled": str(torch.backends.cudnn.enabled),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "flash_sdp": str(torch.backends.cuda.flash_sdp_enabled()),
        "mem_efficient_sdp": str(torch.backends.cuda.mem_efficient_sdp_enabled()),
        "cudnn_sdp": str(torch.backends.cuda.cudnn_sdp_enabled()),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        "CUBLASLT_WORKSPACE_SIZE": os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""),
    }


def _versions(on_gpu: bool) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or Unavailable("a build without CUDA"),
        "cudnn": NO_GPU,
        "driver": NO_GPU,
        "gpu": NO_GPU,
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        numbers = {
            name: value
            for name in dir(properties)
            if not name.startswith("_")
            and not name.startswith("pci_")
            and type(value := getattr(properties, name)) is int
        }
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["driver"] = _driver()
        found["gpu"] = Gpu(properties.name, (properties.major, properties.minor), numbers)
    return found


def _driver() -> str | Unavailable:
    try:
        import pynvml
    except ImportError:
        return Unavailable("nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError as error:
        return Unavailable(f"NVML: {error}")
    return version if isinstance(version, str) else version.decode()


def _trace(starts: list[int]) -> MemoryTrace:
    """The allocator's history, without times and with every event's step as its phase."""
    import torch

    from gpuprobe.torch_support.snapshots import trace_of

    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    trace = trace_of(snapshot, torch.cuda.current_device())
    return without_times(trace, starts)


def without_times(trace: MemoryTrace, starts: list[int]) -> MemoryTrace:
    """Phases ``build``, ``step 1``… from the microseconds at which each began; times dropped,
    and file names cut to what is the same on every machine.
    """
    names = [trace.stacks.string(name) for name in _phases(len(starts))]
    events = trace.events
    del events.phase[:]
    times = events.column("time_us")
    events.phase.extend(names[max(bisect_right(starts, moment) - 1, 0)] for moment in times)
    del events.time_us[:]
    trace.annotations = ()
    frames = [Frame(short(f.filename), f.line, f.name) for f in trace.stacks.frames]
    trace.stacks = StackTable.of(trace.stacks.strings, frames, trace.stacks.stacks)
    return trace


def _phases(count: int) -> list[str]:
    return ["build", *(f"step {number}" for number in range(1, count))]


def short(filename: str) -> str:
    """A path from the package on, or from the repository on; else the file's name."""
    if filename.startswith(str(ROOT)) and "site-packages" not in filename:
        return Path(filename).relative_to(ROOT).as_posix()
    for root in (r".*/(?:site|dist)-packages/", r".*/lib/python[\d.]+/"):
        match = re.match(root, filename)
        if match:
            return filename[match.end() :]
    return filename.rpartition("/")[2]


def native(gpu: str, case: Case) -> AbstractContextManager[Any]:
    """The native engine with this GPU, loaded before torch. It computes values where sizes need
    them; elsewhere memory holds zeros, and so do losses.
    """
    from gpuprobe.native.session import EngineOptions, session

    return session(EngineOptions(gpu)) if case.values else nullcontext()


def compare(one: Path, other: Path) -> int:
    """Print the cases whose peaks differ, and how many are equal. Each step has its own peaks."""
    equal = total = 0
    for path in truth_files(one):
        beside = other / path.name
        if not beside.exists():
            continue
        total += 1
        first, second = read_truth(path), read_truth(beside)
        peaks = [
            [(step.peak_allocated, step.peak_reserved) for step in (truth.built, *truth.steps)]
            for truth in (first, second)
        ]
        equal += peaks[0] == peaks[1]
        if peaks[0] != peaks[1]:
            pairs = (
                (first.peak_allocated, second.peak_allocated),
                (first.peak_reserved, second.peak_reserved),
            )
            text = "   ".join(
                f"{a / MIB:9.2f} {b / MIB:9.2f} MiB {b / a - 1:+7.2%}"
                for a, b in pairs
                if isinstance(a, int) and isinstance(b, int)
            )
            print(f"{first.case:30} {text}")
    print(f"{equal} of {total} equal: allocated and reserved, in each step")
    return int(equal != total)


# -- all cases


def run_child(case: Case, args: argparse.Namespace, out: Path, used: int, left: float) -> str:
    """One case in a fresh process. "" where it was recorded, else why not."""
    command = [sys.executable, str(HERE / "record_truth.py"), "--child", case.name]
    command += ["--device", args.device, "--steps", str(args.steps), "--out", str(out)]
    command += ["--used-before", str(used)] + (["--tiny"] if args.tiny else [])
    command += ["--native", args.native] if args.native else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(left, 1.0), check=False
        )
    except subprocess.TimeoutExpired:
        return "ran out of time"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"
    return ""


def used_now(uuid: str) -> int:
    """Bytes in use on the GPU, -1 if NVML does not report them. Before a case: by others."""
    try:
        import pynvml
    except ImportError:
        return -1
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return -1


def destination(title: str) -> Path:
    """``tests/recorded/GPU``, by the catalogue's name of the GPU where it has one."""
    from gpuprobe.catalogue.gpus import find
    from gpuprobe.errors import ConfigError

    try:
        name = find(title).name
    except ConfigError:
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return ROOT / "tests" / "recorded" / name / "truth"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    found.add_argument("--case", default="*", help="only cases of this name (with * and ?)")
    found.add_argument("--list", action="store_true", help="print the cases and end")
    found.add_argument("--out", type=Path, help="folder to write to (default: tests/recorded/GPU)")
    found.add_argument("--steps", type=int, default=STEPS, help=f"steps a case (default {STEPS})")
    found.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds for all cases")
    found.add_argument("--jobs", type=int, default=1, help="cases at once (default 1)")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--native", metavar="GPU", help="on the native engine, as this GPU")
    found.add_argument("--compare", nargs=2, type=Path, metavar="FOLDER", help="run nothing")
    found.add_argument("--tiny", action="store_true", help="the same code with small numbers")
    found.add_argument("--child", metavar="CASE", help=argparse.SUPPRESS)
    found.add_argument("--used-before", type=int, default=-1, help=argparse.SUPPRESS)
    return found


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    known = cases()
    if args.compare:
        return compare(*args.compare)
    if args.child:
        case = known[args.child]
        with native(args.native, case) if args.native else nullcontext():
            record(case, args.device, args.tiny, args.steps, args.used_before, args.out)
        return 0
    chosen = [case for name, case in known.items() if fnmatch.fnmatchcase(name, args.case)]
    if not chosen:
        print(f"no case is called {args.case!r}; --list shows them", file=sys.stderr)
        return 2
    if args.list:
        for case in chosen:
            print(f"{case.name:30} {case.about}")
        return 0
    out, uuid = args.out, ""
    if args.native:
        if out is None:
            print("--out is needed with --native", file=sys.stderr)
            return 2
    elif args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print(
                "torch sees no CUDA device here: truth can only be recorded on a real GPU "
                "(--device cpu --tiny --out DIR is a dry run)",
                file=sys.stderr,
            )
            return 3
        properties = torch.cuda.get_device_properties(0)
        uuid = str(getattr(properties, "uuid", ""))
        out = out or destination(properties.name)
    elif out is None:
        print("--out is needed with --device cpu", file=sys.stderr)
        return 2
    return _record_all(chosen, args, out, uuid)


def _record_all(chosen: list[Case], args: argparse.Namespace, out: Path, uuid: str) -> int:
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def one(case: Case) -> bool:
        """Whether a case was recorded."""
        left = args.time_limit - (time.monotonic() - began)
        started = time.monotonic()
        if left <= 0:
            problem = "no time left"
        else:
            used = used_now(uuid) if uuid and args.jobs == 1 else -1
            problem = run_child(case, args, out, used, left)
        seconds = time.monotonic() - started
        print(f"{case.name:30} {problem or 'recorded'} ({seconds:.1f} s)", flush=True)
        return not problem

    with ThreadPoolExecutor(args.jobs) as threads:
        recorded = sum(threads.map(one, chosen))
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    print(f"{recorded} of {len(chosen)} cases, {size / 1024:.0f} KiB", flush=True)
    return 0 if recorded == len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
