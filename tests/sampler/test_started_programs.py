"""Python programs that a recorded program starts by their command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuprobe
from gpuprobe.sampler.processes.children import ORDERS
from gpuprobe.torch_support.process_gpus import add_startup

PYTHON = sys.executable


PROGRAM = """\
import sys, traceback
print(sys.argv, __name__, __file__, sys.path[0], sys.orig_argv[1:], flush=True)
if sys.argv[1] == "raise":
    raise ValueError("mine")
if sys.argv[1] == "wait":
    import signal
    signal.pause()
if sys.argv[1] == "int":
    raise KeyboardInterrupt
if sys.argv[1] == "train":
    import torch
    print(torch.cuda.get_device_name())
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(3):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
sys.exit(int(sys.argv[1]) if sys.argv[1].isdecimal() else sys.argv[1])
"""
LAUNCHER = """\
import os, subprocess, sys

def show(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    print(done.args, done.returncode, done.stdout, done.stderr)

show("-u", "program.py", "3")
show("program.py", "text")
show("program.py", "raise")
show("program.py", "int")
show("-m", "program", "0")
show("nothing.py")
show("broken.py")
show("-c", "import sys; print(sys.orig_argv)")
hook = "def hook(*error): raise LookupError"
show("-c", f"import sys\\n{hook}\\nsys.excepthook = hook\\nimport torch\\n1 / 0")
print(subprocess.run(["echo", "text"], capture_output=True).stdout)
child = subprocess.Popen([sys.executable, "program.py", "wait"], stdout=subprocess.PIPE)
child.stdout.readline()
child.terminate()
print(child.wait(), flush=True)
pid = os.posix_spawn(sys.executable, [sys.executable, "program.py", "4"], os.environ)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os.execv(sys.executable, [sys.executable, "program.py", "5"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "broken.py").write_text("x = = 1\n", encoding="utf-8")
    (tmp_path / "launch.py").write_text(LAUNCHER, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
    )


def test_programs_run_as_without_gpuprobe(folder: Path) -> None:
    alone = run(folder, "launch.py")
    recorded = run(folder, "-m", "gpuprobe", "run", "-q", "-o", "r.gpuprobe", "launch.py")
    assert recorded.stdout == alone.stdout
    assert recorded.returncode == alone.returncode == 5


@pytest.mark.parametrize("orders", ["nothing", "gAR9lC4="])
def test_orders_that_cannot_be_read_do_not_end_the_program(folder: Path, orders: str) -> None:
    """No pickle, and one of something else."""
    code = "import torch; print(torch.ones(2).sum().item())"
    environment: dict[str, str] = {**os.environ, ORDERS: orders}
    add_startup(environment)
    done = subprocess.run(
        [PYTHON, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "2.0\n", done.stderr


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n", encoding="utf-8")
    environment: dict[str, str] = {**os.environ, "PYTHONPATH": str(tmp_path)}
    add_startup(environment)
    done = subprocess.run(
        [PYTHON, "-c", "import sitecustomize; print(sitecustomize.__file__)"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["mine", str(tmp_path / "sitecustomize.py")]


@pytest.mark.parametrize("fails", ["gpuprobe/patching.py", "gpuprobe/api/inherited.py"])
def test_a_start_that_fails_is_one_line(tmp_path: Path, fails: str) -> None:
    """At the start of Python or at the import of torch: the program continues."""
    for path in (fails, "torch/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("", encoding="utf-8")
    for name in ("gpuprobe", "gpuprobe/api", "gpuprobe/startup"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
    copied = Path(gpuprobe.__file__).parent
    for name in ("gpuprobe/patching.py", "gpuprobe/startup/sitecustomize.py"):
        text = (copied.parent / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / fails).write_text("raise OverflowError('too\\nlarge\\x1b[2J')\n", encoding="utf-8")
    startup = os.pathsep.join([str(tmp_path / "gpuprobe/startup"), str(tmp_path)])
    done = subprocess.run(
        [PYTHON, "-c", "import torch; print('goes on')"],
        env={**os.environ, "PYTHONPATH": startup, "GPUPROBE_DEBUG": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    (line,) = done.stderr.splitlines()
    start = "gpuprobe: error: this process is not followed: OverflowError: too large"
    assert line.startswith(start)
    assert "\x1b" not in line


def test_another_sitecustomize_that_fails_is_reported_by_python(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')\n", encoding="utf-8")
    environment: dict[str, str] = {**os.environ, "PYTHONPATH": str(tmp_path)}
    alone = _python(environment)
    add_startup(environment)
    assert _python(environment) == alone
    assert alone[0] == 0
    assert "ValueError: mine" in alone[1]


def _python(environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [PYTHON, "-c", ""], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


TORCHRUN = """\
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_on_the_cpu_is_recorded_as_the_ranks_of_one_job(folder: Path) -> None:
    (folder / "train.py").write_text(TORCHRUN, encoding="utf-8")
    done = run(
        folder,
        *("-m", "gpuprobe", "run", "-o", "r.gpuprobe", "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", 2, "train.py"),
    )
    assert done.returncode == 0, done.stderr
    shown = run(folder, "-m", "gpuprobe", "report", "--json", "r.gpuprobe")
    report = json.loads(shown.stdout)
    assert report["session"]["world_size"] == 2
    assert report["session"]["argv"] == ["train.py"]
