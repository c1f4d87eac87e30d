"""Watchers that change something, each in one way: ``planted.py WAY PROGRAM ARGUMENTS ...``.

What compares programs must report each of them: otherwise it compares nothing.
"""

from __future__ import annotations

import atexit
import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def nothing() -> None:
    """No change, for comparison."""


def keeps_a_descriptor() -> None:
    os.open(os.devnull, os.O_RDONLY)


def writes_to_its_descriptor() -> None:
    """Whatever that is by the end."""
    number = os.dup2(os.open(os.devnull, os.O_WRONLY), 4)
    atexit.register(os.write, number, b"of a watcher\n")


def passes_a_descriptor_on() -> None:
    os.set_inheritable(os.dup2(os.open(os.devnull, os.O_RDONLY), 50), True)


def prints() -> None:
    print("of a watcher")


def prints_errors() -> None:
    print("of a watcher", file=sys.stderr)


def replaces_a_stream() -> None:
    sys.stdout = open(os.devnull, "w")


def handles_a_signal() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def blocks_a_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def lowers_a_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (30, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def changes_the_mask() -> None:
    os.umask(0o27)


def changes_the_folder() -> None:
    os.chdir("/")


def leaves_a_file() -> None:
    Path("of a watcher").touch()


def leaves_a_temporary_file() -> None:
    (Path(os.environ["TMPDIR"]) / "of a watcher").touch()


def has_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def has_a_child() -> None:
    if not os.fork():
        time.sleep(0.2)
        os._exit(0)


def ends_otherwise() -> None:
    atexit.register(os._exit, 9)


def is_in_the_way_of_recursion() -> None:
    """As any frame below the program's is."""


def keeps_a_history() -> None:
    import torch

    torch.cuda.memory._record_memory_history(max_entries=20)


def draws_a_number() -> None:
    import torch

    seed = torch.manual_seed

    def seeded(*args: int) -> object:
        generator = seed(*args)
        torch.rand(1)
        return generator

    torch.manual_seed = seeded


def hooks_forks() -> None:
    os.register_at_fork(after_in_child=lambda: print("of a watcher", flush=True))


def replaces_exec() -> None:
    def execv(*args: object) -> None:
        os._exit(0)

    os.execv = execv  # type: ignore[assignment]


WAYS: dict[str, tuple[Callable[[], None], str]] = {
    way.__name__: (way, part)
    for way, part in (
        (keeps_a_descriptor, "opens_many@step"),
        (writes_to_its_descriptor, "replaces_numbers_by_dup2@step"),
        (passes_a_descriptor_on, "runs_an_interpreter@step"),
        (prints, "prints@step"),
        (prints_errors, "prints@step"),
        (replaces_a_stream, "prints@step"),
        (handles_a_signal, "notes_what_handles_signals@step"),
        (blocks_a_signal, "handles_a_signal@step"),
        (lowers_a_limit, "opens_many@step"),
        (changes_the_mask, "has_no_mask@step"),
        (changes_the_folder, "forks_a_child_that_writes@step"),
        (leaves_a_file, "prints@step"),
        (leaves_a_temporary_file, "prints@step"),
        (has_a_thread, "counts_its_threads@step"),
        (has_a_child, "reaps_all_children@step"),
        (ends_otherwise, "exits_with_a_number@step"),
        (is_in_the_way_of_recursion, "counts_how_deep_it_may_recurse@step"),
        (keeps_a_history, "reads_a_history_that_it_has_not_started@step"),
        (draws_a_number, "prints@step"),
        (hooks_forks, "forks_a_child_that_exits@step"),
        (replaces_exec, "becomes_a_shell@step"),
    )
}
"""Each way, and a part of a program that can observe it."""


if __name__ == "__main__":
    WAYS.get(sys.argv[1], (nothing, ""))[0]()
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
