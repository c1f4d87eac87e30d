"""Python imports this at its start in every process that inherits gpuprobe's environment: programs
that a recorded program starts by any means, and those that have the native engine.

Nothing else is imported before the process imports torch.
"""

import os
import sys


def _begin() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes ms
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != folder]  # noqa: PTH100
    _run_other()
    if "compile_worker" in " ".join(sys.orig_argv[1:3]):
        return  # torch's compiler, which runs no kernel
    above = os.path.dirname(os.path.dirname(folder))  # noqa: PTH120
    try:
        import gpuprobe  # noqa: F401
    except ImportError:
        sys.path.append(above)  # of another environment
    from gpuprobe.patching import when_imported

    when_imported("torch", _torch_imported)


def _run_other() -> None:
    """Run the ``sitecustomize`` that this one hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _torch_imported() -> None:
    from gpuprobe.api.inherited import follow_torch

    follow_torch()


try:
    _begin()
except Exception:
    if "GPUPROBE_DEBUG" in os.environ:
        raise
