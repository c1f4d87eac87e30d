"""Recorded programs on a disk that fails at a chosen call (`disk_faults.c`).

    python tests/support/disk_faults.py LIBRARY [GPU] < cases > outcomes

A server that has imported torch and the injector forks for each case, a line of JSON, and answers
with its `Outcome`. Each case runs one program of `PROGRAMS` under ``gpuprobe run``; the calls that
write the recording are counted, and those from number ``first`` on, ``count`` of them, fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loaded_modules import import_noted, note_modules

SOURCE = Path(__file__).with_suffix(".c")

ERRORS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EROFS": errno.EROFS,
    "EDQUOT": errno.EDQUOT,
    "short": 0,
}
"""What a call fails with. A short write takes half of the data, and is not an error: nothing may be
lost by it."""

FOR_EVER = 1 << 30
_PID = re.compile(r"child-\d+-\d+")

_TRAINS = """
import os, sys, torch
def train(steps):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.ones(8, 16, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PROGRAMS = {
    "trains": _TRAINS + 'train(6)\nprint("done")\nsys.exit(3)\n',
    "forks": _TRAINS
    + """
child = os.fork()
train(4)
if child:
    print("done", os.waitpid(child, 0)[1])
sys.exit(3)
""",
}
"""Each prints its results and exits with a code of its own."""


@dataclass(frozen=True)
class Case:
    """``under``: ``ranks`` of one recording, of which the last one has the failing disk."""

    program: str = "trains"
    level: str = "counters"
    ranks: int = 1
    error: str = "ENOSPC"
    first: int = 1
    count: int = FOR_EVER


@dataclass
class Outcome:
    """What the program did, and what its recording is. ``calls`` wrote the recording and ``failed``
    of them failed, in the process of the last rank. ``steps``: those in the recording, None if it
    cannot be read; ``passes``: whether a check of it passes.
    """

    codes: list[int] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    talk: str = ""
    calls: int = 0
    failed: int = 0
    steps: list[list[int]] | None = None
    reason: str = ""
    incomplete: list[str] = field(default_factory=list)
    passes: bool = False
    left: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether gpuprobe ended before the program began, since there can be no recording."""
        return self.codes[-1] == 2 and not self.printed[-1]


def compiled(folder: Path) -> Path | None:
    """The injector, compiled into a folder; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "disk_faults.so"
    subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True
    )
    return library


@contextlib.contextmanager
def running(library: Path, gpu: str = "") -> Iterator[Callable[[Case], Outcome]]:
    """A function that runs a case, on the CPU, or on the native engine with a GPU."""
    before = os.environ.get("LD_PRELOAD", "")
    with subprocess.Popen(
        [sys.executable, __file__, str(library), gpu],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LD_PRELOAD": f"{library} {before}".strip()},
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        questions, answers = server.stdin, server.stdout

        def run(case: Case) -> Outcome:
            questions.write(json.dumps(asdict(case)) + "\n")
            questions.flush()
            return Outcome(**json.loads(answers.readline()))

        yield run
        questions.close()


def problems(case: Case, outcome: Outcome, calm: Outcome) -> Iterator[str]:
    """What is wrong with the outcome of a case. ``calm``: the program's without faults."""
    if outcome.refused:
        yield from _of_refusal(case, outcome, calm)
        return
    if (outcome.codes, outcome.printed) != (calm.codes, calm.printed):
        yield f"exit codes {outcome.codes}, stdout {outcome.printed}"
    if "Traceback" in outcome.talk:
        yield f"a traceback: {outcome.talk[-300:]}"
    # A session that cannot be written is written with the first step.
    late = (outcome.steps, outcome.left) == (calm.steps, calm.left)
    lost = outcome.failed and case.error != "short" and not late
    if outcome.passes and lost:
        yield "a check passes"
    if case.error == "short" and not outcome.passes:
        yield f"short writes have lost something: {outcome.incomplete or outcome.reason}"
    if outcome.steps is None:
        if "no session record" not in outcome.reason and "left no records" not in outcome.reason:
            yield f"it cannot be read: {outcome.reason}"
        return
    if any(name.endswith(".tmp") for name in outcome.left):
        yield f"left over: {outcome.left}"
    if case.ranks == 1 and case.count < FOR_EVER and lost and not outcome.incomplete:
        yield "nothing is reported missing"


def _of_refusal(case: Case, outcome: Outcome, calm: Outcome) -> Iterator[str]:
    """`problems` where the last rank was refused. The other ranks of the job do not know that."""
    if outcome.steps and case.ranks == 1:
        yield "refused, and the recording has steps"
    if (outcome.codes[:-1], outcome.printed[:-1]) != (calm.codes[:-1], calm.printed[:-1]):
        yield f"exit codes {outcome.codes}, stdout {outcome.printed}"
    if outcome.passes:
        yield "a check passes"


# -- the server


def _serve(library: str, gpu: str) -> None:
    if gpu:
        from gpuprobe.api.simulated_gpu import load_gpu

        load_gpu(gpu)
    import torch

    injector = ctypes.CDLL(library)
    injector.disk_faults_set.argtypes = (
        ctypes.c_char_p,
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_int,
    )
    injector.disk_faults_calls.restype = injector.disk_faults_failed.restype = ctypes.c_long
    torch.set_num_threads(1)
    torch.nn.Linear(2, 2)
    with _folder() as folder:
        baseline = folder / "baseline.json"
        _outcome(Case(level="trace", first=0, count=0), gpu, injector, baseline, write=True)
        gc.collect()
        gc.freeze()  # the forked processes search for models among objects
        for line in sys.stdin:
            found = _outcome(Case(**json.loads(line)), gpu, injector, baseline)
            print(json.dumps(asdict(found)), flush=True)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder. Forked processes that come to Python's end would remove a
    ``TemporaryDirectory``.
    """
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _outcome(
    case: Case, gpu: str, injector: ctypes.CDLL, baseline: Path, *, write: bool = False
) -> Outcome:
    with _folder() as folder:
        disk = folder / "disk"
        disk.mkdir()
        (folder / "program.py").write_text(PROGRAMS[case.program])
        ranks = [_start(case, gpu, rank, folder, injector) for rank in range(case.ranks)]
        found = Outcome()
        for rank, process in enumerate(ranks):
            found.codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
            found.printed.append((folder / f"out{rank}").read_text())
            found.talk += (folder / f"talk{rank}").read_text()
        with contextlib.suppress(OSError):  # the process did not come to its end
            found.calls, found.failed = map(int, (folder / "counts").read_text().split())
        if write:
            from gpuprobe.api.check import recorded
            from gpuprobe.gate.files import write_baseline

            write_baseline(recorded(disk / "run.gpuprobe"), baseline)
            import_noted(folder / "modules")
        _read(disk / "run.gpuprobe", baseline, found)
        return found


def _start(case: Case, gpu: str, rank: int, folder: Path, injector: ctypes.CDLL) -> int:
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        os.chdir(folder)
        for number, name in ((0, os.devnull), (1, f"out{rank}"), (2, f"talk{rank}")):
            opened = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        if case.ranks > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks),
                MASTER_ADDR="localhost", MASTER_PORT="29500",
            )  # fmt: skip
        if rank == case.ranks - 1:
            injector.disk_faults_set(
                str(folder / "disk").encode(), case.first, case.count, ERRORS[case.error]
            )
        me = os.getpid()
        code = _run(case, gpu)
        sys.stdout.flush()
        if os.getpid() == me and rank == case.ranks - 1:
            counts = injector.disk_faults_calls(), injector.disk_faults_failed()
            (folder / "counts").write_text("{} {}".format(*counts))
            note_modules(folder / "modules")
    finally:
        os._exit(code)


def _run(case: Case, gpu: str) -> int:
    """Run the program as the command does: its exit code."""
    from gpuprobe.cli import main

    out = "disk/run.gpuprobe"
    try:
        simulated = ["--gpu", gpu] if gpu else []
        return main(["run", *simulated, "--level", case.level, "--output", out, "program.py"])
    except SystemExit as ended:  # in a process that the program has forked
        return ended.code if isinstance(ended.code, int) else 0


def _read(path: Path, baseline: Path, found: Outcome) -> None:
    from gpuprobe.api.check import check
    from gpuprobe.api.recordings import load
    from gpuprobe.errors import GpuprobeError

    if path.is_dir():
        names = (str(one.relative_to(path)) for one in path.rglob("*"))
        found.left = sorted(_PID.sub("child", name) for name in names)
    try:
        recording = load(path)
        found.steps = [[step.index for step in rank.steps] for rank in recording.ranks]
        result = check(recording, baseline)
    except GpuprobeError as error:
        found.reason = str(error)
        return
    found.incomplete = list(result.incomplete)
    found.passes = result.ok or not (result.incomplete or result.mismatches or result.regressions)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
