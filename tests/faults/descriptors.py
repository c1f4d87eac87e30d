"""Descriptors that are opened, closed, inherited or replaced."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import subprocess
import tempfile
from pathlib import Path

from parts import Run, part


def _opens(run: Run, count: int, name: str) -> None:
    """Files that stay open, and that the program writes to after every step, until its end."""
    files = [open(run.folder / f"{name}-{i}.txt", "w") for i in range(count)]
    run.note(name, [file.fileno() for file in files])
    run.kept += files

    def use() -> None:
        for file in files:
            try:
                file.write(f"{name}\n")
                file.flush()
            except (OSError, ValueError) as error:  # another part has closed it
                run.note(name, type(error).__name__)
                return

    use()
    run.later.append(use)


@part()
def closes_those_it_does_not_know(run: Run) -> None:
    os.closerange(3, 256)
    _opens(run, run.choose.choice((1, 3, 12)), "after-closerange")


@part()
def closes_all_numbers(run: Run) -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _opens(run, 4, "after-all")


@part()
def closes_what_the_system_lists(run: Run) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                continue
    _opens(run, 5, "after-list")


@part()
def closes_one_by_one_and_opens(run: Run) -> None:
    for number in range(3, 1024):
        try:
            os.close(number)
        except OSError:
            continue
    _opens(run, 30, "after-each")


@part()
def opens_many(run: Run) -> None:
    _opens(run, run.choose.choice((2, 40, 300)), "many")


@part()
def opens_all_kinds(run: Run) -> None:
    ours = socket.socketpair()
    reading, writing = os.pipe()
    kinds = [os.memfd_create("ours"), os.eventfd(0) if hasattr(os, "eventfd") else os.dup(0)]
    poll = select.epoll()
    run.note("kinds", [one.fileno() for one in ours], reading, writing, kinds, poll.fileno())
    os.write(writing, b"through")
    run.note(os.read(reading, 100))
    for number in (reading, writing, *kinds):
        os.close(number)
    run.kept += [*ours, poll]


@part()
def replaces_numbers_by_dup2(run: Run) -> None:
    number = os.open(run.folder / "dup2.txt", os.O_CREAT | os.O_RDWR, 0o640)
    for other in range(3, 24):
        os.dup2(number, other)
    for other in range(3, 24):
        os.write(other, b"%d\n" % other)
    run.note("dup2", number, os.fstat(number).st_size)


@part()
def replaces_every_number_up_to_1023(run: Run) -> None:
    number = os.open(run.folder / "dup2-all.txt", os.O_CREAT | os.O_RDWR, 0o600)
    for other in range(3, 1024):
        os.dup2(number, other)
    run.later.append(lambda: run.note("size", os.stat(run.folder / "dup2-all.txt").st_size))


@part()
def replaces_the_standard_ones(run: Run) -> None:
    number = os.open(run.folder / "stderr.txt", os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        kept = os.dup(1), os.dup(2)
    except OSError as error:
        run.note("no standard descriptors", error.errno)
        return
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.write(1, b"to stdout\n")
    os.system("echo from a shell; echo and an error >&2")
    os.dup2(kept[0], 1)
    os.dup2(kept[1], 2)
    run.note("kept", kept, number)


@part()
def reads_what_it_inherited(run: Run) -> None:
    for number in range(3, 12):
        try:
            text = os.read(number, 20) if os.get_inheritable(number) else b"its own"
        except OSError as error:
            run.note("inherited", number, error.errno)
            continue
        run.note("inherited", number, text)
        os.close(number)


@part()
def passes_descriptors_on(run: Run) -> None:
    file = tempfile.TemporaryFile(dir=run.folder)
    os.set_inheritable(file.fileno(), True)
    command = f"ls /proc/self/fd; echo passed >&{file.fileno()}"
    done = subprocess.run(["/bin/sh", "-c", command], close_fds=False, capture_output=True)
    file.seek(0)
    run.note("passed", file.fileno(), done.stdout.split(), done.returncode, file.read())


@part()
def locks_its_files(run: Run) -> None:
    file = open(run.folder / "locked", "w")
    fcntl.lockf(file, fcntl.LOCK_EX)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run.kept.append(file)
    run.note("locked", file.fileno())


@part()
def maps_a_file(run: Run) -> None:
    path = run.folder / "mapped"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    mapped[:5] = b"bytes"
    run.later.append(lambda: mapped.__setitem__(slice(9, 10), b"!"))
    run.kept.append(mapped)


@part()
def waits_by_epoll(run: Run) -> None:
    reading, writing = os.pipe()
    with select.epoll() as poll:
        poll.register(reading, select.EPOLLIN)
        os.write(writing, b"x")
        run.note("epoll", poll.poll(1), poll.fileno())
    os.close(reading)
    os.close(writing)


@part()
def closes_the_files_of_others(run: Run) -> None:
    """As a test does that leaves no open files: everything that garbage collection knows."""
    import gc
    import io

    for thing in gc.get_objects():
        if isinstance(thing, io.FileIO) and not thing.closed and thing.fileno() > 2:
            thing.close()
    Path(run.folder / "collected").write_text("closed\n")
