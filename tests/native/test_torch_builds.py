"""Builds of torch as their files describe them, and what is reported where one cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_commands import own_cache

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.native import libraries
from gpuprobe.native.libraries import (
    TorchBuild,
    cache_folder,
    carried_core,
    libraries_for,
    torch_build,
)

ROOT = Path(__file__).parent.parent.parent


def fake_torch(folder: Path, version: str, cuda: str, requires: str = "") -> Path:
    torch = folder / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n",
        encoding="utf-8",
    )
    info = folder / f"torch-{version.partition('+')[0]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: torch\n{requires}", encoding="utf-8")
    return torch


def test_torch_is_described_by_its_files(tmp_path: Path) -> None:
    requires = (
        'Requires-Dist: nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"\n'
        'Requires-Dist: nvidia-nccl-cu13==2.29.7; platform_system == "Linux"\n'
        "Requires-Dist: nvidia-cuda-runtime-cu12 (==12.4.127)\n"
        "Requires-Dist: sympy>=1.13.3\n"
    )
    build = torch_build(fake_torch(tmp_path, "2.13.0+cu130", "'13.0'", requires))
    assert build is not None
    assert (build.version, build.cuda, build.major, build.cuda_number) == (
        *("2.13.0+cu130", "13.0"),
        *(13, 13000),
    )
    assert build.libraries == {
        "cudnn": "9.20.0.48",
        "nccl": "2.29.7",
        "cuda-runtime": "12.4.127",
    }


def test_a_build_without_cuda_is_described_too(tmp_path: Path) -> None:
    build = torch_build(fake_torch(tmp_path, "2.13.0+cpu", "None"))
    assert build is not None
    assert (build.cuda, build.major) == ("", 0)
    assert torch_build(tmp_path / "nowhere") is None


def test_the_libraries_of_an_unknown_cuda_are_refused(tmp_path: Path) -> None:
    build = TorchBuild(tmp_path, "3.1.0+cu150", "15.0", {})
    with pytest.raises(EnvironmentUnavailable, match=r"CUDA 15\.0; simulated GPUs know") as met:
        libraries_for(build)
    assert met.value.hint == "pip install a torch for CUDA 12 or 13"


def test_without_cuda_the_remedy_is_named(tmp_path: Path) -> None:
    """The torch is a build for the CPU that `fake_torch` describes: it is not imported."""
    fake_torch(tmp_path, "2.13.0+cpu", "None")
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit(7)\n", encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text("import torch\n", encoding="utf-8")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    baseline = ["baseline", "update", "--baseline", "memory.json", "--gpu", "t4"]
    for command in (["estimate"], ["run", "--gpu", "t4"], baseline):
        done = subprocess.run(
            [sys.executable, "-m", "gpuprobe", *command, str(script)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=tmp_path,
        )
        assert "is a build without CUDA" in done.stderr, (command, done.stderr)
        assert done.stderr.count("gpuprobe cuda-torch install") == 1
        assert done.returncode == 3


def test_a_program_gets_the_build_that_was_installed_next_to_one_for_the_cpu(
    tmp_path: Path,
) -> None:
    """This environment's torch is the installed one; before it, a build for the CPU is found."""
    real = torch_build()
    assert real is not None
    release = real.version.partition("+")[0]
    metadata = f"Version: {release}+cpu\nRequires-Dist: sympy\n"
    fake = fake_torch(tmp_path / "site", f"{release}+cpu", "None", metadata)
    (fake / "__init__.py").write_text("raise SystemExit('the build for the CPU')\n")
    number = f"{sys.version_info.major}{sys.version_info.minor}"
    cache = own_cache(tmp_path / "cache")
    folder = Path(cache) / "gpuprobe" / "native" / f"torch-{release}-py{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torch").symlink_to(real.folder)
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(torch.version.cuda, torch.cuda.is_available())\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]),
        "XDG_CACHE_HOME": cache,
    }
    for program in ([str(script)], ["-m", "train"], ["--", sys.executable, str(script)]):
        done = subprocess.run(
            [sys.executable, "-m", "gpuprobe", "run", "-q", "--force", "--gpu", "t4", *program],
            capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.stdout == f"{real.cuda} True\n", (program, done.stderr)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [("nosuch", "not installed"), ("/bin/true", "it wrote no file"), ("'", "not installed")],
)
def test_a_chosen_compiler_that_does_not_work_is_replaced(
    chosen: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a small runtime: the real one takes seconds to compile."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "runtime.c").write_text("int gpn_started(void) { return 1; }\n")
    (tmp_path / "runtime.map").write_text("{ global: gpn_*; local: *; };\n")
    monkeypatch.setattr(libraries, "SOURCES", tmp_path)
    monkeypatch.setenv("CC", chosen)
    libraries.compile_core(tmp_path / "made" / libraries.CORE)
    assert (tmp_path / "made" / libraries.CORE).exists()
    assert caplog.messages == [
        f"gpuprobe: the simulated GPU cannot be compiled by CC={chosen} ({reason}): "
        "cc is used instead"
    ]


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64")])
def test_other_systems_are_given_a_container(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries.sys, "platform", system)
    monkeypatch.setattr(libraries.platform, "machine", lambda: machine)
    with pytest.raises(EnvironmentUnavailable, match="simulated GPUs run on Linux") as met:
        carried_core()
    assert met.value.hint.startswith("in a container: docker build ")
    assert "\n" not in met.value.hint


def test_a_cache_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.setattr(libraries.tempfile, "gettempdir", lambda: str(tmp_path))
    private = cache_folder().parent
    assert private.parent == tmp_path
    assert private.stat().st_mode & 0o077 == 0
    private.chmod(0o777)
    with pytest.raises(EnvironmentUnavailable, match="can be written by others"):
        cache_folder()


def test_a_cache_folder_with_a_space_cannot_be_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert " " not in str(cache_folder())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
def test_a_cache_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home of a user whose ``$HOME`` or ``$XDG_CACHE_HOME`` root has kept."""
    theirs = tmp_path / "home" / ".cache"
    theirs.mkdir(parents=True)
    os.chown(theirs, 4242, 4242)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(theirs))
    monkeypatch.setattr(libraries.tempfile, "gettempdir", lambda: str(temporary))
    assert cache_folder().parent.parent == temporary


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")
def test_a_library_that_another_user_has_planted_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder() / "cuda13-0"
    folder.mkdir()
    for name in (libraries.CORE, libraries.PRELOAD, "libcuda.so.1"):
        (folder / name).write_bytes(b"")
    (folder / "libraries.txt").write_text("libcuda.so.1")
    assert libraries.libraries_in(folder).others == (folder / "libcuda.so.1",)
    for planted in (folder / "libcuda.so.1", folder / libraries.CORE, folder, folder.parent):
        os.chown(planted, 4242, 4242)
        with pytest.raises(EnvironmentUnavailable, match=f"{planted} belongs to another user"):
            libraries.libraries_in(folder)
        os.chown(planted, 0, 0)
