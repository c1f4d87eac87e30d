"""``%%gpuprobe``: record a notebook's cell, estimate its memory, or detect its hazards.

::

    %load_ext gpuprobe

    %%gpuprobe record --level trace
    train()
"""

from __future__ import annotations

import argparse
import atexit
import gc
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from gpuprobe.errors import DataError, EnvironmentUnavailable, TooLate, UsageError
from gpuprobe.model.plans.request import DEFAULT_GPU
from gpuprobe.user_frames import name_of

if TYPE_CHECKING:
    from gpuprobe.hazards.findings.results import Hazards
    from gpuprobe.model.plans.estimate import Estimate
    from gpuprobe.model.run.recording import Recording

__all__ = ["load_ipython_extension"]


_gpu = DEFAULT_GPU
"""What cells simulate that name no GPU: the GPU of an earlier cell, as a kernel has one."""


class _Compiler(Protocol):
    """IPython's compiler."""

    def cache(self, transformed_code: str, number: int, raw_code: str) -> str:
        """Register the source of a cell; returns its file name."""


class _Shell(Protocol):
    """The part of IPython's ``InteractiveShell`` that is used."""

    user_ns: dict[str, object]
    compile: _Compiler
    execution_count: int

    def transform_cell(self, raw_cell: str) -> str:
        """The cell as Python: magics and shell commands become calls."""

    def register_magic_function(
        self, func: Callable[[str, str], object], magic_kind: str, magic_name: str
    ) -> None:
        """Register a magic."""


def load_ipython_extension(shell: _Shell) -> None:
    """Register ``%%gpuprobe``, and load a simulated GPU for its cells on a machine without one.
    IPython calls this for ``%load_ext gpuprobe``.
    """
    from gpuprobe.api.simulated_gpu import has_gpu, load_for_parts

    if not has_gpu():
        with suppress(EnvironmentUnavailable, TooLate):  # the first cell with a GPU raises it
            load_for_parts(DEFAULT_GPU)

    def gpuprobe(line: str, cell: str) -> Recording | Estimate | Hazards | None:
        try:
            return run_cell(shell, line, cell)
        except (DataError, UsageError, EnvironmentUnavailable) as error:
            hint = f"\n  hint: {error.hint}" if error.hint else ""
            raise _shown_in_one_line(f"{error}{hint}") from None

    gpuprobe.__doc__ = _parser().format_help()
    shell.register_magic_function(gpuprobe, magic_kind="cell", magic_name="gpuprobe")


def _shown_in_one_line(message: str) -> Exception:
    """IPython's error that it shows without a traceback."""
    from IPython.core.error import UsageError as ShownInOneLine  # loaded: it called this module

    return ShownInOneLine(message)


def run_cell(shell: _Shell, line: str, cell: str) -> Recording | Estimate | Hazards | None:
    """Run a cell with the options of ``line``; with ``--help`` only print them.

    The cell's names stay defined, except those whose values hold tensors of a simulated GPU, which
    end with the cell. Raises UsageError for an invalid ``line``, and what the cell raises.
    """
    options = _parser().parse_args(shlex.split(line))
    if options.help:
        sys.stdout.write(_parser().format_help())
        return None
    return _ACTIONS[options.action](_Cell(shell, cell), options)


class _Cell:
    """A cell's code, compiled as IPython compiles it: under a file name that IPython maps to the
    cell's number, with the line numbers on screen, of which the first belongs to the magic.
    """

    def __init__(self, shell: _Shell, text: str) -> None:
        self._shell = shell
        source = "\n" + shell.transform_cell(text)
        name = shell.compile.cache(source, _number_of_cell(shell), raw_code=source)
        self._code = compile(source, name, "exec", dont_inherit=True)

    def __call__(self, *, simulated: bool = False, **names: object) -> None:
        """Run the cell, with ``names`` defined. ``simulated``: afterwards, names have the values of
        before if their new ones hold tensors of the GPU.
        """
        namespace = self._shell.user_ns
        before = dict(namespace) if simulated else {}  # on a real GPU it would keep old values
        namespace.update(names)
        try:
            exec(self._code, namespace)
        finally:
            if simulated:
                self._drop(namespace, before, set(names))

    def _drop(
        self, namespace: dict[str, object], before: dict[str, object], added: set[str]
    ) -> None:
        missing = object()
        changed = {
            name: value
            for name, value in namespace.items()
            if before.get(name, missing) is not value
        }
        gone = {name for name, value in changed.items() if _holds_gpu(value, namespace)}
        for name in gone | added:
            if name in before:
                namespace[name] = before[name]
            else:
                namespace.pop(name, None)
        shown = sorted(name for name in gone - added if not name.startswith("_"))
        if shown:
            few = ", ".join(shown[:_NAMES_SHOWN]) + (", …" if len(shown) > _NAMES_SHOWN else "")
            sys.stdout.write(f"gpuprobe: not kept, as the simulated GPU has ended: {few}\n")


_NAMES_SHOWN: Final = 8

_MOST_OBJECTS: Final = 200_000


def _holds_gpu(value: object, namespace: dict[str, object]) -> bool:
    """Whether a value refers to something on a GPU: a tensor, a stream, a graph of autograd, which
    may. A value of very many objects counts as one that does.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    known = {id(namespace)}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in known or isinstance(one, (ModuleType, type)):
            continue
        known.add(id(one))
        if len(known) > _MOST_OBJECTS or type(one).__module__.startswith("torch.cuda"):
            return True
        if isinstance(one, torch.Tensor) and (one.is_cuda or one.grad_fn is not None):
            return True
        waiting += gc.get_referents(one)
    return False


def _number_of_cell(shell: _Shell) -> int:
    """The number of the running cell, from the file name of its frame: since IPython 9,
    ``execution_count`` is the next cell's number.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = name_of(frame.f_code.co_filename)
        if name.startswith("In ["):
            return int(name[4:-1])
        frame = frame.f_back
    return shell.execution_count


def _record(cell: _Cell, options: argparse.Namespace) -> Recording:
    from gpuprobe.api.recordings import load
    from gpuprobe.api.watch import record
    from gpuprobe.recording.files import scratch_recording

    with ExitStack() as stack:
        if options.output is None:  # kept to the end of the process: it is read on demand
            scratch = ExitStack()
            output = scratch.enter_context(scratch_recording())
            atexit.register(scratch.close)
        else:
            output = Path(options.output)
        if options.gpu is not None:
            stack.enter_context(_simulated(options.gpu))
        recorder = record(output, level=options.level, force=options.force)
        with _summary_if_out_of_memory(output), recorder as rec:
            cell(simulated=options.gpu is not None, rec=rec)
    return load(output)


@contextmanager
def _summary_if_out_of_memory(output: Path) -> Iterator[None]:
    """Print the recording's summary, with cause and fix, if the cell runs out of GPU memory."""
    from gpuprobe.api.watch import summary

    try:
        yield
    except Exception as error:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(error, torch.OutOfMemoryError):
            sys.stdout.write("".join(f"gpuprobe: {line}\n" for line in summary(output)))
        raise


def _estimate(cell: _Cell, options: argparse.Namespace) -> Estimate:
    from gpuprobe.planning.estimates import estimate_cell

    with _one_gpu(options.gpu or _gpu):
        return estimate_cell(partial(cell, simulated=True), options.gpu or _gpu)


def _hazards(cell: _Cell, options: argparse.Namespace) -> Hazards:
    from gpuprobe.api.hazards import detect_hazards
    from gpuprobe.api.simulated_gpu import has_gpu

    gpu = options.gpu if options.gpu is not None or has_gpu() else _gpu
    with nullcontext() if gpu is None else _simulated(gpu), detect_hazards() as hazards:
        cell(simulated=gpu is not None)
    return hazards


def _simulated(gpu: str) -> AbstractContextManager[object]:
    from gpuprobe.api.simulated_gpu import virtual_gpu

    stack = ExitStack()
    with _one_gpu(gpu):
        stack.enter_context(virtual_gpu(gpu))
    return stack


@contextmanager
def _one_gpu(gpu: str) -> Iterator[None]:
    """Simulate this GPU by default from now on, or raise UsageError with what to do if the kernel
    has another one or imported torch too early.
    """
    global _gpu
    try:
        yield
    except TooLate as error:
        raise UsageError(
            str(error).partition(":")[0],
            hint="restart the kernel, and run %load_ext gpuprobe in its first cell, before a cell "
            "imports torch; one kernel simulates one GPU",
        ) from None
    _gpu = gpu


_ACTIONS: dict[str, Callable[[_Cell, argparse.Namespace], Recording | Estimate | Hazards]] = {
    "record": _record,
    "estimate": _estimate,
    "hazards": _hazards,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%gpuprobe: {message}", hint=" ".join(self.format_usage().split()))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "%%gpuprobe",
        description="Record a cell, estimate the memory it would take, or find its stream races.",
        add_help=False,
    )
    parser.add_argument("action", nargs="?", choices=tuple(_ACTIONS), default="record")
    parser.add_argument("--gpu", help=f"a simulated GPU to run on (estimate: {DEFAULT_GPU})")
    parser.add_argument("--level", choices=("counters", "trace"), default="trace")
    parser.add_argument("--output", help="where to keep the recording")
    parser.add_argument("--force", action="store_true", help="replace an existing recording")
    parser.add_argument("-h", "--help", action="store_true", help="print this, without the cell")
    return parser
