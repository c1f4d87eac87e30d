"""The simulated GPU of marked tests, loaded before torch: before any conftest is imported."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

_MOST_FILES: Final = 5_000
"""Files that are searched for the name of the mark: 0.1 s."""
_STARTED_AGAIN: Final = "GPUPROBE_PYTEST_STARTED_AGAIN"


class RequestedGpu(NamedTuple):
    """The simulated GPU to measure on. ``option``: by an option, "" for none; ``name``: that, or
    the one for machines without CUDA.
    """

    option: str
    name: str


def requested_gpu(config: pytest.Config) -> RequestedGpu:
    """The GPU by the options and the project's settings. Raises ConfigError for an unknown one."""
    from gpuprobe.api.simulated_gpu import check_gpu
    from gpuprobe.gate.project import read_project

    option: str = config.known_args_namespace.gpuprobe_gpu
    name = option or read_project(config.rootpath).gpu or "h100-80gb"
    check_gpu(name)  # before anything runs
    return RequestedGpu(option, name)


def load(config: pytest.Config, mark: str) -> None:
    """Load the simulated GPU, hidden between tests, if one is requested, or if this machine has
    none and a file of the tests contains the name ``mark``. Where a plugin has imported torch
    already, pytest starts again.

    If that is not possible, the tests that need the GPU report why.
    """
    again = os.environ.pop(_STARTED_AGAIN, "")
    option: str = config.known_args_namespace.gpuprobe_gpu
    if not again and not option and not _mentioned(config, mark):
        return
    from gpuprobe.api.simulated_gpu import has_gpu, load_for_parts
    from gpuprobe.errors import GpuprobeError, TooLate

    if not again and not option and has_gpu():
        return
    try:
        gpu = requested_gpu(config).name
        load_for_parts(gpu, json.loads(again) if again else None)
    except TooLate:
        if not again and _is_a_command(config):
            _start_again(config, gpu)
    except GpuprobeError:
        return  # raised again for the tests that need it


def _mentioned(config: pytest.Config, mark: str) -> bool:
    """Whether a Python file below pytest's arguments, or a conftest above them, contains ``mark``,
    among the first `_MOST_FILES`.
    """
    name = mark.encode()
    for count, path in enumerate(_files(config)):
        if count == _MOST_FILES:
            return False
        try:
            if name in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def _files(config: pytest.Config) -> Iterator[Path]:
    known = config.known_args_namespace
    given = [argument.partition("::")[0] for argument in known.file_or_dir]
    here = config.invocation_params.dir
    for start in given or config.getini("testpaths") or ["."]:
        path = Path(here, start)
        for above in path.parents:
            conftest = above / "conftest.py"
            if conftest.is_file():
                yield conftest
            if above == config.rootpath:
                break
        if path.is_file():
            yield path
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if _is_searched(folder, name))
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _is_searched(folder: str, name: str) -> bool:
    hidden = name.startswith((".", "__pycache__", "node_modules"))
    return not hidden and not Path(folder, name, "pyvenv.cfg").exists()


def _is_a_command(config: pytest.Config) -> bool:
    """Whether this process is pytest's alone, and no worker of pytest-xdist."""
    own = Path(sys.argv[0]).name in ("pytest", "py.test", "__main__.py")
    return own and not hasattr(config, "workerinput")


def _start_again(config: pytest.Config, gpu: str) -> None:
    """Replace this process by the same command, with the GPU from its start."""
    from gpuprobe.api.simulated_gpu import start_again_with

    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()  # the descriptors that it has replaced
    start_again_with(gpu, _STARTED_AGAIN)
