"""``%%gpuprobe``: a notebook's cell recorded, estimated, or watched for hazards.

::

    %load_ext gpuprobe

    %%gpuprobe record --level trace
    train()
"""

from __future__ import annotations

import argparse
import atexit
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

from gpuprobe.code_origin import name_of
from gpuprobe.errors import UsageError

__all__ = ["load_ipython_extension"]

DEFAULT_GPU: Final = "h100-80gb"


def load_ipython_extension(shell: Any) -> None:
    """Register ``%%gpuprobe``. IPython calls it for ``%load_ext gpuprobe``."""

    def gpuprobe(line: str, cell: str) -> Any:
        return run_cell(shell, line, cell)

    gpuprobe.__doc__ = _parser().format_help()
    shell.register_magic_function(gpuprobe, magic_kind="cell", magic_name="gpuprobe")


def run_cell(shell: Any, line: str, cell: str) -> Any:
    """Run a cell as ``line`` asks, and return the `Recording`, `Estimate` or `Hazards`.

    On a GPU that exists the cell's names stay defined. On a virtual one it runs in a copy of the
    namespace: its tensors are gone afterwards, as the GPU is. Raises UsageError for a bad ``line``,
    and what the cell raises.
    """
    asked = _parser().parse_args(shlex.split(line))
    return _ACTIONS[asked.action](_Cell(shell, cell), asked)


class _Cell:
    """A cell's code, compiled as IPython compiles it: under a name that it knows the number of,
    and with the lines that the cell has on screen, where the first one is the magic's.
    """

    def __init__(self, shell: Any, text: str) -> None:
        self._shell = shell
        source = "\n" + shell.transform_cell(text)
        name = shell.compile.cache(source, _number_of_cell(shell), raw_code=source)
        self._code = compile(source, name, "exec", dont_inherit=True)

    def __call__(self, *, apart: bool = False, **names: Any) -> None:
        """Run it; ``apart`` in a copy of the namespace. ``names`` are defined in it."""
        namespace = self._shell.user_ns
        if apart:
            namespace = dict(namespace)
        namespace.update(names)
        exec(self._code, namespace)


def _number_of_cell(shell: Any) -> int:
    """The number of the cell that runs. ``execution_count`` is that or, since IPython 9, the next
    one's, so it is what the cell's own frame is named by.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = name_of(frame.f_code.co_filename)
        if name.startswith("In ["):
            return int(name[4:-1])
        frame = frame.f_back
    return int(shell.execution_count)


def _record(cell: _Cell, asked: argparse.Namespace) -> Any:
    from gpuprobe.api.recordings import load, scratch_recording
    from gpuprobe.api.virtual import virtual_gpu
    from gpuprobe.api.watch import record

    with ExitStack() as stack:
        if asked.output is None:  # read when it is looked at, so it has to last
            scratch = ExitStack()
            output = scratch.enter_context(scratch_recording())
            atexit.register(scratch.close)
        else:
            output = Path(asked.output)
        if asked.gpu is not None:
            stack.enter_context(virtual_gpu(asked.gpu, engine=asked.engine))
        recorder = record(output, level=asked.level, force=asked.force)
        with recorder as rec:
            cell(apart=asked.gpu is not None, rec=rec)
    return load(output)


def _estimate(cell: _Cell, asked: argparse.Namespace) -> Any:
    from gpuprobe.api.virtual import estimate

    def step() -> None:
        cell(apart=True)

    return estimate(step, asked.gpu or DEFAULT_GPU, steps=1, engine=asked.engine)


def _hazards(cell: _Cell, asked: argparse.Namespace) -> Any:
    import torch

    from gpuprobe.api.hazards import detect_hazards

    apart = asked.gpu is not None or not torch.cuda.is_available()
    with detect_hazards(asked.gpu) as found:
        cell(apart=apart)
    return found


_ACTIONS: dict[str, Callable[[_Cell, argparse.Namespace], Any]] = {
    "record": _record,
    "estimate": _estimate,
    "hazards": _hazards,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%gpuprobe: {message}", hint=self.format_usage().strip())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "%%gpuprobe",
        description="Record a cell, estimate the memory it would take, or find its stream races.",
        add_help=False,
    )
    parser.add_argument("action", nargs="?", choices=tuple(_ACTIONS), default="record")
    parser.add_argument("--gpu", help=f"a virtual GPU to run on (estimate: {DEFAULT_GPU})")
    parser.add_argument(
        "--engine",
        choices=("auto", "native", "virtual"),
        default="auto",
        help="with --gpu: native: torch's own CUDA code; virtual: a model of that code",
    )
    parser.add_argument("--level", choices=("counters", "trace"), default="trace")
    parser.add_argument("--output", help="where to keep the recording")
    parser.add_argument("--force", action="store_true", help="replace an existing recording")
    return parser
