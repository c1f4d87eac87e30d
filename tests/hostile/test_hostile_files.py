"""Files that come from elsewhere: whatever there is in place of one, nothing hangs or crashes.

`hostile_recordings` and `hostile_snapshots` were made to do harm; here each goes through one of the
commands, in turn. ``benchmarks/fuzz_inputs.py`` sends each through all of them, in processes of
their own, and as many mutations as wanted.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hostile_commands as commands
import pytest
from hostile_mutations import KINDS, RECORDED, numbered
from hostile_recordings import CRAFTED, GROUPS, INSTEAD
from hostile_seed import CHUNK, EXTRA, STREAM, plain

from gpuprobe.errors import ConfigError, DataError, NotARecording
from gpuprobe.gate.files import read_baseline
from gpuprobe.gate.project import read_project
from gpuprobe.model.io.files import open_regular, read_regular
from gpuprobe.recording.load import load
from gpuprobe.recording.monitor_log import ReplayedLog


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """What waits for ever is ended: a minute is a thousand times what any of these takes."""

    def late(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Two gigabytes more than there are now, so that swelling is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Those that are large are left to the benchmark: a hundred megabytes of JSON take a second to make.
_LARGE = (
    "100 MB", "65 MB", "50 MB", "30 MB", "10 MB", "400 MB", "1 GB", "million", "500,000", "300,000",
    "200,000", "100,000", "50,000", "20,000 ", "3,000 ranks", "3,000 stacks", "2,000 of",
)  # fmt: skip
SMALL = [name for name in CRAFTED if not any(part in name for part in _LARGE)]


@pytest.mark.parametrize("name", SMALL)
def test_a_crafted_recording(name: str, tmp_path: Path, limited_memory: None) -> None:
    folder = tmp_path / "x.gpuprobe"
    folder.mkdir()
    CRAFTED[name](folder)
    (tmp_path / "o").mkdir()
    each = commands.of_recording(str(folder), str(tmp_path / "o"))
    argv = each[SMALL.index(name) % len(each)]
    assert commands.problem(argv, commands.run(argv)) == ""


def test_there_are_two_hundred() -> None:
    assert len(CRAFTED) >= 200
    assert len(GROUPS) >= 10
    assert len(SMALL) >= 150


NO_FILES = [what for what in INSTEAD if "file" not in what and "nothing" not in what]


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.parametrize("name", [STREAM, EXTRA])
def test_what_is_no_file_of_the_folder_is_not_read_as_a_stream(
    what: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "x.gpuprobe"
    folder.mkdir()
    plain(folder)
    (folder / name).unlink(missing_ok=True)
    INSTEAD[what](folder / name)
    with pytest.raises(DataError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_of_the_folder_is_not_read_as_a_chunk(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "x.gpuprobe"
    folder.mkdir()
    plain(folder)
    (folder / CHUNK).unlink()
    INSTEAD[what](folder / CHUNK)
    (rank,) = load(folder).ranks
    with pytest.raises(DataError, match=r"trace chunk cannot be read: "):
        list(rank.traces)


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    """And so is one to the folder: only what leads out of it is not."""
    folder = tmp_path / "x.gpuprobe"
    folder.mkdir()
    plain(folder)
    (folder / CHUNK).rename(folder / "kept")
    (folder / CHUNK).symlink_to("kept")
    (tmp_path / "link").symlink_to(folder)
    (rank,) = load(tmp_path / "link").ranks
    assert len(list(rank.traces)) == 3


READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "baseline": (read_baseline, DataError),
    "log": (ReplayedLog, Exception),
    "snapshot": (load, DataError),
    "configuration": (lambda path: read_project(path.parent), ConfigError),
}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("what", ["pipe", "device", "socket", "sparse"])
def test_other_files(kind: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / ("pyproject.toml" if kind == "configuration" else "x.pickle")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    read, error = READERS[kind]
    if kind == "configuration" and what != "sparse":
        assert read(path).path is None  # type: ignore[attr-defined]  # no such file: none is set
        return
    with pytest.raises(error) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_opening_refuses_before_it_can_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe, not a file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a folder, not a file"):
        open_regular(tmp_path)
    with pytest.raises(OSError, match="it is a device, not a file"):
        open_regular("/dev/zero")


def test_reading_is_bounded_before_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_regular(path, most=5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes"):
        read_regular(path, most=4)
    # Files of procfs claim to have no bytes at all.
    assert stat.S_ISREG(Path("/proc/self/status").stat().st_mode)
    with pytest.raises(OSError, match="no such file has more than 10"):
        read_regular("/proc/self/status", most=10)


# -- mutations; benchmarks/fuzz_inputs.py has a hundred thousand of each


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in commands.COMMANDS])
def test_mutations(
    kind: str, tmp_path: Path, limited_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")  # snapshots are read in this process
    monkeypatch.chdir(tmp_path)
    make = numbered(kind)
    (tmp_path / "o").mkdir()
    for number in range(60):
        target = commands.written(kind, make(1, number), tmp_path)
        each = commands.COMMANDS[kind](str(target), str(tmp_path / "o"))
        argv = each[number % len(each)]
        assert commands.problem(argv, commands.run(argv)) == "", f"{kind} {number}: {argv}"
        if target.is_dir():
            shutil.rmtree(target)


def test_the_harness_sees_what_is_wrong() -> None:
    """A check that cannot fail checks nothing."""
    report, ended = ["report", "x", "--json"], commands.Ended
    assert commands.problem(report, ended(0, "{}", "")) == ""
    assert commands.problem(report, ended(0, "{", "")) != ""
    assert commands.problem(report, ended(0, '{"a": NaN}', "")) != ""
    assert commands.problem(report, ended(4, "", "gpuprobe: error: no\n")) == ""
    assert commands.problem(report, ended(4, "", "")) != ""
    assert commands.problem(report, ended(4, "", "gpuprobe: error: a\ngpuprobe: error: b\n")) != ""
    assert commands.problem(report, ended(70, "", "gpuprobe: error: x")) != ""
    assert commands.problem(["report", "x"], ended(0, "a\x1b[2J", "")) != ""
    assert commands.problem(["diff", "x", "y"], ended(1, "", "Traceback (most recent")) != ""


# -- a fault of gpuprobe's own

_FAULTY = """
import sys
import gpuprobe.recording.summary
def summarize(*args, **values):
    secret = "a value that nobody meant to show"
    raise {error}
gpuprobe.recording.summary.summarize = summarize
from gpuprobe.cli import main
sys.exit(main(["report", {path!r}]))
"""


def _with_a_fault(error: str, **environ: str) -> subprocess.CompletedProcess[str]:
    code = _FAULTY.format(error=error, path=str(RECORDED / "virtual.gpuprobe"))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        check=False,
    )


def test_an_unexpected_exception_is_one_line() -> None:
    ended = _with_a_fault("OverflowError('int too\\nlarge\\x1b[2J')", GPUPROBE_DEBUG="")
    assert ended.returncode == 70
    error, hint = ended.stderr.splitlines()
    assert error.startswith("gpuprobe: error: internal error: OverflowError: int too large\\x1b[2J")
    assert "(<string>:" in error
    assert "/issues" in hint
    assert "GPUPROBE_DEBUG=1" in hint
    assert ended.stdout == ""


def test_the_traceback_is_behind_a_variable() -> None:
    ended = _with_a_fault("OverflowError('x')", GPUPROBE_DEBUG="1")
    assert ended.returncode == 70
    assert "Traceback (most recent call last)" in ended.stderr
    assert ended.stderr.splitlines()[-2].startswith("gpuprobe: error: internal error: Overflow")


def test_too_little_memory_is_no_bug() -> None:
    ended = _with_a_fault("MemoryError()", GPUPROBE_DEBUG="")
    assert ended.returncode == 3
    assert ended.stderr == "gpuprobe: error: not enough memory on this machine\n"


def test_a_newer_recording_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x.gpuprobe"
    folder.mkdir()
    (folder / "rank-00000.jsonl").write_bytes(b'{"no": "header"}\n')
    with pytest.raises(NotARecording):
        load(folder)


def test_a_setting_of_five_thousand_digits_is_cut_in_the_message(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.gpuprobe.tolerance]\npeak_allocated = "' + "9" * 5000 + '%"\n'
    )
    with pytest.raises(ConfigError, match="expected an amount such as 2%") as caught:
        read_project(tmp_path)
    assert len(str(caught.value)) < 300
