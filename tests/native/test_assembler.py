"""The stand-in for ptxas: what Triton runs in its place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuprobe.native.assembler import assembler_variables

_PTXAS = """\
#!/bin/sh
echo "real: $*"
case $1 in bad) exit 3 ;; esac
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a Triton that has both assemblers."""
    programs = tmp_path / "it's packages" / "triton" / "backends" / "nvidia" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "it's packages" / "triton" / "__init__.py").touch()
    for name in ("ptxas", "ptxas-blackwell"):
        (programs / name).write_text(_PTXAS)
        (programs / name).chmod(0o755)
    return tmp_path / "it's packages"


def test_no_machine_code_is_made(tmp_path: Path, packages: Path) -> None:
    found = assembler_variables(tmp_path, {}, [str(packages)])
    assert set(found) == {"TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"}
    for program in found.values():
        output = tmp_path / "with a space.o"
        command = [program, "-lineinfo", "-v", "--gpu-name=sm_90a", "a.ptx", "-o", str(output)]
        assert subprocess.check_output(command) == b""
        assert output.read_bytes()
        output.unlink()


def test_what_makes_no_code_is_left_to_the_real_one(tmp_path: Path, packages: Path) -> None:
    program = assembler_variables(tmp_path, {}, [str(packages)])["TRITON_PTXAS_PATH"]
    assert subprocess.check_output([program, "--version"], text=True) == "real: --version\n"
    done = subprocess.run([program, "bad", "two words"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "real: bad two words\n")


def test_the_program_that_the_environment_names_is_the_real_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("#!/bin/sh\necho mine\n")
    mine.chmod(0o755)
    named = {"TRITON_PTXAS_PATH": str(mine)}
    program = assembler_variables(tmp_path, named, [str(tmp_path)])["TRITON_PTXAS_PATH"]
    assert subprocess.check_output([program, "--version"]) == b"mine\n"


def test_a_stand_in_is_not_the_real_one(tmp_path: Path, packages: Path) -> None:
    """A program on the native engine starts another one."""
    first = assembler_variables(tmp_path, {}, [str(packages)])
    assert assembler_variables(tmp_path, first, [str(packages)]) == {}
    assert assembler_variables(tmp_path, {}, [str(packages)]) == first


def test_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    assert assembler_variables(tmp_path, {}, [str(tmp_path)]) == {}
    assert list(tmp_path.iterdir()) == []
