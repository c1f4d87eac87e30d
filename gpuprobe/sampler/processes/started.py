"""Python programs that a program starts by their command line (`subprocess`, ``os.exec*``,
``os.posix_spawn``), as ``torchrun``, ``accelerate launch`` and DeepSpeed's launcher do: followed
like the processes of `multiprocessing`.

`[python, flags…, script, arguments…]` becomes `[python, flags…, this file, orders, script,
arguments…]`. Run as a program, this file carries out the orders, then runs the script as Python
would: the same ``sys.argv``, ``__main__``, exit code and traceback. If anything fails before the
script runs, the original command replaces the process. Other programs, other interpreters and
commands that are not a script or a module (``-c``, ``-i``) are not changed.
"""

from __future__ import annotations

import base64
import functools
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from types import TracebackType

    from gpuprobe.sampler.program import Program

_FLAGS: Final = frozenset("bBdEOqRsSuvPx")
"""Options of Python that may be written together, and do not affect this file."""
_WITH_VALUE: Final = ("-W", "-X")


def command(args: Any, orders: Callable[[], str], environ: Mapping[str, str]) -> list[str] | None:
    """The command that runs ``args`` with the orders; None if it is not a script or a module of
    this interpreter. ``environ``: that of the new process.
    """
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        return None
    words = [os.fsdecode(word) for word in args]
    at = _program_at(words)
    if not at or not _same_interpreter(words[0], environ):
        return None
    if os.path.abspath(words[at]) == os.path.abspath(__file__):  # noqa: PTH100 - symbolic links stay
        return None  # it has orders already
    return [*words[:at], os.path.abspath(__file__), orders(), *words]  # noqa: PTH100


def _program_at(words: Sequence[str]) -> int:
    """The position of the script or of ``-m``, 0 for other commands."""
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-m":
            return at if at + 1 < len(words) else 0
        if not word.startswith("-"):
            return at
        if word in _WITH_VALUE:
            at += 2
        elif word.startswith(_WITH_VALUE) or (len(word) > 1 and _FLAGS.issuperset(word[1:])):
            at += 1
        else:
            return 0
    return 0


def _same_interpreter(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a command's first word is this interpreter, in the same environment, too: its folder
    decides what it imports.
    """
    path = name if os.sep in name else shutil.which(name, path=environ.get("PATH"))
    if not path or not sys.executable:
        return False
    there, here = os.path.abspath(path), os.path.abspath(sys.executable)  # noqa: PTH100
    if there == here:
        return True
    same_folder = os.path.dirname(there) == os.path.dirname(here)  # noqa: PTH120
    return same_folder and os.path.realpath(there) == os.path.realpath(here)


@contextmanager
def following_started(prepare: Callable[[], object] = lambda: None) -> Iterator[None]:
    """In this context, programs that this process starts are followed. ``prepare`` is called before
    the first one.
    """
    with ExitStack() as stack:
        for restore in _follow(prepare):
            stack.callback(restore)
        yield


def _follow(prepare: Callable[[], object]) -> list[Callable[[], None]]:
    import subprocess

    from gpuprobe.patching import patch

    prepared = False

    def orders() -> str:
        nonlocal prepared
        if not prepared:
            prepared = True
            prepare()
        return _orders()

    def changed(args: Any, environ: Any) -> Any:
        try:
            return command(args, orders, os.environ if environ is None else environ) or args
        except Exception:  # noqa: BLE001 - then the program starts it unchanged
            return args

    restore = []
    init = subprocess.Popen.__init__

    @functools.wraps(init)
    def started(process: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        own_executable = kwargs.get("executable") if len(rest) < 2 else rest[1]
        shell = kwargs.get("shell") if len(rest) < 8 else rest[7]
        environ = kwargs.get("env") if len(rest) < 10 else rest[9]
        if not own_executable and not shell:
            new = changed(args, environ)
            init(process, new, *rest, **kwargs)
            process.args = args  # what errors show, and the program may read
        else:
            init(process, args, *rest, **kwargs)

    restore.append(patch(subprocess.Popen, "__init__", started))
    for name in ("execv", "execve", "posix_spawn", "posix_spawnp"):
        original = getattr(os, name, None)
        if original is not None:
            restore.append(patch(os, name, _replacing(original, changed)))
    return restore


def _replacing(
    original: Callable[..., Any], changed: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(path: Any, argv: Any, *rest: Any, **kwargs: Any) -> Any:
        # The first word of argv is a name: what is run is the path.
        words = [path, *argv[1:]] if argv else argv
        new = changed(words, rest[0] if rest else None)
        return original(path, argv if new is words else [argv[0], *new[1:]], *rest, **kwargs)

    return call


def _orders() -> str:
    """The data that a process that `multiprocessing` spawns would unpickle from gpuprobe, for one
    that it does not spawn: how the process is followed.
    """
    from multiprocessing import spawn

    parts = spawn.get_preparation_data("gpuprobe")
    found = {key: value for key, value in parts.items() if key.startswith("gpuprobe")}
    return base64.b64encode(pickle.dumps(found)).decode()


def main() -> None:
    """Carry out the orders, and run the program: `[this file, orders, python, flags…, script…]`."""
    own, orders, *words = sys.argv
    folder = os.path.abspath(__file__)  # noqa: PTH100
    for _ in range(4):
        folder = os.path.dirname(folder)  # noqa: PTH120 - pathlib is not imported yet
    at = _program_at(words)
    try:
        if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(own)):  # noqa: PTH100, PTH120
            sys.path[0] = ""  # this file's neighbours are not modules of the program
        importable = folder in sys.path
        if not importable:
            sys.path.append(folder)
        program = _prepared(orders, words[at:])
        if not importable:
            sys.path.remove(folder)
    except Exception:  # noqa: BLE001 - it must not reach the program
        _unchanged(words)
    sys.orig_argv[:] = words
    from gpuprobe.sampler.processes.children import ended
    from gpuprobe.sampler.program import own_frames

    try:
        program.run()
    except BaseException as error:
        hook = sys.excepthook

        def shown(
            kind: type[BaseException], raised: BaseException, trace: TracebackType | None
        ) -> None:
            # What Python shows is the traceback of the exception itself.
            hook(kind, raised, raised.with_traceback(own_frames(raised)).__traceback__)

        sys.excepthook = shown
        ended(error)
        raise
    ended(None)


def _prepared(orders: str, words: Sequence[str]) -> Program:
    """Follow this process, and load the program."""
    from gpuprobe.sampler.program import load_module, load_script

    module = words[0] == "-m"
    if module:
        sys.path[0] = os.getcwd()  # noqa: PTH109
    target, *arguments = words[1:] if module else words
    program = (load_module if module else load_script)(target, arguments)
    pickle.loads(base64.b64decode(orders))  # this follows the process: `_Arrival` of `children`
    _follow(lambda: None)
    from gpuprobe.patching import when_imported
    from gpuprobe.sampler.processes.children import begin_as_rank

    when_imported("torch", begin_as_rank)
    return program


def _unchanged(words: Sequence[str]) -> NoReturn:
    """Replace this process by the original command."""
    os.execv(sys.executable, list(words))  # this process does not follow others yet


if __name__ == "__main__":
    main()
