"""Which GPUs run code that was compiled for an architecture."""

from __future__ import annotations

import re
from collections.abc import Iterable


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``arch`` (``sm_90``, ``compute_80``, ``sm_90a``) runs on a GPU of this
    compute capability.

    Source: CUDA C++ Programming Guide, "Application Compatibility": binary code runs on later
    minor versions of its major version; PTX on every later one; ``a`` only on exactly its
    own; ``f`` within its major version.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if match is None:
        return False
    kind, suffix = match.group(1), match.group(4)
    target = (int(match.group(2)), int(match.group(3)))
    if suffix == "a":
        return target == capability
    if kind == "sm" or suffix == "f":
        return target[0] == capability[0] and target[1] <= capability[1]
    return target <= capability


def no_kernels(torch: str, archs: Iterable[str], capability: tuple[int, int]) -> str:
    """That the build of torch whose architectures these are has no kernels for GPUs of that compute
    capability, as for a V100 since CUDA 13; or "".
    """
    if any(runs_on(arch, capability) for arch in archs):
        return ""
    major, minor = capability
    return f"torch {torch} has no kernels for compute capability {major}.{minor}"
