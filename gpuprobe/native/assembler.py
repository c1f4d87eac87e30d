"""A stand-in for NVIDIA's assembler, ptxas: machine code that nothing executes is not made.

Triton runs ptxas once a kernel, which takes up to half a second and 0.2 GiB of host memory for
large ones. The simulated GPU reads no machine code: what Triton itself derives from a kernel (its
shared memory, its warps) comes from earlier stages. That ptxas would refuse a kernel is not found.

No real GPU must find such kernels in a cache or a package that a program writes. So this is for
servers alone, which keep what they compile in caches of gpuprobe; where a program sets others, the
real ptxas runs. Its version is part of Triton's keys, and has one more line here.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuprobe.model.io.files import atomic_write
from gpuprobe.native.libraries import ensure_own

_NAME: Final = "gpuprobe-ptxas-"
_VARIABLES: Final = {
    "TRITON_PTXAS_PATH": "ptxas",
    "TRITON_PTXAS_BLACKWELL_PATH": "ptxas-blackwell",
}
"""What Triton takes in place of the programs that it contains (``triton/knobs.py``)."""
_SCRIPT: Final = """\
#!/bin/sh
# In place of ptxas, for kernels that are not executed and stay in caches of gpuprobe.
output= previous=
for argument do
    case $previous in -o) output=$argument ;; esac
    previous=$argument
done
if [ -z "$output" ]; then
    {real} "$@" || exit
    [ "$1" != --version ] || echo "gpuprobe: without machine code"
    exit
fi
for cache in {caches}; do
    case $cache in {own}/*) ;; *) exec {real} "$@" ;; esac
done
printf 'no machine code' > "$output"
"""


def assembler_variables(
    folder: Path, caches: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables with which Triton makes no machine code. ``caches``: the variables for folders of
    compiled code, all of them within ``folder``, to which the scripts are written; what is compiled
    while one of them has another value is compiled as without these variables. ``environment`` may
    name the real programs; otherwise they are those of the Triton in `sys.path`. Empty without one.
    """
    found = {}
    for variable, program in _VARIABLES.items():
        real = environment.get(variable) or _own(program)
        if real is not None and not Path(real).name.startswith(_NAME):
            found[variable] = str(_write(folder, caches, real))
    return found


def _own(program: str) -> str | None:
    spec = importlib.machinery.PathFinder.find_spec("triton", sys.path)
    for folder in (spec and spec.submodule_search_locations) or ():
        real = Path(folder, "backends", "nvidia", "bin", program)
        if real.exists():
            return str(real)
    return None


def _write(folder: Path, caches: Mapping[str, str], real: str) -> Path:
    text = _SCRIPT.format(
        real=shlex.quote(real),
        caches=" ".join(f'"${name}"' for name in sorted(caches)),
        own=shlex.quote(str(folder)),
    )
    target = folder / f"{_NAME}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not target.exists():
        with atomic_write(target) as stream:
            stream.write(text.encode())
            os.fchmod(stream.fileno(), 0o700)
    ensure_own(target)
    return target
