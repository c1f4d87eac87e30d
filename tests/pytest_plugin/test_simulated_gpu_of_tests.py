"""The simulated GPU of marked tests: loaded before a conftest imports torch, hidden from others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuprobe.native.libraries import torch_build

pytestmark = pytest.mark.skipif(
    not getattr(torch_build(), "cuda", ""), reason="needs a build of torch with CUDA"
)

CONFTEST = """\
import torch

assert not torch.cuda.is_available()
"""
TESTS = """\
import os
import subprocess
import sys

import pytest
import torch

AVAILABLE = "import torch; raise SystemExit(torch.cuda.is_available())"


def test_others_find_no_gpu():
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert "GPUPROBE_NATIVE" not in os.environ


kept = []


@pytest.mark.gpu_memory(max_peak="1 GiB")
def test_marked():
    kept.append(torch.full((4, 4), 3.0, device="cuda"))
    assert torch.cuda.device_count() == 1
    assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
    assert subprocess.run([sys.executable, "-c", AVAILABLE]).returncode == 1


@pytest.mark.gpu_memory(max_peak="1 KiB")
def test_too_large():
    torch.ones(1 << 20, device="cuda")


def test_others_find_none_afterwards_either():
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1 << 26, device="cuda")


def test_nothing_is_computed_silently_between_the_rest_of_what_marked_tests_keep():
    assert kept[0].tolist() == [[3.0] * 4] * 4
    for small in (lambda: torch.ones(4, device="cuda"), lambda: kept[0] + 1):
        with pytest.raises(torch.AcceleratorError, match="no CUDA-capable device"):
            small()
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        (kept[0] @ kept[0]).tolist()
"""


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
    (folder / "pytest.ini").write_text(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\n", encoding="utf-8"
    )
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("COV_", "PYTEST_"))}
    plugins: tuple[str, ...] = ()  # as installed
    if options:  # Hypothesis, IPython and others take two seconds of processor time
        ours["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        plugins = ("-p", "gpuprobe.pytest_plugin", *(("-p", "xdist") * ("-n1" in options)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options, *plugins],
        cwd=folder,
        env={**ours, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n1",)], ids=["alone", "workers"])
def test_marked_tests_have_the_gpu_and_others_have_not(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    out = run(tmp_path, *options)
    assert "1 failed, 4 passed" in out, out
    assert "above max_peak=1.0 KiB" in out


def test_pytest_starts_again_where_a_plugin_has_imported_torch(tmp_path: Path) -> None:
    """As the plugins of jaxtyping and others do; torch needs what the engine's libraries are."""
    (tmp_path / "early.py").write_text(
        "import ctypes\nfrom gpuprobe.native.libraries import libraries_for, torch_build\n"
        "found = libraries_for(torch_build())\n"
        "for path in (found.core, *found.others):\n"
        "    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)\n"
        "import torch\n",
        encoding="utf-8",
    )
    out = run(tmp_path, "-p", "early")
    assert "1 failed, 4 passed" in out, out


def test_a_suite_without_marked_tests_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_more.py").write_text("def test_it(): pass\n", encoding="utf-8")
    out = run(tmp_path, "--gpuprobe-gpu=nonsense", "test_more.py")
    assert "unknown GPU" not in out
    assert "1 passed" in out, out
