"""The stand-in for ptxas: what Triton runs in its place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.native.assembler import assembler_variables
from gpuprobe.native.libraries import cache_folder

_PTXAS = """\
#!/bin/sh
echo "real: $*"
case $1 in bad) exit 3 ;; esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of what servers compile."""
    folder = tmp_path / "it's mine"
    folder.mkdir()
    return folder


@pytest.fixture
def caches(folder: Path) -> dict[str, str]:
    return {"TRITON_CACHE_DIR": str(folder / "a" / "triton"), "VLLM_CACHE_ROOT": str(folder / "a")}


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that has both assemblers."""
    programs = tmp_path / "it's packages" / "triton" / "backends" / "nvidia" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "it's packages" / "triton" / "__init__.py").touch()
    for name in ("ptxas", "ptxas-blackwell"):
        (programs / name).write_text(_PTXAS)
        (programs / name).chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path / "it's packages")


def compiled(program: str, folder: Path, caches: dict[str, str]) -> bytes | None:
    """What a program made of a kernel, and None where it is the real one."""
    output = folder / "with a space.o"
    command = [program, "-lineinfo", "-v", "--gpu-name=sm_90a", "a.ptx", "-o", str(output)]
    printed = subprocess.check_output(command, env=caches)
    assert printed.startswith(b"real: -lineinfo") != output.exists()
    code = output.read_bytes() if output.exists() else None
    output.unlink(missing_ok=True)
    return code


@pytest.mark.usefixtures("triton")
def test_no_machine_code_is_made(folder: Path, caches: dict[str, str]) -> None:
    found = assembler_variables(folder, caches, {})
    assert set(found) == {"TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"}
    for program in found.values():
        assert compiled(program, folder, caches) == b"no machine code"


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"])
@pytest.mark.parametrize("value", ["/home/me/.cache", "", None])
def test_machine_code_is_made_for_other_caches(
    folder: Path, caches: dict[str, str], name: str, value: str | None
) -> None:
    program = assembler_variables(folder, caches, {})["TRITON_PTXAS_PATH"]
    if value is None:
        del caches[name]
    else:
        caches[name] = value
    assert compiled(program, folder, caches) is None


@pytest.mark.usefixtures("triton")
def test_what_makes_no_code_is_left_to_the_real_one(folder: Path, caches: dict[str, str]) -> None:
    program = assembler_variables(folder, caches, {})["TRITON_PTXAS_PATH"]
    done = subprocess.run([program, "bad", "two words"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "real: bad two words\n")


@pytest.mark.usefixtures("triton")
def test_keys_of_caches_differ(folder: Path, caches: dict[str, str]) -> None:
    """Triton's keys contain what ``ptxas --version`` prints."""
    program = assembler_variables(folder, caches, {})["TRITON_PTXAS_PATH"]
    version = subprocess.check_output([program, "--version"], text=True)
    assert version == "real: --version\ngpuprobe: without machine code\n"


def test_the_program_that_the_environment_names_is_the_real_one(
    tmp_path: Path, folder: Path, caches: dict[str, str]
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("#!/bin/sh\necho mine\n")
    mine.chmod(0o755)
    named = {"TRITON_PTXAS_PATH": str(mine)}
    program = assembler_variables(folder, caches, named)["TRITON_PTXAS_PATH"]
    assert subprocess.check_output([program, "--help"]) == b"mine\n"


@pytest.mark.usefixtures("triton")
def test_a_placeholder_is_not_the_real_one(folder: Path, caches: dict[str, str]) -> None:
    """An estimate within another one."""
    first = assembler_variables(folder, caches, {})
    assert assembler_variables(folder, caches, first) == {}
    assert assembler_variables(folder, caches, {}) == first


def test_without_triton(
    folder: Path, caches: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(folder)])
    assert assembler_variables(folder, caches, {}) == {}
    assert list(folder.iterdir()) == []


def test_the_folder_for_temporary_files_has_a_private_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled is next to the libraries, and is executed, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with a space"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder()
    assert folder == tmp_path / f"gpuprobe-{os.getuid()}" / "native"
    assert folder.is_dir()
    assert folder.parent.stat().st_mode & 0o077 == 0
    folder.parent.chmod(0o777)
    with pytest.raises(EnvironmentUnavailable, match="can be written by others"):
        cache_folder()
