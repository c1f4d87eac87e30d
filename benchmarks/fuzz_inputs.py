"""Hostile files through every command: crafted ones, and as many mutations as wanted.

    python benchmarks/fuzz_inputs.py crafted [--kinds recording,snapshot] [--only WORDS] [--screens]
    python benchmarks/fuzz_inputs.py mutations [--kinds …] [--inputs 100000] [--seed 0] [--start 0]

``crafted``: each file of ``tests/hostile`` through all commands and formats, and with ``--screens``
through ``gpuprobe view`` in Textual's test driver. A case is a process of its own, with 10 seconds
of processor time for each command, 4 GiB of addresses, and 2 GB of resident memory; a command that
is asleep after three times a minute hangs.

``mutations``: input number N goes through command number N of its kind, in turn, in this process:
the same commands, without starting an interpreter for each. Of snapshots each is first read with an
audit hook that ends the process if anything is imported, opened or started meanwhile. An alarm ends
an input after a minute; memory is limited as above.

Both: no traceback, no internal error, no control character, JSON that is JSON, an exit code that
the command has, and one line where that is 4. Prints a row for each kind, and what was wrong;
the exit code is 1 where anything was.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in (".", "tests/support", "tests/hostile")]

import hostile_commands as commands  # noqa: E402
from hostile_mutations import KINDS, numbered  # noqa: E402

from gpuprobe.errors import GpuprobeError, SnapshotError  # noqa: E402

ADDRESSES = 4 << 30
RESIDENT = 2000  # MB
PROCESSOR = 10.0  # seconds for each command
WAIT = 60.0  # seconds without an answer
PATIENCE = 3  # so often asleep after that: it hangs

Job = tuple[str, Callable[[], str]]


def crafted(kind: str) -> dict[str, Callable[[Path], None]]:
    if kind == "recording":
        from hostile_recordings import CRAFTED

        return CRAFTED
    from hostile_snapshots import CRAFTED as SNAPSHOTS

    return SNAPSHOTS


def jobs_of(kind: str, target: Path, out: Path, screens: bool) -> list[Job]:
    def job(argv: list[str]) -> Callable[[], str]:
        return lambda: commands.problem(argv, commands.run(argv))

    given = commands.COMMANDS[kind](str(target), str(out))
    found = [(" ".join(word for word in argv if "/" not in word), job(argv)) for argv in given]
    if screens:
        found.append(("view, on the screen", lambda: commands.show(target)))
    return found


def answers(jobs: list[Job], first: int) -> Iterator[tuple[int, float, int, str]]:
    """Run the jobs from ``first`` in a forked process: (job, processor seconds, MB, problem)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in range(first, len(jobs)):
            before = sum(os.times()[:4])
            try:
                problem = jobs[number][1]()
            except BaseException as error:  # noqa: BLE001 - it is what is looked for
                problem = "".join(traceback.format_exception(error))
            most = max(resource.getrusage(w).ru_maxrss for w in
                       (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) >> 10  # fmt: skip
            answer = [number, sum(os.times()[:4]) - before, most, problem[-1500:]]
            os.write(writing, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    at, rest = first, b""
    with open(reading, "rb", buffering=0) as stream:  # noqa: PTH123 (a descriptor)
        waited, begun = 0, 0.0  # minutes, and processor seconds before this job
        while True:
            if not select.select([stream], [], [], WAIT)[0]:
                # On a busy machine a minute may be a moment of its own: what hangs is asleep.
                runs, spent = _state(child)
                waited += not runs
                if waited < PATIENCE and spent - begun < 2 * PROCESSOR:
                    continue
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                yield at, spent - begun, 0, "it hangs, or takes too long"
                return
            data = stream.read(1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                number, seconds, most, problem = json.loads(line)
                at = number + 1
                waited, begun = 0, _state(child)[1]
                yield number, seconds, most, problem
    status = os.waitpid(child, 0)[1]
    if status:
        yield at, 0.0, 0, f"the process ended with {os.waitstatus_to_exitcode(status)}"


def _state(process: int) -> tuple[bool, float]:
    """Whether a process would run if it could, and its processor seconds so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "R", sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_crafted(kind: str, only: str, screens: bool) -> int:
    """Prints what is wrong and a row of figures; returns how often something was."""
    wrong = runs = cases = 0
    slowest, largest = (0.0, ""), (0, "")
    for name, make in crafted(kind).items():
        if only not in name:
            continue
        cases += 1
        if cases % 20 == 0:
            print(f"  {kind}: {cases} cases, {runs} runs, {wrong} wrong", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "x.gpuprobe" if kind == "recording" else "x.pickle")
            if kind == "recording":
                target.mkdir()
            make(target)
            out = Path(folder, "o")
            out.mkdir()
            jobs = jobs_of(kind, target, out, screens)
            at = 0
            while at < len(jobs):
                for number, seconds, most, found in answers(jobs, at):
                    at = number + 1
                    runs += 1
                    label = f"{name} | {jobs[number][0] if number < len(jobs) else ''}"
                    slowest, largest = max(slowest, (seconds, label)), max(largest, (most, label))
                    problem = found
                    if not problem and seconds > PROCESSOR:
                        problem = f"{seconds:.1f} s of processor time"
                    if not problem and most > RESIDENT:
                        problem = f"{most} MB"
                    if problem:
                        wrong += 1
                        print(f"  {label}: {problem.strip()[-600:]}", flush=True)
                if at == 0:
                    break
    print(f"{kind:<14} {cases:>4} crafted, {runs:>6} runs, {wrong} wrong", flush=True)
    print(f"  the slowest: {slowest[0]:.1f} s of processor time, {slowest[1]}")
    print(f"  the largest: {largest[0]} MB, {largest[1]}", flush=True)
    return wrong


# -- mutations

READING = False
ALLOWED = {"array.__new__", "builtins.id", "pickle.find_class"}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # CPython reports a bytearray that it could not fill in this way, and goes on.
    if event == "sys.excepthook" and args[1] is SystemError:
        return
    if READING and event not in ALLOWED:
        os.write(2, f"audit: {event} {args!r}\n".encode())
        os._exit(99)


def _only_read(data: bytes) -> str:
    """Decode a snapshot, which may raise one SnapshotError and do nothing else."""
    global READING
    from gpuprobe.recording.snapshot.worker import decode_stream

    READING = True
    try:
        decode_stream(io.BufferedReader(io.BytesIO(data)), len(data))
    except SnapshotError as error:
        READING = False
        return "an error of several lines" if "\n" in str(error) or not str(error) else ""
    finally:
        READING = False
    return ""


def _catalogue(path: Path) -> str:
    from gpuprobe.virtual.catalogue.file import load_user_catalogue

    try:
        load_user_catalogue(path)
    except GpuprobeError as error:
        return "an error of several lines" if "\n" in str(error) else ""
    return ""


def _settings(path: Path) -> str:
    from gpuprobe.tui.monitor.settings import load

    return "several lines" if "\n" in load(path)[1] else ""


def _known(path: Path) -> str:
    from gpuprobe.gate.files import read_known

    try:
        read_known(path)
    except GpuprobeError as error:
        return "an error of several lines" if "\n" in str(error) else ""
    return ""


READERS = {"catalogue": _catalogue, "settings": _settings, "known": _known}


def run_mutations(kind: str, inputs: int, seed: int, start: int) -> int:
    """Prints what is wrong and a row of figures; returns how often something was."""
    make = numbered(kind)
    commands.in_process_snapshots()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)
    if kind == "snapshot":
        for data in (b"\x80\x04\x8c\x02\xff\xff.", b"F1e4x\n."):
            _only_read(data)  # what an error message needs is loaded before nothing may be
        sys.addaudithook(_audit)

    class Late(BaseException):
        pass

    def late(number: int, frame: Any) -> None:
        raise Late("".join(traceback.format_stack(frame)[-6:]))

    signal.signal(signal.SIGALRM, late)
    codes: Counter[int] = Counter()
    wrong = 0
    began = time.process_time()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        (Path(folder) / "o").mkdir()
        os.chdir(folder)
        for number in range(start, start + inputs):
            files = make(seed, number)
            target = commands.written(kind, files, Path(folder))
            argv: list[str] = []
            signal.setitimer(signal.ITIMER_REAL, WAIT)
            try:
                problem = _only_read(files[""]) if kind == "snapshot" else ""
                if kind in READERS:
                    problem = READERS[kind](target)
                else:
                    each = commands.COMMANDS[kind](str(target), f"{folder}/o")
                    argv = each[number % len(each)]
                    ended = commands.run(argv)
                    codes[ended.code] += 1
                    problem = problem or commands.problem(argv, ended)
                    if number % 1000 == 0 and kind in ("recording", "log"):
                        show = commands.show if kind == "recording" else commands.show_log
                        problem = problem or show(target)
            except Late as hang:
                problem = f"it hangs: {hang}"
            except Exception as error:  # noqa: BLE001 - it is what is looked for
                problem = "".join(traceback.format_exception(error))
            signal.setitimer(signal.ITIMER_REAL, 0)
            if problem:
                wrong += 1
                print(f"  {kind} {seed}.{number} {' '.join(argv)}: {problem[-700:]}", flush=True)
            if (number + 1) % 10_000 == 0:
                print(f"  {kind}: {number + 1 - start} read, {wrong} wrong", flush=True)
            if target.is_dir():
                shutil.rmtree(target)
            with contextlib.suppress(OSError):
                Path(folder, "o", "new.json").unlink()
    spent = time.process_time() - began
    print(
        f"{kind:<14} {inputs:>7} mutations from {start}, {wrong} wrong, {spent:5.0f} s; "
        f"exit codes {dict(sorted(codes.items()))}",
        flush=True,
    )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("crafted", "mutations"))
    parser.add_argument("--kinds", default="")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--screens", action="store_true")
    args = parser.parse_args()
    default = KINDS if args.what == "mutations" else ("recording", "snapshot")
    wrong = 0
    for kind in args.kinds.split(",") if args.kinds else default:
        if args.what == "crafted":
            wrong += run_crafted(kind, args.only, args.screens)
            continue
        child = os.fork()  # limits and audit hooks are for good
        if child == 0:
            os._exit(min(1, run_mutations(kind, args.inputs, args.seed, args.start)))
        wrong += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
