"""A wheel carries the compiled runtime: who installs it needs no C compiler, as in CI."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import blocks
import pytest
import yaml

from gpuprobe.native import libraries

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
import shutil
import gpuprobe
assert not any(map(shutil.which, ("cc", "gcc", "clang")))
with gpuprobe.virtual_gpu("l4"):
    import torch
    print(gpuprobe.__file__, torch.ones(4, device="cuda").sum().item())
"""


def build(folder: Path, **environment: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The program, where no compiler is found, with caches in ``folder``."""
    return subprocess.run(
        [str(python), "-c", PROGRAM],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )


def check_as_in_ci(commands: Path, folder: Path) -> None:
    """What the how-to has CI run after its installation, against a committed baseline."""
    (page,) = [
        block
        for block in blocks.blocks(ROOT / "docs" / "how-to" / "gate-memory-in-ci.md")
        if block.directives.get("file") == ".gitlab-ci.yml"
    ]
    job = yaml.safe_load("\n".join(page.lines))["memory"]
    (line,) = [line for line in job["script"] if not line.startswith("pip install ")]
    command, *arguments = shlex.split(line)
    assert command == "gpuprobe"
    project = folder / "project"
    shutil.copytree(ROOT / "tests" / "integration" / "sample_project", project)
    done = subprocess.run(
        [str(commands / command), *arguments],
        cwd=project,
        env={**environment(folder), "GITLAB_CI": "true", "CI_PROJECT_DIR": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "memory is within the baseline" in done.stdout + done.stderr
    assert (project / job["artifacts"]["reports"]["junit"]).is_file()


def environment(folder: Path) -> dict[str, str]:
    """Without a compiler, with caches in ``folder``."""
    return {"PATH": str(folder), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


def test_a_wheel_runs_programs_and_the_check_of_ci_without_a_compiler(tmp_path: Path) -> None:
    wheel = build(tmp_path / "wheel")
    tag = "-".join(wheel.stem.split("-")[2:])
    assert tag == f"py3-none-{libraries.wheel_platform(libraries.core())}"

    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
            *("--disable-pip-version-check", "--no-compile", "--no-deps", "--no-index"),
            str(wheel),
        ],
        check=True,
    )
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # torch and what else gpuprobe imports is where these tests run; a .pth file there is not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    check_as_in_ci(python.parent, tmp_path)
    done = run(python, tmp_path)
    assert done.stdout == f"{site / 'gpuprobe' / '__init__.py'} 4.0\n", done.stderr
    assert not list((tmp_path / "cache").rglob("runtime-*"))

    # What was compiled from other sources is not used.
    source = site / "gpuprobe" / "native" / "runtime" / "log.c"
    source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    done = run(python, tmp_path)
    assert "there is no C compiler" in done.stderr


def test_a_wheel_that_is_built_without_a_compiler_is_pure(tmp_path: Path) -> None:
    wheel = build(tmp_path, PATH=str(tmp_path), CC="nothing")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "gpuprobe/native/runtime/native.h" in names
    assert not [name for name in names if name.endswith(".so")]
