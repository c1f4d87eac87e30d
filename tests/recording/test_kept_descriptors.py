"""Descriptors that are kept while a program runs: its files get neither our numbers nor bytes."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from test_writer import ENVIRONMENT, session

from gpuprobe.model.io.descriptors import KeptDescriptor, LostDescriptor, without_size_signal
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.recording.reader import read_recording
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.sampler.sources import HostMemory


@pytest.fixture
def own(tmp_path: Path) -> Iterator[int]:
    """A file of the program."""
    descriptor = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def test_the_program_has_the_numbers_that_it_would_have(tmp_path: Path) -> None:
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    kept = KeptDescriptor(opened(tmp_path / "file"))
    writer = RecordingWriter.create(tmp_path / "run.gpuprobe")
    host = HostMemory()
    host.rss()
    again = os.open(os.devnull, os.O_RDONLY)
    os.close(again)
    assert again == lowest
    assert fcntl.fcntl(kept.number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for closes in (kept, writer, host):
        closes.close()


def test_its_number_is_above_the_soft_limit_of_open_files(tmp_path: Path) -> None:
    program = """
import os, resource, sys
from gpuprobe.model.io.descriptors import KeptDescriptor
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), hard))
kept = KeptDescriptor(os.open(os.devnull, os.O_WRONLY))
os.closerange(3, int(sys.argv[1]))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (int(sys.argv[1]), hard)
print(kept.number >= int(sys.argv[1]), kept.number < hard)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "100"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True True\n"


def test_it_works_with_few_open_files(tmp_path: Path) -> None:
    program = """
import os, resource
from gpuprobe.model.io.descriptors import KeptDescriptor
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
kept = [KeptDescriptor(os.open(os.devnull, os.O_WRONLY)) for _ in range(3)]
print(sorted(one.number for one in kept)[0] > 2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lost_one_is_neither_used_nor_closed(tmp_path: Path, own: int, replaced: bool) -> None:
    kept = KeptDescriptor(opened(tmp_path / "file"))
    number = kept.number
    if replaced:
        os.dup2(own, number)
    else:
        os.close(number)
    with pytest.raises(LostDescriptor):
        kept.number  # noqa: B018
    kept.close()
    kept.close()
    if replaced:
        os.fstat(number)  # the program's
        os.close(number)


def test_only_the_same_file_replaces_a_lost_one(tmp_path: Path) -> None:
    kept = KeptDescriptor(opened(tmp_path / "file"))
    os.close(kept.number)
    assert not kept.replace(opened(tmp_path / "other"))
    assert kept.replace(opened(tmp_path / "file"))
    os.write(kept.number, b"text")
    kept.close()
    assert (tmp_path / "file").read_bytes() == b"text"


def test_a_forked_process_has_none(tmp_path: Path) -> None:
    kept = KeptDescriptor(opened(tmp_path / "file"))
    number = kept.number
    child = os.fork()
    if child == 0:
        try:
            os.fstat(number)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    kept.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_the_stream_is_opened_again(tmp_path: Path, own: int, replaced: bool) -> None:
    path = tmp_path / "run.gpuprobe"
    writer = RecordingWriter.create(path)
    writer.session(session(), ENVIRONMENT)
    spots = [BlindSpot(str(number), "") for number in range(4)]
    writer.blind_spot(spots[0])
    for spot in spots[1:]:
        number = writer._descriptor.number
        if replaced:
            os.dup2(own, number)
        else:
            os.close(number)
        writer.blind_spot(spot)
    writer.close()
    if replaced:
        os.fstat(number)
        os.close(number)
    assert os.fstat(own).st_size == 0
    found = [spot.what for spot in read_recording(path).ranks[0].blind_spots]
    assert [what for what in found if what.isdigit()] == list("0123")
    assert sum("opened again" in what for what in found) == 1


def test_nothing_is_lost_where_a_thread_closes_it_before_each_write(tmp_path: Path) -> None:
    """Between the check and the write, as ``os.closerange`` of another thread does."""
    path = tmp_path / "run.gpuprobe"
    writer = RecordingWriter.create(path)
    writer.session(session(), ENVIRONMENT)
    doomed: list[int] = []

    def close(frame: FrameType, event: str, _: object) -> None:
        if doomed and frame.f_code is RecordingWriter._put.__code__:
            os.close(doomed.pop())

    for index in range(3):
        doomed.append(writer._descriptor.number)
        sys.setprofile(close)
        try:
            writer.blind_spot(BlindSpot(str(index), ""))
        finally:
            sys.setprofile(None)
        assert not doomed
    writer.close()
    (rank,) = read_recording(path).ranks
    assert [spot.what for spot in rank.blind_spots if spot.what.isdigit()] == list("012")
    assert rank.gap is None


def test_a_stream_that_was_replaced_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.gpuprobe"
    writer = RecordingWriter.create(path)
    os.close(writer._descriptor.number)
    stream = path / "rank-00000.jsonl"
    stream.unlink()
    stream.write_bytes(b"of the program")
    with pytest.raises(LostDescriptor):
        writer.blind_spot(BlindSpot("", ""))
    writer.close()
    assert stream.read_bytes() == b"of the program"


def test_host_memory_is_read_again(own: int) -> None:
    host = HostMemory()
    assert host._statm is not None
    os.dup2(own, host._statm.number)
    assert isinstance(host.rss(), int)
    assert os.fstat(own).st_size == 0
    host.close()


SIGNALS = """
import os, resource, signal, sys
from pathlib import Path
from gpuprobe.model.io.descriptors import without_size_signal
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.recording.writer import RecordingWriter
received = []
{handler}
writer = RecordingWriter.create(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    for _ in range(10):
        writer.blind_spot(BlindSpot("what", "consequence"))
except OSError as error:
    print(error.errno)
assert not received, received
{after}
"""


@pytest.mark.parametrize(
    ("handler", "after"),
    [
        ("signal.signal(signal.SIGXFSZ, signal.SIG_DFL)", ""),
        ("signal.signal(signal.SIGXFSZ, lambda *given: received.append(given))", ""),
        (
            "signal.signal(signal.SIGXFSZ, lambda *given: received.append(given))",
            "os.kill(os.getpid(), signal.SIGXFSZ); assert len(received) == 1",
        ),
        (
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXFSZ]); "
            "signal.raise_signal(signal.SIGXFSZ)",
            "assert signal.sigpending() == {signal.SIGXFSZ}",
        ),
    ],
    ids=["default", "handled", "its own later", "its own pending"],
)
def test_the_limit_of_file_sizes_sends_no_signal(tmp_path: Path, handler: str, after: str) -> None:
    program = SIGNALS.format(handler=handler, after=after)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run.gpuprobe")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "27\n", "")


def test_without_a_limit_nothing_is_blocked() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    import signal

    with without_size_signal():
        assert signal.SIGXFSZ not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
