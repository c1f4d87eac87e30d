"""The mutations of `fuzz_inputs`: each input through its reader and one use, in turn."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import hostile_commands as commands
import hostile_mutations
from fuzz_limits import PROCESSOR, RESIDENT, WAIT, largest_mb, processor_limit, used_bytes
from hostile_mutations import numbered

from gpuprobe.errors import GpuprobeError, SnapshotError

USED_ADDRESSES = 1500 << 20
"""Bytes that an input may take beyond what the process has when it begins: more is a MemoryError,
which ends a command with another code. A snapshot's own process has less (`MEMORY_FLOOR`)."""


@dataclass
class Uses:
    """How one kind of input is used: ``always`` with every input, then one of ``turns``, each of
    which returns what is wrong, "" for nothing."""

    turns: list[tuple[str, Callable[[Path], str]]]
    always: Callable[[Path, bytes], str] = lambda path, data: ""


@dataclass
class Done:
    """What the mutations of one kind came to so far."""

    kind: str
    start: int = 0
    inputs: int = 0
    slowest: float = 0.0
    """Seconds of processor time."""
    largest: int = 0
    """MB, of the process."""
    wrong: list[str] = field(default_factory=list)


# -- what is done with an input


def uses_of(kind: str, folder: Path) -> Uses:
    out = str(folder / "o")
    if kind in ("catalogue", "settings", "tests", "details"):
        return _OTHER[kind](folder)
    turns = [_turn(kind, out, at) for at in range(len(commands.COMMANDS[kind]("x", "y")))]
    if kind in ("recording", "snapshot"):
        turns.append(("the screen", _show()))
    if kind == "log":
        turns = [*turns * 19, ("the screen", commands.show_log)]
    return Uses(turns, _only_read if kind == "snapshot" else Uses.always)


def _show() -> Callable[[Path], str]:
    """A few keys for each file, others for the next."""
    keys = cycle(commands.VIEW_KEYS)
    return lambda path: commands.show(path, next(keys))


def _turn(kind: str, out: str, at: int) -> tuple[str, Callable[[Path], str]]:
    def use(target: Path) -> str:
        argv = commands.COMMANDS[kind](str(target), out)[at]
        ended = commands.run(argv)
        return commands.problem(argv, ended) or f"={ended.code}"

    words = commands.COMMANDS[kind]("TARGET", "OUT")[at]
    return " ".join(word for word in words if "/" not in word), use


# Of snapshots: nothing may be imported, opened or started while one is read.
READING = False
ALLOWED = {"array.__new__", "builtins.id", "pickle.find_class"}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # CPython reports a bytearray that it could not fill in this way, and continues.
    if event == "sys.excepthook" and args[1] is SystemError:
        return
    if READING and event not in ALLOWED:
        os.write(2, f"audit: {event} {args!r}\n".encode())
        os._exit(99)


def _only_read(path: Path, data: bytes) -> str:
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


def _one_line(read: Callable[[Path], object]) -> Callable[[Path], str]:
    def use(path: Path) -> str:
        try:
            read(path)
        except GpuprobeError as error:
            return "an error of several lines" if "\n" in str(error) else "=refused"
        return "=read"

    return use


def _details(folder: Path) -> Uses:
    """A snapshot in which only details are odd is read, and its accounts are those of the file
    that it was made of; what was odd has a note."""
    from snapshot_samples import modern, torch_2_0, without_frames

    from gpuprobe.recording.load import load as load_recording
    from gpuprobe.torch_support.snapshots import decode

    def account(trace: Any) -> object:
        columns = trace.events
        return (
            [list(getattr(columns, name)) for name in ("action", "address", "size")],
            [[(b.address, b.size, b.state) for b in s.blocks] for s in trace.segments],
            [list(getattr(trace.baseline, name)) for name in ("address", "size")],
        )

    shapes = [modern(), torch_2_0(), without_frames(), modern()["segments"]]
    known = [account(decode(shape).traces[0]) for shape in shapes]
    assert len(hostile_mutations.SHAPES) == len(shapes)

    def use(path: Path) -> str:
        try:
            (rank,) = load_recording(path).ranks
        except GpuprobeError as error:
            return f"refused for a detail: {error}"
        if account(next(iter(rank.traces))) not in known:
            return "other accounts"
        return "=with a note" if any(s.what[0].isdigit() for s in rank.blind_spots) else "=read"

    report = _turn("snapshot", str(folder / "o"), 2)  # -v: the notes too
    return Uses([("load, the same accounts", use), report])


def _catalogue(folder: Path) -> Uses:
    from gpuprobe.catalogue.file import ENVIRONMENT, load_user_catalogue

    def list_gpus(path: Path) -> str:
        os.environ[ENVIRONMENT] = str(path)
        argv = ["estimate", "--gpu", "list"]
        ended = commands.run(argv)
        return commands.problem(argv, ended) or f"={ended.code}"

    reader = ("the reader", _one_line(load_user_catalogue))
    return Uses([reader, ("estimate --gpu list", list_gpus)])


def _settings(folder: Path) -> Uses:
    from gpuprobe.tui.monitor.settings import load as load_settings

    def read(path: Path) -> str:
        return "several lines" if "\n" in load_settings(path)[1] else ""

    return Uses([("the reader", read)] * 19 + [("top, on the screen", commands.show_settings)])


def _tests(folder: Path) -> Uses:
    """The file of ``pytest --gpuprobe-compare``, without a pytest for each."""
    from gpuprobe.pytest_plugin import summary

    figures = [
        ("test_a.py::test_one", {"group": "", "peak_allocated": 5, "peak_reserved": 7, "left": 0}),
        ("test_a.py::test_two[x]",
         {"group": "g", "peak_allocated": 5 << 30, "peak_reserved": 7 << 30, "left": 0}),
    ]  # fmt: skip

    class Terminal:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def write_line(self, text: str, **_: object) -> None:
            self.lines.append(text)

    def compare(path: Path) -> str:
        terminal = Terminal()
        before = summary.saved(terminal, str(path))
        told = terminal.lines + summary.lines(figures, None, before)
        if any(not line.isprintable() for line in told):
            return f"a control character: {told}"
        return "=refused" if before is None else "=read"

    return Uses([("compare", compare)])


_OTHER: dict[str, Callable[[Path], Uses]] = {
    "catalogue": _catalogue,
    "settings": _settings,
    "tests": _tests,
    "details": _details,
}


# -- all of them


class _Late(BaseException):
    pass


def _late(number: int, frame: Any) -> None:
    raise _Late("".join(traceback.format_stack(frame)[-6:]))


@contextlib.contextmanager
def _workplace() -> Iterator[Path]:
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as text:
        folder = Path(text)
        (folder / "o").mkdir()
        os.chdir(folder)
        yield folder
        os.chdir("/")


def run_mutations(kind: str, seed: int, start: int, inputs: int) -> Done:
    done = Done(kind, start)
    commands.in_process_snapshots()
    make = numbered(kind)
    signal.signal(signal.SIGALRM, _late)
    with _workplace() as folder:
        uses = uses_of(kind, folder)
        _warm_up(kind, make(seed, 0), uses, folder)
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + USED_ADDRESSES,) * 2)
        processor_limit(_late)
        for number in range(start, start + inputs):
            _one(kind, f"{kind} {seed}.{number}", make(seed, number), uses, number, folder, done)
            done.inputs += 1
    return done


def _warm_up(kind: str, files: dict[str, bytes], uses: Uses, folder: Path) -> None:
    """What is imported once is imported before memory is limited, and before nothing may be."""
    for _, use in dict(uses.turns).items():
        target = commands.written(kind, files, folder)
        with contextlib.suppress(Exception):
            use(target)
        _clean(target, folder)
    if kind == "snapshot":
        for data in (b"\x80\x04\x8c\x02\xff\xff.", b"F1e4x\n."):
            _only_read(Path(), data)
        sys.addaudithook(_audit)


def _clean(target: Path, folder: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    with contextlib.suppress(OSError):
        (folder / "o" / "new.json").unlink()


def _one(
    kind: str,
    label: str,
    files: dict[str, bytes],
    uses: Uses,
    number: int,
    folder: Path,
    done: Done,
) -> None:
    target = commands.written(kind, files, folder)
    name, use = uses.turns[number % len(uses.turns)]
    began = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, WAIT)
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR)
    try:
        problem = uses.always(target, files.get("", b"")) or use(target)
    except _Late as hang:
        problem = f"it takes too long: {hang}"
    except Exception as error:  # noqa: BLE001 - the failures that this searches
        problem = "".join(traceback.format_exception(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    most, done.largest = done.largest, max(done.largest, largest_mb())
    if problem in ("", "=" + problem.removeprefix("=")):
        problem = f"{done.largest} MB" if done.largest > max(most, RESIDENT) else ""
    if problem:
        done.wrong.append(f"{label} {name}: {problem[-1500:]}")
        print(f"  {done.wrong[-1][-900:]}", flush=True)
    done.slowest = max(done.slowest, time.process_time() - began)
    _clean(target, folder)
