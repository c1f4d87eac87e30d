"""The version of torch that is installed, and the one that is simulated."""

from __future__ import annotations

import re
from typing import Final

import torch

from gpuprobe.errors import UsageError

OLDEST: Final = (2, 6)
"""The oldest version whose CUDA kernels are known."""


def installed() -> tuple[int, int]:
    """The (major, minor) of the torch that this process has imported."""
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)


def simulated(text: str) -> tuple[int, int]:
    """The (major, minor) of a version such as ``2.6`` or ``2.6.0``; of the installed one for "".

    Raises UsageError for text that is not a version, and for one that is newer than the installed
    torch, whose code the program runs, or too old to be known.
    """
    newest = installed()
    if not text:
        return newest
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\d{1,3})?", text)
    if found is None:
        raise UsageError(f"not a version of torch: {text!r:.60}", hint="such as 2.6")
    version = int(found[1]), int(found[2])
    if not OLDEST <= version <= newest:
        raise UsageError(
            f"torch {text} cannot be simulated: versions {OLDEST[0]}.{OLDEST[1]} to "
            f"{newest[0]}.{newest[1]}, the installed one, can",
            hint="to estimate for a newer version, install it; the build for CPUs is enough",
        )
    return version
