"""A program that ends the process in its own way is no program within its baseline."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python

TRAINING = """\
import os, sys, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

FORKS = """\
import atexit
child = os.fork()
if child == 0:
    atexit.register(print, "the child's own end", file=sys.stderr)
    {end}
_, status = os.waitpid(child, 0)
print("ended with", os.waitstatus_to_exitcode(status), file=sys.stderr)
"""


def gpuprobe(
    folder: Path, *arguments: str, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python.shared().python, "-m", "gpuprobe", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAINING, encoding="utf-8")
    done = gpuprobe(folder, "baseline", "update", "train.py", "--gpu", "t4", "--baseline", "b.json")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def changed(project: Path, tmp_path: Path) -> Path:
    """The project, with a script of its own to write: a baseline is for one script."""
    folder = tmp_path / "project"
    shutil.copytree(project, folder)
    return folder


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("import os; os._exit(0)", "with exit code 0"),
        ("import os; os.execv('/bin/sh', ['sh', '-c', 'exit 0'])", "with exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "by SIGKILL"),
    ],
)
@pytest.mark.parametrize("command", ["check", "baseline", "estimate"])
def test_a_program_that_ends_the_process_is_an_error(
    command: str, end: str, how: str, changed: Path
) -> None:
    (changed / "train.py").write_text(end, encoding="utf-8")
    before = (changed / "b.json").read_bytes()
    arguments = {
        "check": ["check", "train.py", "--baseline", "b.json", "--gpu", "t4"],
        "baseline": ["baseline", "update", "train.py", "--baseline", "b.json", "--gpu", "t4"],
        "estimate": ["estimate", "train.py", "--gpu", "t4"],
    }
    done = gpuprobe(changed, *arguments[command])
    assert done.returncode == 5
    assert done.stdout == ""
    assert f"the program terminated this process {how}, before anything was measured" in done.stderr
    assert (changed / "b.json").read_bytes() == before


def test_forked_children_that_exit_are_not_the_program(changed: Path) -> None:
    ends = ("sys.exit(3)", "raise ValueError('child')", "pass; raise SystemExit")
    forks = "".join(FORKS.format(end=end) for end in ends)
    (changed / "train.py").write_text(TRAINING + forks, encoding="utf-8")
    done = gpuprobe(changed, "check", "train.py", "--baseline", "b.json", "--gpu", "t4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True  # one document, of the parent
    codes = [line for line in done.stderr.splitlines() if line.startswith("ended with")]
    assert codes == ["ended with 3", "ended with 1", "ended with 0"]
    assert done.stderr.count("the child's own end") == 3
    assert done.stderr.count("ValueError: child") == 1


def test_a_forked_child_writes_no_summary_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        TRAINING.replace(".cuda()", "").replace(', device="cuda"', "")
        + FORKS.format(end="sys.exit(3)"),
        encoding="utf-8",
    )
    done = gpuprobe(tmp_path, "run", "forks.py")
    assert done.returncode == 0
    assert "ended with 3" in done.stderr
    assert done.stderr.count("gpuprobe: recording:") == 1


def test_a_signal_reaches_the_program(changed: Path, tmp_path: Path) -> None:
    """Who ends the command ends the program too, and sees the signal in the exit status."""
    script = changed / "train.py"
    ready = tmp_path / "ready"
    script.write_text(
        f"import os, time\nopen({str(ready)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n",
        encoding="utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuprobe", "check", "train.py", "--baseline", "b.json"],
        cwd=changed,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (ready.exists() and ready.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)


IGNORES = """\
import os, signal
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
for process in {to}:
    os.kill(process, signal.SIGINT)
{then}
"""

CHECK = ("check", "train.py", "--baseline", "b.json")
IN_THE_BACKGROUND: dict[str, tuple[tuple[str, ...], str, str, int, str]] = {
    "run": (("run", "-q", "train.py"), "[os.getpid()]", "", 0, ""),
    "check": (CHECK, "(os.getpid(), os.getppid())", TRAINING, 0, ""),
    "a crash": (
        CHECK,
        "(os.getpid(), os.getppid())",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        5,
        "terminated this process by SIGSEGV",
    ),
}


@pytest.mark.parametrize("case", IN_THE_BACKGROUND)
def test_a_program_in_the_background_ignores_ctrl_c(
    case: str, changed: Path, tmp_path: Path
) -> None:
    """It inherits that from a shell without job control, as it would without gpuprobe."""
    words, to, then, code, message = IN_THE_BACKGROUND[case]
    (changed / "train.py").write_text(IGNORES.format(to=to, then=then), encoding="utf-8")
    ignoring = ["sh", "-c", 'trap "" INT; exec "$0" "$@"']
    done = subprocess.run(
        [*ignoring, sys.executable, "-m", "gpuprobe", *words],
        cwd=changed,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_help_is_no_program(tmp_path: Path) -> None:
    assert gpuprobe(tmp_path, "baseline", "update", "--help").returncode == 0
    assert gpuprobe(tmp_path, "baseline", "update", "--nonsense").returncode == 2


SPAWNS = """\
import torch
import torch.multiprocessing as mp

def train(rank):
    pass

if __name__ == "__main__":
    torch.ones(3).cuda()
    mp.spawn(train, nprocs=2)
"""


UPDATE = ("baseline", "update", "--gpu", "t4", "--baseline", "b.json")


def test_training_in_spawned_processes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS, encoding="utf-8")
    done = gpuprobe(tmp_path, *UPDATE, "spawns.py")
    assert done.returncode == 5, done.stderr
    assert "uses the GPU in 2 child processes" in done.stderr


STARTS = """\
import multiprocessing, os, sys
import torch


def train():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.nn.Linear(64, 64).to(device)


def prepare():
    torch.ones(10).sum()


if __name__ == "__main__":
    how, what = sys.argv[1:]
    if what == "prepare":  # after that CUDA refuses the GPU to forked processes
        kept = torch.ones(300, device="cuda")
    if how == "os":
        child = os.fork()
        if child == 0:
            {"train": train, "prepare": prepare}[what]()
            sys.exit(0)
        os.waitpid(child, 0)
    else:
        context = multiprocessing.get_context(how)
        child = context.Process(target={"train": train, "prepare": prepare}[what])
        child.start()
        child.join()
    kept = torch.ones(300, device="cuda")
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "os"])
def test_training_in_other_processes_is_refused(how: str, tmp_path: Path) -> None:
    """Those that prepare samples are no reason to."""
    (tmp_path / "starts.py").write_text(STARTS, encoding="utf-8")
    done = gpuprobe(tmp_path, *UPDATE, "starts.py", "--", how, "train")
    assert done.returncode == 5, done.stderr
    assert "uses the GPU in 1 child process " in done.stderr
    if how == "fork":  # the others in the same way
        assert gpuprobe(tmp_path, *UPDATE, "starts.py", "--", how, "prepare").returncode == 0
