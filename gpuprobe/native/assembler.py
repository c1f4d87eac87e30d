"""A stand-in for NVIDIA's assembler, ptxas: machine code that nothing executes is not made.

Triton runs ptxas once a kernel, which takes up to half a second and 0.2 GiB of host memory for
large ones. The native engine reads no machine code: what Triton itself derives from a kernel (its
shared memory, its warps) comes from earlier stages. That ptxas would refuse a kernel is not found.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_NAME: Final = "gpuprobe-ptxas-"
_VARIABLES: Final = {
    "TRITON_PTXAS_PATH": "ptxas",
    "TRITON_PTXAS_BLACKWELL_PATH": "ptxas-blackwell",
}
"""What Triton takes in place of its own programs (``triton/knobs.py``)."""
_SCRIPT: Final = """\
#!/bin/sh
# In place of ptxas, for kernels that are not executed. Its version, which Triton asks for, is real.
output= previous=
for argument do
    case $previous in -o) output=$argument ;; esac
    previous=$argument
done
[ -n "$output" ] || exec {real} "$@"
printf 'no machine code' > "$output"
"""


def assembler_variables(
    folder: Path, environment: Mapping[str, str], path: Sequence[str] = ()
) -> dict[str, str]:
    """Variables with which Triton makes no machine code, for the programs of its own, or those
    that ``environment`` names. The scripts are written to ``folder``. ``path``: where Triton is
    searched for before `sys.path`. Empty without Triton.
    """
    found = {}
    for variable, program in _VARIABLES.items():
        real = environment.get(variable) or _own(program, [*path, *sys.path])
        if real is not None and not Path(real).name.startswith(_NAME):
            found[variable] = str(_write(folder, real))
    return found


def _own(program: str, path: Sequence[str]) -> str | None:
    spec = importlib.machinery.PathFinder.find_spec("triton", path)
    for folder in (spec and spec.submodule_search_locations) or ():
        real = Path(folder, "backends", "nvidia", "bin", program)
        if real.exists():
            return str(real)
    return None


def _write(folder: Path, real: str) -> Path:
    text = _SCRIPT.format(real=shlex.quote(real))
    target = folder / f"{_NAME}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not target.exists():
        descriptor, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o755)
        Path(name).replace(target)  # another process may do the same
    return target
