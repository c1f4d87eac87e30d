"""Processes that a program starts, becomes, or leaves behind."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from parts import PLACES, Run, ending, part

LATER = PLACES[1:]


def _waited(run: Run, child: int, name: str) -> None:
    run.note(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@part()
def forks_a_child_that_writes(run: Run) -> None:
    child = os.fork()
    if not child:
        (run.folder / "child.txt").write_text("of the child\n")
        print("child prints", flush=True)
        os._exit(3)
    _waited(run, child, "child")


@part()
def forks_a_child_that_exits(run: Run) -> None:
    child = os.fork()
    if not child:
        run.later.clear()
        print("child exits")
        sys.exit(4)
    _waited(run, child, "exits")


@part()
def forks_a_child_that_raises(run: Run) -> None:
    child = os.fork()
    if not child:
        raise LookupError("in a child")
    _waited(run, child, "raises in a child")


@part()
def forks_a_child_with_handlers_at_exit(run: Run) -> None:
    child = os.fork()
    if not child:
        atexit.register((run.folder / "child's end").touch)
        thread = threading.Thread(target=_writes_later, args=(run.folder / "child's thread",))
        thread.start()
        sys.exit()
    _waited(run, child, "handlers")


def _writes_later(path: Path) -> None:
    """Not while the program runs: whether it ends before or after a time is decided by chance."""
    threading.main_thread().join()
    path.write_text("later\n")


@part("model", "backward", "step", "end")
def forks_a_child_that_computes(run: Run) -> None:
    import torch

    child = os.fork()
    if not child:
        (run.folder / "computed.txt").write_text(f"{(torch.ones(8) * 3).sum().item()}\n")
        os._exit(0)
    _waited(run, child, "computes")


@part()
def forks_in_a_thread(run: Run) -> None:
    def work() -> None:
        child = os.fork()
        if not child:
            os._exit(6)
        _waited(run, child, "of a thread")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@part()
def becomes_a_daemon_twice_forked(run: Run) -> None:
    child = os.fork()
    if child:
        _waited(run, child, "daemon")
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0)
    os.closerange(0, 1024)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    number = os.open(run.folder / "daemon.txt", os.O_CREAT | os.O_WRONLY, 0o666)
    time.sleep(0.02)
    os.write(number, b"%d\n" % number)
    os._exit(0)


@part()
def serves_from_forks(run: Run) -> None:
    """A fork server: children that fork."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        codes = []
        for code in (1, 2):
            grandchild = os.fork()
            if not grandchild:
                os.write(writing, b"%d" % code)
                os._exit(code)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        os._exit(sum(codes))
    os.close(writing)
    _waited(run, child, "server")
    run.note(os.read(reading, 10))
    os.close(reading)


def _of_a_process(path: str, code: int) -> None:
    Path(path).write_text("of a process\n")
    sys.exit(code)


def _starts(run: Run, method: str) -> None:
    """Without the program's module: a spawned process imports this one alone."""
    context = multiprocessing.get_context(method)
    path = run.folder / f"by {method}.txt"
    process = context.Process(target=_of_a_process, args=(str(path), 5))  # type: ignore[attr-defined]
    process.start()
    process.join()
    run.note(method, process.exitcode)


@part()
def starts_processes_by_fork(run: Run) -> None:
    _starts(run, "fork")


@part(teardown=True)
def starts_processes_by_spawn(run: Run) -> None:
    _starts(run, "spawn")


@part(teardown=True)
def starts_processes_by_a_fork_server(run: Run) -> None:
    _starts(run, "forkserver")


@part()
def has_a_pool(run: Run) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        run.note("pool", pool.map(abs, [-1, -2, -3]))


@part()
def runs_commands(run: Run) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", "echo out; echo err >&2; exit 7"], capture_output=True, text=True
    )
    run.note(done.returncode, repr(done.stdout), repr(done.stderr))
    with os.popen("echo piped") as piped:
        run.note(os.system("exit 9"), repr(piped.read()))
    run.note(os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)[1])


@part()
def runs_an_interpreter(run: Run) -> None:
    code = "import os, sys; print(sorted(os.listdir('/proc/self/fd'))); sys.exit(8)"
    done = subprocess.run(
        [sys.executable, "-IS", "-c", code], close_fds=False, capture_output=True, text=True
    )
    run.note(done.returncode, done.stdout.strip(), repr(done.stderr))


@part()
def leaves_a_command_behind(run: Run) -> None:
    path = run.folder / "left behind.txt"
    subprocess.Popen(
        ["/bin/sh", "-c", f"sleep 0.05; echo behind > '{path}'"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode = 0  # not waited for, on purpose: no warning


@part()
def reaps_all_children(run: Run) -> None:
    child = os.fork()
    if not child:
        os._exit(2)
    codes = []
    try:
        while True:
            codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    except ChildProcessError:
        run.note("reaped", codes)


@part()
def has_handlers_of_forks(run: Run) -> None:
    os.register_at_fork(
        before=lambda: run.note("before"),
        after_in_parent=lambda: run.note("in the parent"),
    )
    child = os.fork()
    if not child:
        os._exit(0)
    _waited(run, child, "handled")


# -- threads


@part(*LATER)
def leaves_a_thread_that_writes(run: Run) -> None:
    threading.Thread(target=_writes_later, args=(run.folder / "thread.txt",)).start()


@part(*LATER)
def leaves_a_daemon_thread(run: Run) -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


@part(*LATER)
def leaves_threads_at_exit(run: Run) -> None:
    stopping = threading.Event()

    def work() -> None:
        stopping.wait(20)
        with open(run.folder / "stopped.txt", "w") as file:
            file.write("stopped\n")

    threading.Thread(target=work).start()
    threading._register_atexit(stopping.set)  # type: ignore[attr-defined]


@part(*LATER)
def has_a_thread_that_fails(run: Run) -> None:
    def work() -> None:
        raise LookupError("in a thread")

    thread = threading.Thread(target=work, name="failing")
    thread.start()
    thread.join()


@part("start", "model", "step", "end")
def counts_its_threads(run: Run) -> None:
    run.note(threading.active_count(), [thread.name for thread in threading.enumerate()])


# -- another program


@ending()
def becomes_a_shell(run: Run) -> None:
    os.execv("/bin/sh", ["sh", "-c", "echo of a shell; ls /proc/$$/fd >&2; exit 5"])


@ending()
def becomes_an_interpreter(run: Run) -> None:
    code = "import os; print('becomes', len(os.listdir('/proc/self/fd'))); raise SystemExit(6)"
    os.execv(sys.executable, [sys.executable, "-IS", "-c", code])


@ending()
def becomes_a_command_of_its_path(run: Run) -> None:
    os.execvpe("false", ["false"], {"PATH": os.defpath})


@part()
def cannot_become_another(run: Run) -> None:
    try:
        os.execv("/no/such/program", ["program"])
    except OSError as error:
        run.note("exec", error.errno)
