"""The shared libraries that take the place of CUDA's, for the torch that is installed.

Two parts: the runtime, a library compiled from the C sources in ``runtime/`` (once, by any C
compiler, unless a package carries it compiled), and one library for each of NVIDIA's that torch
and its extensions link to, written by `gpuprobe.native.elf`. Both are cached.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gpuprobe.errors import DataError, EnvironmentUnavailable
from gpuprobe.model.io.trust import changeable_by, private_folder
from gpuprobe.native.answers import export_of, stem_of, vendor_of
from gpuprobe.native.elf import MACHINES, Export, Library, Needed, library_bytes, read_library

SOURCES: Final = Path(__file__).parent / "runtime"
CORE: Final = "libgpuprobe-cuda.so"
"""The runtime's file name and soname."""
PRELOAD: Final = "libgpuprobe-preload.so"
"""A library without functions that needs all others: what ``LD_PRELOAD`` names."""
_ALWAYS: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Opened by name, so no library needs them."""
SUPPORTED_MAJORS: Final = (12, 13)

IN_CONTAINER: Final = (
    "docker build -t gpuprobe https://github.com/gpuprobe/gpuprobe.git && "
    'docker run --rm -it -v "$PWD:/src" gpuprobe estimate --gpu h100-80gb train.py'
)
"""The command for a system where torch has no build with CUDA, or a simulated GPU cannot run."""


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch, as its files describe it: torch is not imported.

    ``cuda`` is the version of CUDA that it was built for, such as ``"13.0"``, ``""`` for a build
    without CUDA. ``libraries`` holds the versions of NVIDIA's packages that it requires, by the
    package's name without ``nvidia-`` and ``-cu12``: ``{"cudnn": "9.20.0.48"}``.
    """

    folder: Path
    version: str
    cuda: str
    libraries: dict[str, str]

    @property
    def major(self) -> int:
        return int(self.cuda.partition(".")[0] or 0)

    @property
    def cuda_number(self) -> int:
        """As `cudaRuntimeGetVersion` has it: 13000 for ``"13.0"``."""
        major, _, minor = self.cuda.partition(".")
        return int(major) * 1000 + int(minor or 0) * 10


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """The torch that ``import torch`` would find, or the one in ``folder``; None without one."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None

    def value(name: str) -> str:
        found = re.search(rf"^{name}(?::[^=]*)?\s*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
        return found[1] if found else ""

    version = value("__version__")
    return TorchBuild(folder, version, value("cuda"), _requirements(folder.parent, version))


def _requirements(site: Path, version: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for info in site.glob("torch-*.dist-info/METADATA"):
        own = info.parent.name.removeprefix("torch-").removesuffix(".dist-info")
        if own.partition("+")[0] != version.partition("+")[0]:
            continue
        for name, number in re.findall(
            r"^Requires-Dist: nvidia-([\w-]+?)(?:-cu\d+)? ?\(?==([\d.]+)",
            info.read_text(encoding="utf-8", errors="replace"),
            re.MULTILINE,
        ):
            found[name] = number
    return found


def cache_folder() -> Path:
    """Where libraries are kept: ``$XDG_CACHE_HOME/gpuprobe/native``, or a private folder for
    temporary files where that cannot be written, or other users could change it (the home of
    another user, for root). Raises EnvironmentUnavailable if that is the case of both.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "gpuprobe" / "native"
    if not set(" :") & set(str(folder)):  # LD_PRELOAD is separated by them
        try:
            folder.parent.parent.mkdir(parents=True, exist_ok=True)
            private_folder(folder.parent)
            private_folder(folder)
            if os.access(folder, os.W_OK):
                return folder
        except OSError:
            pass
    # Code is next to libraries.
    folder = Path(tempfile.gettempdir()) / f"gpuprobe-{os.getuid()}" / "native"
    try:
        private_folder(folder.parent)
        return private_folder(folder)
    except PermissionError as error:
        raise EnvironmentUnavailable(
            f"{folder} cannot be used: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder of your own",
        ) from None
    except OSError as error:
        raise EnvironmentUnavailable(
            f"simulated GPUs have no folder for their libraries: {error}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from None


def ensure_own(*paths: Path) -> None:
    """Check that no other user can change what is loaded or executed from these paths.

    Raises EnvironmentUnavailable for one that others can change, or that does not exist.
    """
    for path in paths:
        try:
            reason = changeable_by(path)
        except OSError as error:
            reason = f"{path}: {error.strerror or error}"
        if reason:
            raise EnvironmentUnavailable(
                f"what is kept for the simulated GPU cannot be used: {reason}",
                hint=f"delete {path}, or set XDG_CACHE_HOME to a folder of your own",
            )


def _digest() -> str:
    """What identifies the runtime's sources."""
    digest = hashlib.sha256(platform.machine().encode())
    for file in [*_sources(), *sorted(SOURCES.glob("*.h")), SOURCES / "runtime.map"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.c"))


def carried_core() -> Path:
    """Where a wheel carries the runtime compiled from these sources: other sources, another name.

    Raises EnvironmentUnavailable where the simulated GPU does not run.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise EnvironmentUnavailable(
            f"simulated GPUs run on Linux, on x86-64 and aarch64 (this is {sys.platform}, "
            f"{machine})",
            hint=f"in a container: {IN_CONTAINER}",
        )
    return SOURCES / f"libgpuprobe-cuda-{machine}-{_digest()}.so"


def core() -> Path:
    """The compiled runtime: the wheel's, or the one in the cache, which is compiled on first use.

    Raises EnvironmentUnavailable if neither exists and no compiler does.
    """
    carried = carried_core()
    if carried.exists():
        return carried
    target = cache_folder() / f"runtime-{_digest()}" / CORE
    if not target.exists():
        compile_core(target)
    ensure_own(target)
    return target


def wheel_platform(core: Path) -> str:
    """The platform tag of a wheel with a compiled runtime: the oldest glibc that has all functions
    which it needs (PEP 600), such as ``"manylinux_2_34_x86_64"``. Raises EnvironmentUnavailable
    where it is linked to another C library.
    """
    needed = {
        tuple(map(int, found[1].split(".")[:2]))
        for item in read_library(core).needed
        if (found := re.fullmatch(r"GLIBC_(\d+\.\d+(?:\.\d+)?)", item.version))
    }
    if not needed:
        raise EnvironmentUnavailable("the C library of this system is not glibc")
    major, minor = max(needed)
    return f"manylinux_{major}_{max(minor, 17)}_{platform.machine()}"


def compile_core(target: Path) -> None:
    """Compile the runtime by the first compiler that can: ``$CC``, cc, gcc, clang. A ``$CC`` that
    cannot is logged, with the one that was used instead.

    Raises EnvironmentUnavailable where none can, with the first error that each printed.
    """
    chosen = os.environ.get("CC", "").strip()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    failures: list[str] = []
    with _replaced(target) as partial:
        for name in filter(None, [chosen, "cc", "gcc", "clang"]):
            words = name.split()  # as make and setuptools read it
            label = f"CC={name}" if name == chosen else name
            if shutil.which(words[0]) is None:
                if name == chosen:
                    failures.append(f"{label} (not installed)")
            elif error := _compile_error(words, partial):
                failures.append(f"{label} ({error})")
            else:
                if failures:
                    import logging  # 4 ms, after a compilation of seconds

                    logging.getLogger("gpuprobe").warning(
                        "gpuprobe: the simulated GPU cannot be compiled by %s: %s is used instead",
                        ", ".join(failures),
                        name,
                    )
                return
        if failures:
            raise EnvironmentUnavailable(
                f"the simulated GPU cannot be compiled by {', '.join(failures)}",
                hint="name another C compiler (CC=gcc, CC=clang), or install one (Debian and "
                "Ubuntu: apt install gcc)",
            )
        raise EnvironmentUnavailable(
            "the simulated GPU has to be compiled, and there is no C compiler",
            hint="install one (Debian and Ubuntu: apt install gcc)",
        )


def _compile_error(compiler: Sequence[str], output: str) -> str:
    """The first error that the compiler printed; "" if it has written ``output``."""
    try:
        done = subprocess.run(
            [
                *(*compiler, "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", "-w"),
                *("-o", output, *map(str, _sources()), f"-Wl,-soname,{CORE}"),
                *(f"-Wl,--version-script={SOURCES / 'runtime.map'}", "-ldl"),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return "" if Path(output).exists() else "it wrote no file"
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return (lines or done.stderr.splitlines() or ["no output"])[0]


class _replaced:
    """A file that appears under its name when it is complete: processes may make it at once."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._partial = target.with_name(f".{target.name}.{os.getpid()}")

    def __enter__(self) -> str:
        return str(self._partial)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._partial.replace(self._target)
        else:
            self._partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class Libraries:
    """The libraries for one torch: ``core`` first, then the others, and the one to preload."""

    core: Path
    others: tuple[Path, ...]
    preload: Path

    @property
    def folder(self) -> Path:
        return self.preload.parent


def check_supported(build: TorchBuild) -> None:
    """Raise EnvironmentUnavailable for a torch without CUDA, or of a CUDA that is not supported."""
    if not build.cuda:
        raise EnvironmentUnavailable(
            f"torch {build.version} is a build without CUDA, and simulated GPUs run torch's own "
            "CUDA code",
            hint="gpuprobe cuda-torch install: once, 0.5 GB, next to this torch",
        )
    if build.major not in SUPPORTED_MAJORS:
        raise EnvironmentUnavailable(
            f"torch {build.version} is built for CUDA {build.cuda}; simulated GPUs know CUDA "
            f"{' and '.join(map(str, SUPPORTED_MAJORS))}",
            hint=f"pip install a torch for CUDA {' or '.join(map(str, SUPPORTED_MAJORS))}",
        )


def libraries_for(build: TorchBuild) -> Libraries:
    """The libraries for a torch with CUDA, made if they are not in the cache.

    Raises what `check_supported` and `core` raise.
    """
    check_supported(build)
    runtime = core()
    digest = hashlib.sha256(f"{runtime}\n{runtime.stat().st_mtime_ns}\n{build}".encode())
    for site in _sites(build):
        for name in sorted(
            entry.name for entry in os.scandir(site) if entry.name.endswith((".dist-info", ".pth"))
        ):
            digest.update(f"{name}\n".encode())
    digest.update((Path(__file__).parent / "answers.py").read_bytes())
    digest.update((Path(__file__).parent / "elf.py").read_bytes())
    folder = cache_folder() / f"cuda{build.major}-{digest.hexdigest()[:16]}"
    listing = folder / "libraries.txt"
    if not listing.exists():
        _write_libraries(folder, runtime, build)
    return libraries_in(folder)


def libraries_in(folder: Path) -> Libraries:
    """The libraries of a folder of the cache. Raises EnvironmentUnavailable where it is gone, or
    others can change it."""
    ensure_own(folder)
    try:
        names = (folder / "libraries.txt").read_text(encoding="utf-8").split()
    except OSError as error:
        raise EnvironmentUnavailable(f"the simulated GPU's libraries are gone: {error}") from None
    found = Libraries(folder / CORE, tuple(folder / name for name in names), folder / PRELOAD)
    ensure_own(found.core, *found.others, found.preload)
    return found


def _write_libraries(folder: Path, runtime: Path, build: TorchBuild) -> None:
    machine = platform.machine()
    answered = frozenset(
        name.removeprefix("gpn_")
        for name in read_library(runtime).exported
        if name.startswith("gpn_")
    )
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        shutil.copy2(runtime, partial / CORE)
        names = []
        for soname, exports in exports_of(needs_of(build), answered, build.major).items():
            data = library_bytes(soname, exports, [CORE], machine)
            (partial / soname).write_bytes(data)
            names.append(soname)
        # Linkers look for libcuda.so: Triton compiles launchers that link to it.
        (partial / "libcuda.so").symlink_to("libcuda.so.1")
        (partial / PRELOAD).write_bytes(
            library_bytes(PRELOAD, (), [str(folder / name) for name in [CORE, *names]], machine)
        )
        (partial / "libraries.txt").write_text("\n".join(names), encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / "libraries.txt").exists():
                raise
            shutil.rmtree(partial)  # another process was first
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise EnvironmentUnavailable(
            f"simulated GPUs cannot write their libraries: {error}",
            hint="set XDG_CACHE_HOME to a folder that can be written",
        ) from None


def needs_of(build: TorchBuild) -> list[Library]:
    """What torch's libraries, and those of the packages of this environment, need of NVIDIA's."""
    found = []
    extensions = itertools.chain.from_iterable(map(_extensions, _sites(build)))
    for path in [*sorted((build.folder / "lib").glob("*.so*")), *extensions]:
        try:
            library = read_library(path)
        except (DataError, OSError):
            continue  # a linker script, a damaged or unreadable file: no process can load it either
        if path.parent.name == "lib" or any(stem_of(name) for name in library.libraries):
            found.append(library)
    return found


def _sites(build: TorchBuild) -> list[Path]:
    """The folders that packages are installed in: torch's, then others of this process."""
    named = ("site-packages", "dist-packages")
    others = (Path(entry) for entry in sys.path if entry.rstrip(os.sep).endswith(named))
    return list(dict.fromkeys([build.folder.parent, *filter(Path.is_dir, others)]))


_NOT_EXTENSIONS: Final = ("torch", "nvidia", "numpy", "scipy", "pandas", "pyarrow", "triton")


def _extensions(site: Path) -> Iterator[Path]:
    """The shared libraries of the packages in a folder, such as flash-attn's."""
    for top in sorted(os.scandir(site), key=lambda entry: entry.name):
        if top.is_dir() and top.name.endswith((".libs", ".dist-info", "__pycache__")):
            continue
        if top.name in _NOT_EXTENSIONS:
            continue
        if top.is_file() and top.name.endswith(".so"):
            yield Path(top.path)
        elif top.is_dir():
            for folder, _, files in os.walk(top.path):
                yield from (
                    Path(folder, name)
                    for name in sorted(files)
                    if re.search(r"\.so(\.\d+)*$", name)
                )


def exports_of(
    libraries: Iterable[Library], answered: frozenset[str], major: int
) -> dict[str, list[Export]]:
    """The functions to export, by the soname of the library that exports them."""
    libraries = list(libraries)
    by_stem: dict[str, str] = {}
    exports: dict[str, dict[tuple[str, str], Needed]] = {}
    for soname in (*_ALWAYS, *(name for one in libraries for name in one.libraries)):
        stem = stem_of(soname)
        if stem is not None:
            by_stem.setdefault(stem, soname)
            exports.setdefault(soname, {})
    versions: dict[str, str] = {}
    for library in libraries:
        for needed in library.needed:
            vendor = vendor_of(needed.name)
            soname = needed.library or (vendor and by_stem.get(vendor.stem)) or ""
            if soname in exports:
                exports[soname][needed.name, needed.version] = needed
                if needed.version:
                    versions.setdefault(soname, needed.version)
    # Programs open libraries by name too and look up functions that no library needs.
    own = {re.sub(r"__1[123]$", "", name) for name in answered}
    for name in sorted(own):
        vendor = vendor_of(name)
        soname = (vendor and by_stem.get(vendor.stem)) or ""
        version = versions.get(soname, "")
        if soname and (name, version) not in exports[soname]:
            candidate = Needed(name, soname, version)
            if export_of(candidate, answered, major).target in (
                f"gpn_{name}",
                f"gpn_{name}__{major}",
            ):
                exports[soname][name, version] = candidate
    return {
        soname: [export_of(needed, answered, major) for needed in needs.values()]
        for soname, needs in sorted(exports.items())
    }
