"""The build of torch with CUDA that simulated GPUs run: its status, installing and removing it."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.model.outcomes import CudaTorchStatus


def status() -> CudaTorchStatus:
    """The torch that a simulated GPU would run here. Compiles the runtime if necessary."""
    from gpuprobe.native.install import installed, release_here
    from gpuprobe.native.libraries import libraries_for, torch_build

    try:
        build = torch_build()
        where = "this environment's"
        if build is None or not build.cuda:
            build = installed(release_here())
            where = "installed by gpuprobe cuda-torch install"
        if build is None:
            return CudaTorchStatus(
                False,
                f"torch {release_here()} is a build without CUDA: gpuprobe cuda-torch install",
            )
        libraries_for(build)
    except EnvironmentUnavailable as error:
        return CudaTorchStatus(False, f"{error}" + (f" ({error.hint})" if error.hint else ""))
    return CudaTorchStatus(True, f"ready: torch {build.version} ({where})")


def install(options: Sequence[str] = ()) -> str:
    """Install the build with CUDA of this environment's torch. Returns its version; raises
    UsageError if the environment's own has CUDA, EnvironmentUnavailable if pip fails.
    """
    from gpuprobe.native.install import install as install_build

    return install_build(options).version


def remove() -> bool:
    """Delete the build that `install` installed. False if there was none."""
    from gpuprobe.native.install import remove as remove_build

    return remove_build()
