"""Small files that describe far more than they hold: what reading them takes follows their bytes.

Each is read by a command in a process of its own, whose memory and processor time are limited. A
limit is several times what the command takes, and a fraction of what it took when it read
everything that the file describes.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hostile_chunks import chunk, table_of
from hostile_mutations import RECORDED
from hostile_seed import LINES, STREAM, dumped, plain
from hostile_snapshots import STRUCTURES

from gpuprobe.model.io.files import open_regular, read_regular, stored_bytes

ADDRESSES = 1536 << 20
"""Bytes of addresses of each process: an interpreter with its libraries takes 300 MB."""

PROCESSOR = 40
"""Processor seconds of a command and what it starts. The slowest case takes 5: a file that is read
until the limit of the process that reads it."""


def _recording(table: str, rows: Callable[[], list[Any]], folder: Path) -> Path:
    target = folder / "x.gpuprobe"
    target.mkdir()
    chunk(table_of(table, rows()), target)
    return target


def _snapshot(name: str, folder: Path, size: int = 0) -> Path:
    target = folder / "x.pickle"
    target.write_bytes(pickle.dumps(STRUCTURES[name](), 4))
    if size:
        os.truncate(target, size)
    return target


def _names(count: int, length: int, folder: Path) -> Path:
    """Frames with long names that are much alike, each in a stack and two events of its own."""

    def change(header: Any, columns: Any, tables: Any) -> None:
        names = [f"/p/{n}{'x' * length}.py" for n in range(count)]
        tables["frames"] = [["", 0, ""], *([name, n, "f"] for n, name in enumerate(names))]
        tables["stacks"] = [[], *([n] for n in range(1, count + 1))]
        header["rows"] = {"events": 2 * count, "baseline": 0}
        columns.clear()
        columns["events", "address"] = array("Q", range(512, 1024 * count + 512, 512))
        columns["events", "size"] = array("Q", [512]) * (2 * count)
        columns["events", "stack"] = array("I", [*range(1, count + 1)] * 2)

    target = folder / "x.gpuprobe"
    target.mkdir()
    chunk(change, target)
    return target


def _links(names: list[str], folder: Path) -> Path:
    """A recording whose stream of 10 MB has so many names more."""
    target = folder / "x.gpuprobe"
    target.mkdir()
    plain(target)
    stream = folder / "stream"
    stream.write_bytes(
        dumped([*LINES[:-1], *([{"type": "later", "x": "y" * 1000}] * 10_000), LINES[-1]])
    )
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        os.link(stream, target / name)
    return target


def _log(links: int, readings: int, folder: Path) -> Path:
    """One large reading, and changes of a few bytes."""
    target = folder / "log.jsonl"
    head, first, *_ = (RECORDED / "readings.jsonl").read_text().splitlines()
    moment = json.loads(first)["moment"]
    moment["links"] = moment["links"][:1] * links
    change = '{"changes":{"+":{"links":{"+":{"0":{}}}}}}'
    target.write_text("\n".join([head, json.dumps({"moment": moment}), *[change] * readings, ""]))
    return target


class Case(NamedTuple):
    make: Callable[[Path], Path]
    command: tuple[str, ...]  # before the file, and its options after "-"
    message: str = ""  # of the error; "" where the file can be read


HTML = ("report", "-", "--html", "o.html")
_LINE = b'{"type":"later","x":"' + b"y" * 1_000_000 + b'"}'

CASES = {
    "a snapshot of 2 KB and 1 TB of holes": Case(
        partial(_snapshot, "stacks that are lists of lists", size=1 << 40),
        ("report",),
        "exceeded its limits",
    ),
    "a recording of 13 million frames": Case(
        partial(_recording, "frames", lambda: [["", 0, ""]] * 13_000_000), HTML
    ),
    "a recording of 15 million stacks": Case(
        partial(_recording, "stacks", lambda: [[]] * 15_000_000), HTML
    ),
    "a recording of 12,000 names of 9,000 characters": Case(partial(_names, 12_000, 9_000), HTML),
    "a stream with the names of 1,000 ranks": Case(
        partial(_links, [f"rank-{n:05d}.jsonl" for n in range(1, 1001)]),
        ("report",),
        "is a link to the stream of another rank",
    ),
    "a stream with the names of 1,000 children": Case(
        partial(_links, [f"child-00000-{n}.gpuprobe/{STREAM}" for n in range(1, 1001)]),
        ("report",),
    ),
    "a snapshot that shares a list of 2 million frames": Case(
        partial(_snapshot, "a list of 2 million frames in 50 events"), HTML
    ),
    "a snapshot with a long list in 20,000 events": Case(
        partial(_snapshot, "a list of a million references in 20,000 events"), HTML
    ),
    "a snapshot with a long list on 128 devices": Case(
        partial(_snapshot, "a list of 400,000 references on 128 devices"),
        HTML,
        "repeats the same stack so often",
    ),
    "a log of 2,000 changes of a large reading": Case(
        partial(_log, 40_000, 2000), ("top", "--once", "--replay")
    ),
}


_ULIMIT = f"ulimit -v {ADDRESSES >> 10} && ulimit -t {PROCESSOR}"
LIMITED = ("sh", "-c", f'{_ULIMIT} && exec "$0" "$@"')


@pytest.mark.parametrize("name", CASES)
def test_reading_takes_what_the_bytes_are_worth(name: str, tmp_path: Path) -> None:
    make, command, message = CASES[name]
    target = str(make(tmp_path))
    argv = [target if word == "-" else word for word in command]
    argv += [] if "-" in command else [target]
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*LIMITED, sys.executable, "-m", "gpuprobe", *argv],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    talk = (tmp_path / "stderr").read_text()
    errors = [line for line in talk.splitlines() if line.startswith("gpuprobe: error:")]
    assert process.returncode == (4 if message else 0), talk
    assert len(errors) == bool(message)
    assert message in "".join(errors)
    # That the limit ended the process that reads a snapshot is an error like others.
    assert used.ru_utime + used.ru_stime < PROCESSOR / 2


def test_the_bytes_that_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100_000)
    with open_regular(path) as file:
        assert stored_bytes(file.fileno()) == 100_000
    os.truncate(path, 1 << 40)
    with open_regular(path) as file:
        assert 100_000 <= stored_bytes(file.fileno()) < 1 << 20
        assert file.read(3) == b"xxx"
    with path.open("r+b") as file:
        file.seek(1 << 30)
        file.write(b"y" * 50_000)
    with open_regular(path) as file:
        assert 150_000 <= stored_bytes(file.fileno()) < 1 << 20
    os.truncate(path, 0)
    with open_regular(path) as file:
        assert stored_bytes(file.fileno()) == 0


def test_a_file_of_holes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 5000)
    os.truncate(path, 10 << 20)
    assert len(read_regular(path, most=1 << 30)) == 10 << 20
    os.truncate(path, 256 << 20)
    with pytest.raises(OSError, match=r"it has 268435456 bytes, of which \d{4} are stored"):
        read_regular(path, most=1 << 30)
