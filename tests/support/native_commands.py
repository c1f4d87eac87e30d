"""Programs and commands on the native engine, with the environment of a user's shell.

They are forked from a process that has the engine and torch (`warm_python`), unless ``cold``: then
a new interpreter loads both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import warm_client
import warm_python

_OF_THE_TESTS = ("LD_PRELOAD", "GPUPROBE_NATIVE", "GPUPROBE_TEST_NATIVE")
"""Settings of a pytest that itself runs on the engine: see `tests/native/test_marked_gpu.py`."""


def own_cache(folder: Path) -> str:
    """``XDG_CACHE_HOME`` for a program whose libraries and compiled code are its own: with the
    runtime, whose compilation takes 6 s of processor time.
    """
    from gpuprobe.native.libraries import carried_core, core

    if not carried_core().exists():
        compiled = core().parent
        native = folder / "gpuprobe" / "native"
        native.mkdir(mode=0o700, parents=True)
        shutil.copytree(compiled, native / compiled.name)
    return str(folder)


def environment(**more: str) -> dict[str, str]:
    """The settings of a user's shell, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_TESTS}
    return {**warm_client.without_engine(kept), **more}


def python(
    *arguments: object,
    cwd: Path,
    cold: bool = False,
    warm: warm_python.WarmPython | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` in ``cwd``, with ``more`` in its environment. ``warm``: forked from
    this process, by default the shared one.
    """
    command = sys.executable if cold else (warm or warm_python.shared()).python
    return subprocess.run(
        [command, *map(str, arguments)],
        cwd=cwd,
        env=environment(**({} if cold else warm_python.NESTED), **more),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def gpuprobe(*arguments: object, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """``gpuprobe ARGUMENTS``, likewise."""
    return python("-m", "gpuprobe", *arguments, cwd=cwd, **more)
