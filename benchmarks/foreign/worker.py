"""Runs programs of one family, each in a process forked from one that imported the libraries.

    python -m foreign.worker FOLDER SECONDS GIGABYTES NAME=MODE[,MODE]...

Prints one line of JSON per program and mode. The traceback of what failed goes to
``FOLDER/NAME.MODE.txt``, with everything that the program printed.

Modes: ``cpu`` runs the program as it is, for its losses; ``real`` and ``shapes`` run it as
``gpuprobe estimate --compute MODE`` does, to its end; ``cuda`` runs it as it is on this machine's
GPU, in a worker for this mode alone: the simulated GPU is loaded before torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from foreign.programs import Program, load

GPU = os.environ.get("FOREIGN_GPU", "h100-80gb")
OURS = (
    "gpuprobe.recording.summary",
    "gpuprobe.api.recordings",
    "gpuprobe.planning.estimates",
    "gpuprobe.api.watch",
    "gpuprobe.planning.figures",
    "gpuprobe.recording.reader",
    "gpuprobe.recording.writer",
    "gpuprobe.sampler.environment",
    "gpuprobe.sampler.hooks.optimizer_steps",
    "gpuprobe.sampler.hooks.torch_hooks",
    "gpuprobe.sampler.recorder",
    "gpuprobe.sampler.tracing.cuda",
    "gpuprobe.native.session",
)
"""Imported once for all programs, as the libraries are."""

ENDLESS = 10**6
"""More optimizer steps than any program of the corpus makes."""


class Call:
    """A function of the corpus, as what `estimate_program` runs."""

    argv = ("",)

    def __init__(self, program: Program) -> None:
        self._program = program
        self.losses: list[float] = []
        self.drawn: bool | None = None

    def run(self) -> None:
        seed()
        found = self._program.train("cuda")
        import torch

        self.losses = [float(loss) for loss in found]
        self.drawn = _drawn(torch.cuda.default_generators[0])


def seed() -> None:
    """Seed what programs draw random numbers with: some seed none of it, or torch alone."""
    import random

    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _drawn(generator: Any) -> bool | None:
    """Whether random numbers were drawn on the device; None where that cannot be read."""
    try:
        return bool(generator.get_offset())
    except (AttributeError, RuntimeError):
        return None


def outcome(program: Program, mode: str) -> dict[str, Any]:
    """Run a program in this process. What it prints is not looked at."""
    import torch

    torch.set_num_threads(1)
    if mode == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of a build with CUDA, too
        seed()
        return {"status": "ran", "losses": [float(loss) for loss in program.train("cpu")]}
    call = Call(program)
    if mode == "cuda":
        call.run()
        return {
            "status": "ran",
            "losses": call.losses,
            "drawn": call.drawn,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    from gpuprobe.model.plans.request import EstimateRequest
    from gpuprobe.planning.estimates import estimate_program

    request = EstimateRequest(gpu=GPU, steps=ENDLESS, compute=mode)
    found = estimate_program(request, call)  # type: ignore[arg-type]
    return {
        "status": "ran",
        "losses": call.losses,
        "drawn": call.drawn,
        "allocated": int(found.peak_allocated),
        "reserved": int(found.peak_reserved),
        "allocated_range": [int(found.allocated_low), int(found.allocated_high)],
        "reserved_range": [int(found.reserved_low), int(found.reserved_high)],
        "assumed": list(found.assumed),
    }


def failure(error: BaseException) -> dict[str, Any]:
    """What is known of a failure. ``clear``: gpuprobe names what it cannot do, in one line."""
    from gpuprobe.errors import GpuprobeError, InternalError, ProgramFailed

    ours = isinstance(error, GpuprobeError) and not isinstance(error, InternalError)
    text = str(error)
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    found = {
        "status": "failed",
        "kind": type(error).__name__,
        "error": text.replace("\n", " ")[:400],
        "clear": ours and type(error) is not ProgramFailed and "\n" not in text,
    }
    if type(error) is ProgramFailed and cause is not None:
        found["cause"] = f"{type(cause).__name__}: {cause}".replace("\n", " ")[:400]
    return found


def child(
    program: Program, mode: str, log: Path, answer: int, seconds: int, gigabytes: int
) -> None:
    """The life of one forked process. Tensors in reference cycles live to its end: when Python
    would collect them depends on how many objects each way of computing makes.
    """
    gc.disable()
    # The memory of GPUs is address space; of data it is the same bound.
    limited = resource.RLIMIT_AS if mode == "cpu" else resource.RLIMIT_DATA
    resource.setrlimit(limited, (gigabytes << 30, gigabytes << 30))
    signal.alarm(seconds)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            found = outcome(program, mode)
        except BaseException as error:  # noqa: BLE001 - all is an answer of this benchmark
            traceback.print_exc()
            found = failure(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, json.dumps(found).encode())
    os._exit(0)


def forked(
    program: Program, mode: str, folder: Path, seconds: int, gigabytes: int
) -> dict[str, Any]:
    """Run a program in a process of its own, and wait for its answer."""
    log = folder / f"{program.name.replace('/', '.')}.{mode}.txt"
    begin = time.monotonic()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        os.setsid()
        child(program, mode, log, writes, seconds, gigabytes)
    os.close(writes)
    answer = b""
    with os.fdopen(reads, "rb") as stream:
        while not answer:
            part = stream.read()
            if not part:
                break
            answer += part
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it left behind
    took = round(time.monotonic() - begin, 1)
    if answer:
        return {**json.loads(answer), "seconds": took}
    number = os.waitstatus_to_exitcode(status)
    if number == -signal.SIGALRM:
        return {"status": "timeout", "error": f"not done after {seconds} s", "seconds": took}
    name = signal.Signals(-number).name if number < 0 else f"exit code {number}"
    return {"status": "died", "error": f"the process ended: {name}", "seconds": took}


def _load_engine(real: bool) -> None:
    """Load the simulated GPU, unless the machine's is used (``real``), and keep imports from
    initialising CUDA, since its processes cannot fork.
    """
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load as load_native

    # torch counts devices with NVML then, and not with CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    gpus = parse_spec(GPU)
    if not real:
        load_native(gpus, endless=True)
    import torch
    import torch.utils._triton

    torch.utils._triton.has_triton = lambda: True
    torch.cuda.get_device_capability = lambda device=None: gpus[0].capability


def main(argv: list[str]) -> int:
    folder, seconds, gigabytes = Path(argv[0]), int(argv[1]), int(argv[2])
    warnings.simplefilter("ignore")
    _load_engine(any("cuda" in job.partition("=")[2].split(",") for job in argv[3:]))
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "w") as stream:
        for job in argv[3:]:
            name, _, modes = job.partition("=")
            try:
                program = load(name)
                for module in program.imports:
                    importlib.import_module(module)
                unable = ""
                for module in OURS:
                    importlib.import_module(module)
                gc.collect()
                gc.freeze()  # what is imported is never looked at again, and stays shared
            except Exception as error:  # noqa: BLE001 - a library that is not there or is broken
                unable = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
            for mode in modes.split(","):
                if unable:
                    found = {"status": "unavailable", "error": unable}
                else:
                    found = forked(program, mode, folder, seconds, gigabytes)
                stream.write(json.dumps({"name": name, "mode": mode, **found}) + "\n")
                stream.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
