"""Signals, limits and the folder that a process has."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from os import mkdir as _mkdir  # another part replaces them
from os import unlink as _unlink
from types import FrameType

from parts import PLACES, Run, ending, part


@part()
def handles_a_signal(run: Run) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        run.note("signal", number)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
        os.kill(os.getpid(), number)


@part()
def notes_what_handles_signals(run: Run) -> None:
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    run.note({number: getattr(one, "__name__", one) for number, one in handlers.items() if one})
    run.note(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getitimer(signal.ITIMER_REAL))


@part()
def masks_signals(run: Run) -> None:
    signal.signal(signal.SIGUSR2, lambda number, frame: run.note("unmasked", number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGINT})
    if run.device == "cuda":  # any of autograd's threads, which do not block it, could get it
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    else:
        os.kill(os.getpid(), signal.SIGUSR2)
    run.note("pending", signal.sigpending())
    run.later.append(lambda: run.note(signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})))


@part()
def sets_an_alarm(run: Run) -> None:
    rung = threading.Event()

    def ring(number: int, frame: FrameType | None) -> None:
        rung.set()

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    while not rung.is_set():
        time.sleep(0.001)
    run.note("rung", signal.getitimer(signal.ITIMER_REAL))


@part()
def leaves_an_alarm_that_nothing_handles(run: Run) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(1)


@part()
def catches_an_interrupt(run: Run) -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    except KeyboardInterrupt as error:
        run.note("interrupted", error.args)


@part()
def handles_interrupts(run: Run) -> None:
    signal.signal(signal.SIGINT, lambda number, frame: run.note("interrupt"))
    os.kill(os.getpid(), signal.SIGINT)


@part()
def ignores_interrupts(run: Run) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGINT)


@part()
def follows_its_children(run: Run) -> None:
    signal.signal(signal.SIGCHLD, lambda number, frame: run.note("child ended"))
    run.note(subprocess.run(["/bin/true"]).returncode)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@part()
def has_a_wakeup_descriptor(run: Run) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    run.note(signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    run.note("woken", os.read(reading, 10))
    run.note(signal.set_wakeup_fd(-1) == writing)


@part()
def prints_stacks_on_a_signal(run: Run) -> None:
    with open(os.devnull, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        os.kill(os.getpid(), signal.SIGUSR1)
        run.note(faulthandler.unregister(signal.SIGUSR1))


@part()
def lets_a_broken_pipe_end_it(run: Run) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


@part()
def lets_large_files_end_it(run: Run) -> None:
    """Its own are smaller than the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _limit(resource.RLIMIT_FSIZE, 5000)  # stderr has gpuprobe's lines, too


@part()
def limits_its_files(run: Run) -> None:
    _limit(resource.RLIMIT_FSIZE, run.choose.choice((0, 2000, 20_000)))
    try:
        with open(run.folder / "limited", "wb", buffering=0) as file:
            run.note("wrote", file.write(bytes(1000)))
            run.note("wrote", file.write(bytes(100_000)), file.write(b"more"))
    except OSError as error:
        run.note("limit", error.errno)


@part()
def limits_its_descriptors(run: Run) -> None:
    _limit(resource.RLIMIT_NOFILE, run.choose.choice((16, 40)))
    opened = []
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        run.note("most", len(opened), opened[-1:], error.errno)
    for number in opened:
        os.close(number)


@part()
def leaves_no_descriptor_free(run: Run) -> None:
    _limit(resource.RLIMIT_NOFILE, 24)
    with contextlib.suppress(OSError):
        while True:
            run.kept.append(os.dup(0))

    def free() -> None:
        for number in filter(lambda one: isinstance(one, int), run.kept):
            os.close(number)
        run.kept[:] = [one for one in run.kept if not isinstance(one, int)]
        run.note("free again")

    run.later.append(free)


@part("model", "step", "end")
def limits_its_memory(run: Run) -> None:
    pages = int(open("/proc/self/statm").read().split()[0])
    _limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + 2**30)
    try:
        run.kept.append(bytearray(2**33))
    except MemoryError as error:
        run.note("memory", error)
    _limit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1])


@part()
def limits_its_core(run: Run) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    os.nice(1)
    run.note(os.nice(0), resource.getrlimit(resource.RLIMIT_CORE))


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


# -- folders


@part()
def changes_the_folder(run: Run) -> None:
    other = run.folder / "elsewhere"
    other.mkdir(exist_ok=True)
    os.chdir(other)
    with open("relative.txt", "w") as file:
        file.write("relative\n")


@part()
def is_in_a_deleted_folder(run: Run) -> None:
    gone = run.folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        os.getcwd()
    except OSError as error:
        run.note("cwd", error.errno)


@part()
def has_a_mask_of_everything(run: Run) -> None:
    run.note(oct(os.umask(0o777)))
    (run.folder / "masked").write_text("masked\n")
    (run.folder / "masked-folder").mkdir()


@part()
def has_no_mask(run: Run) -> None:
    run.note(oct(os.umask(0)))
    (run.folder / "open").write_text("open\n")
    run.later.append(lambda: (run.folder / "open too").touch())


@part()
def deletes_its_recording(run: Run) -> None:
    shutil.rmtree(os.environ["FAULTS_RECORDING"], ignore_errors=True)


@part()
def replaces_its_recording_by_a_file(run: Run) -> None:
    path = os.environ["FAULTS_RECORDING"]
    shutil.rmtree(path, ignore_errors=True)
    if os.path.isdir(path):  # another part has replaced what removes it
        return
    with open(path, "w") as file:
        file.write("the program's\n")


@part()
def replaces_the_files_of_its_recording(run: Run) -> None:
    for folder, _, names in os.walk(os.environ["FAULTS_RECORDING"]):
        for name in names:
            _unlink(os.path.join(folder, name))
            _mkdir(os.path.join(folder, name))


@part()
def deletes_the_temporary_folder(run: Run) -> None:
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@part(*PLACES[1:])
def clears_the_environment(run: Run) -> None:
    """Not before the first use of a GPU: the environment has a simulated one's settings."""
    os.environ.clear()
    run.note(dict(os.environ))


@part()
def cleans_up_as_shells_do(run: Run) -> None:
    """``rm -rf *`` in its own folder, in which the recording usually is."""
    for name in sorted(os.listdir(run.folder)):
        if name != "notes":
            path = run.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# -- the end, by a signal


@ending()
def is_ended_by_sigterm(run: Run) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


@ending()
def is_ended_by_its_own_handler(run: Run) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)


@ending()
def is_killed(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@ending()
def is_interrupted(run: Run) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


@ending()
def aborts(run: Run) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    os.abort()


@ending()
def crashes_with_a_fault_handler(run: Run) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    with open(os.devnull, "w") as file:
        faulthandler.enable(file)
        os.kill(os.getpid(), signal.SIGSEGV)


@ending()
def is_ended_by_an_alarm(run: Run) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(2)


@ending()
def is_ended_by_a_large_file(run: Run) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _limit(resource.RLIMIT_FSIZE, 3000)
    with open(run.folder / "too large", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1000))
