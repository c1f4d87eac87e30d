"""Python imports this at its start in every process that inherits gpuprobe's environment: programs
that a recorded program starts by any means, and those that have the simulated GPU.

Nothing else is imported before the process imports torch. An error here is one line on stderr: the
program runs, without a recording or without its simulated GPU's values.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing takes ms
if TYPE_CHECKING:
    from collections.abc import Callable


def _hide() -> None:
    """Remove this file's folder from the path: a program finds its own ``sitecustomize``."""
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes ms
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != folder]  # noqa: PTH100


def _begin() -> None:
    if "compile_worker" in " ".join(sys.orig_argv[1:3]):
        return  # torch's compiler, which runs no kernel
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    above = os.path.dirname(os.path.dirname(folder))  # noqa: PTH120
    try:
        import gpuprobe  # noqa: F401
    except ImportError:
        sys.path.append(above)  # of another environment
    from gpuprobe.patching import when_imported

    when_imported("torch", lambda: _or_one_line(_torch_imported), _torch_begins)


def _run_other() -> None:
    """Run the ``sitecustomize`` that this one hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _torch_begins() -> Callable[[], None]:
    if "GPUPROBE_NATIVE" in os.environ:  # a simulated GPU
        _or_one_line(_defer_compiler)
    return lambda: None


def _defer_compiler() -> None:
    from gpuprobe.torch_support.eager import defer_compiler

    defer_compiler()


def _torch_imported() -> None:
    from gpuprobe.api.inherited import follow_torch

    follow_torch()


def _or_one_line(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - it is printed
        _print(error)
        if os.environ.get("GPUPROBE_DEBUG", "") not in ("", "0"):
            import traceback

            traceback.print_exc()


def _print(error: Exception) -> None:
    """Print one line. It cannot import gpuprobe, whose import may be what failed."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the type is printed
        text = "an error without text"
    line = f"gpuprobe: error: this process is not followed: {type(error).__name__}: {text}"
    try:
        sys.stderr.write(ascii(line)[1:-1][:1000] + "\n")
    except (OSError, ValueError, AttributeError):
        return  # the process has no stderr


try:
    _hide()
    _run_other()  # its errors are reported by Python, as without gpuprobe
finally:
    _or_one_line(_begin)
