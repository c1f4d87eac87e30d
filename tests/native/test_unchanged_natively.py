"""Nothing that gpuprobe does changes a program on torch's own CUDA code: samples of
``benchmarks/unchanged_programs.py``, with values and without, and of
``benchmarks/whole_programs.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from native_commands import environment, python

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(*options: str, script: str = "unchanged_programs.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *options],
        # pytest-asyncio warns on stderr where a project does not configure it, as this script's.
        env={**environment(), "KINETO_LOG_LEVEL": "5", "PYTEST_ADDOPTS": "-p no:asyncio"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_programs_are_the_same_with_each_watcher() -> None:
    done = run("--engine", "native", "cuda", "--programs", "12", "--first", "100")
    assert done.returncode == 0, done.stdout
    watchers = ("bare", "counters", "trace", "hazards", "check")
    for engine in ("native", "cuda"):
        rows = [line.split() for line in done.stdout.splitlines() if line.startswith(engine)]
        assert [row[1:] for row in rows] == [[name, "12", "0"] for name in watchers]


def test_programs_are_the_same_however_the_watch_began() -> None:
    watchers = ("notebook", "plugin", "dashboard")
    options = ("--programs", "2", "--first", "100", "--watchers", *watchers)
    done = run("--engine", "cuda", *options)
    assert done.returncode == 0, done.stdout


def test_programs_of_the_hazard_corpora_are_the_same() -> None:
    done = run("--engine", "cuda", "--corpus", "--every", "80", "--watchers", "check")
    assert done.returncode == 0, done.stdout


def test_processes_are_the_same_with_each_watcher() -> None:
    done = run("--programs", "12", "--first", "101", "--each", script="whole_programs.py")
    assert done.returncode == 0, done.stdout


BEGINNING = """\
import os, sys
import gpuprobe
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.process import load

load(parse_spec("t4,a100-40gb"))

import torch
from gpuprobe.native.values.session import Values

watchers = {
    "counters": lambda: gpuprobe.record("counters.gpuprobe", level="counters"),
    "trace": lambda: gpuprobe.record("trace.gpuprobe", level="trace"),
    "hazards": gpuprobe.detect_hazards,
    "values": Values,
}
with watchers[sys.argv[1]]():
    child = os.fork()
    if not child:
        torch.nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
        sys.stderr.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert not torch.cuda.is_initialized()
    assert "A100" in torch.cuda.get_device_name(0)
"""


@pytest.mark.parametrize("watcher", ["counters", "trace", "hazards", "values"])
def test_the_beginning_of_a_watch_does_not_initialise_cuda_or_autograd(
    tmp_path: Path, watcher: str
) -> None:
    done = python("-c", BEGINNING, watcher, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
