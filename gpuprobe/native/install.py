"""A build of torch with CUDA next to one without: in the cache, of the same version.

Programs on simulated GPUs import it instead; what else they import stays where it is.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from gpuprobe.errors import EnvironmentUnavailable, UsageError
from gpuprobe.native.libraries import TorchBuild, cache_folder, ensure_own, torch_build


def folder_for(release: str) -> Path:
    """Where the build with CUDA of a release of torch (``"2.13.0"``) is kept for this Python."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / f"torch-{release}-{python}"


def installed(release: str) -> TorchBuild | None:
    """The build with CUDA of a release that was installed here; None if there is none. Raises
    EnvironmentUnavailable if others can change it."""
    folder = folder_for(release) / "torch"
    found = torch_build(folder)
    if found is not None:
        ensure_own(folder / "version.py", folder / "__init__.py")
    return found


def release_here() -> str:
    """The release of torch that this environment has, without its build: ``"2.13.0"``.

    Raises EnvironmentUnavailable without torch.
    """
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        raise EnvironmentUnavailable("torch is not installed", hint="pip install torch") from None


def install(options: Sequence[str] = ()) -> TorchBuild:
    """Install the build with CUDA of the release that this environment has: about 0.5 GB to
    download, 1.5 GB on disk. NVIDIA's packages are not needed. ``options`` are pip's, such as
    ``--index-url``. What pip prints goes to stderr.

    Raises UsageError where the environment's torch has CUDA, EnvironmentUnavailable where pip
    fails.
    """
    here = torch_build()
    if here is not None and here.cuda:
        raise UsageError(
            f"torch {here.version} is a build with CUDA already",
            hint="simulated GPUs run it: --gpu h100-80gb",
        )
    release = release_here()
    found = installed(release)
    if found is not None:
        return found
    target = folder_for(release)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # A build without CUDA has a local version (+cpu), which pip would prefer.
    requirements = [f"torch=={release},!={release}+cpu"]
    try:
        _pip(partial, requirements, options)
        triton = _triton_of(partial)
        if triton:
            _pip(partial, [triton], options)
        build = torch_build(partial / "torch")
        if build is None or not build.cuda:
            raise EnvironmentUnavailable(
                f"pip installed a torch {release} without CUDA",
                hint="name an index that has the build with CUDA: gpuprobe cuda-torch install "
                "--index-url URL",
            )
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    found = installed(release)
    assert found is not None
    return found


def _pip(target: Path, packages: Sequence[str], options: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:"]
    command += ["--target", str(target), *options, *packages]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise EnvironmentUnavailable(
            f"pip could not install {' '.join(packages)}",
            hint="see its messages above; options after `install` are passed to pip",
        )


def _triton_of(folder: Path) -> str:
    """The release of Triton that torch's own metadata requires, ``""`` for none."""
    for metadata in folder.glob("torch-*.dist-info/METADATA"):
        found = re.search(
            r"^Requires-Dist: (triton==[\w.]+)", metadata.read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return found[1]
    return ""


def remove() -> bool:
    """Delete the build with CUDA of this environment's release. False if there was none."""
    folder = folder_for(release_here())
    existed = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    return existed


def activate() -> TorchBuild | None:
    """Have this process, which has not imported torch, import the installed build with CUDA, if
    its own torch has none. None if there is no such build.
    """
    try:
        if requires("torch") is None:
            return None
        found = installed(release_here())
    except (PackageNotFoundError, EnvironmentUnavailable):
        return None
    if found is None:
        return None
    folder = str(found.folder.parent)
    if folder not in sys.path:
        # Behind the folder of the program, which replaces the first entry: see
        # `gpuprobe.sampler.program`.
        sys.path.insert(0 if getattr(sys.flags, "safe_path", False) else 1, folder)
        importlib.invalidate_caches()
    return found
