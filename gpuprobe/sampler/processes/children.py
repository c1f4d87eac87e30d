"""Processes that a program starts by any means (`multiprocessing`, pools of processes, `os.fork`,
command lines, launchers such as ``torchrun``), followed from their first use of a GPU to their end.

Forked processes inherit this module. Others read `ORDERS` when they import torch: their environment
has Python import ``gpuprobe/startup/sitecustomize.py``. Those that never use a GPU, such as the
workers of a DataLoader, are not changed: nothing else is imported, hooked or written in them.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpuprobe.clocks import monotonic
from gpuprobe.patching import patch, when_imported
from gpuprobe.torch_support.process_gpus import (
    NATIVE_SETTINGS,
    STARTUP_NAME,
    add_startup,
    when_first_used,
)

if TYPE_CHECKING:
    from multiprocessing.util import Finalize


class FollowedProcess(Protocol):
    """The handler of a followed process."""

    def so_far(self) -> None:
        """Called before the process sends a message or waits for one, when it may be ended from
        outside: so `multiprocessing` ends daemons and the workers of pools. Also before it calls
        ``os._exit``.
        """

    def end(self, error: BaseException | None) -> None:
        """Called at the end of the process, with the exception that ends it."""


class StartInProcess(Protocol):
    """Called in the process, with the time since which it runs (`time.monotonic`). Picklable; never
    raises.
    """

    def __call__(self, since: float) -> FollowedProcess | None: ...


_start: StartInProcess | None = None
_finalizer: Finalize | None = None  # of this process, while it is followed
_registered = False


@contextmanager
def following(start: StartInProcess) -> Iterator[None]:
    """In this context, processes that this one starts, and those that they start, call ``start`` at
    their first use of a GPU.
    """
    with ExitStack() as stack:
        stack.callback(_follow(start))
        yield


def not_followed() -> None:
    """Stop following this process: it is recorded by other means."""
    when_first_used(None)


ORDERS: Final = "GPUPROBE_ORDERS"
"""The environment variable that has followed processes call a `StartInProcess`."""
_IS_RANK: Final = "GPUPROBE_RANK"
"""The environment variable of a process that is recorded as the rank that a launcher made it: what
it starts is no rank."""


def orders(start: StartInProcess) -> str:
    """The value of `ORDERS`."""
    return base64.b64encode(pickle.dumps(start)).decode()


def _follow(start: StartInProcess) -> Callable[[], None]:
    global _start, _registered
    before, _start = _start, start
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_forked)
    names = (ORDERS, "PYTHONPATH", STARTUP_NAME)
    environment = {name: os.environ.get(name) for name in names}
    os.environ[ORDERS] = orders(start)
    add_startup(os.environ)
    undo: list[Callable[[], None]] = []

    def cuda() -> None:
        from gpuprobe.torch_support.process_gpus import follow_cuda

        undo.append(follow_cuda())

    give_up = when_imported("torch", cuda)

    def unfollow() -> None:
        global _start
        _start = before
        if NATIVE_SETTINGS in os.environ:
            environment.pop(STARTUP_NAME)  # its preloaded library needs it
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        give_up()
        for one in undo:
            one()

    return unfollow


def arrive() -> None:
    """Follow this process if the one that started it has ordered that. Called when torch was
    imported."""
    given = os.environ.get(ORDERS)
    if given is None or _start is not None:
        return
    try:
        start = pickle.loads(base64.b64decode(given))
    except Exception:  # noqa: BLE001 - of another version: the program runs unrecorded
        return
    if not callable(start):
        return
    _follow(start)
    _await_use(start, monotonic())
    # Not what `multiprocessing` starts: `python -c CODE`.
    if _IS_RANK not in os.environ and "-c" not in sys.orig_argv[1:2]:
        _begin_as_rank()


def _forked() -> None:
    global _finalizer
    _finalizer = None  # the parent's
    if _start is not None and "torch" in sys.modules:
        _await_use(_start, monotonic())


def _await_use(start: StartInProcess, since: float) -> None:
    when_first_used(lambda: _begin(start, since))


def _begin(start: StartInProcess, since: float) -> None:
    from multiprocessing.util import Finalize

    global _finalizer
    found = None if _finalizer is not None else start(since)
    if found is not None:
        # multiprocessing runs this at the end of a process, also of one that was forked with
        # os.fork. An exception that ends the process is being handled then.
        _finalizer = Finalize(None, _end, args=(found,), exitpriority=100)
        _before_messages(found.so_far)


def _end(followed: FollowedProcess) -> None:
    # Python keeps what has ended the script.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):  # torch.multiprocessing reports errors and exits with 1
        error = error.__context__ if error.code else None
    followed.end(error)


def _begin_as_rank() -> None:
    """Begin now, and not at the first use of a GPU, if a launcher has made this process a rank
    (``RANK``, ``WORLD_SIZE``): ranks on the CPU are recorded, too.
    """
    start = getattr(_start, "as_rank", lambda: None)()
    if start is not None:
        os.environ[_IS_RANK] = "1"
        not_followed()
        _begin(start, monotonic())


def _before_messages(action: Callable[[], None]) -> None:
    """Call ``action`` before this process sends or awaits a message, including items of queues."""
    import multiprocessing.connection  # not before the program runs: it registers an exit function
    import multiprocessing.queues

    places: dict[Any, tuple[str, ...]] = {
        multiprocessing.connection.Connection: ("_send_bytes", "_recv_bytes", "_poll"),
        multiprocessing.queues.Queue: ("put",),  # its items are sent by a thread
    }
    patch(os, "_exit", _after(action, os._exit))
    for owner, names in places.items():
        for name in names:
            patch(owner, name, _after(action, getattr(owner, name)))


def _after(action: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        action()
        return original(*args, **more)

    return call
