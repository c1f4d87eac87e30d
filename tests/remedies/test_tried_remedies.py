"""Remedies that were tried: real programs on the simulated GPU, with the peak measured by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from warm_python import shared

from gpuprobe.api.remedies import (
    FailedRemedy,
    RemedyOptions,
    RemedyRequest,
    RemedyTrials,
    TriedRemedy,
    UntriedRemedy,
)
from gpuprobe.remedies.edits import (
    AutogradGrad,
    DeleteAfterUse,
    Detach,
    Edit,
    InsertCall,
    LimitCache,
    MapLocationCpu,
    NoGrad,
)
from gpuprobe.remedies.output import OutputComparison, compared
from gpuprobe.remedies.setting import AllocatorSetting

pytestmark = pytest.mark.slow

GPU = "t4"
HEAD = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).cuda()
"""
OPTIMIZER = "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
TAIL = "print('peak', torch.cuda.max_memory_allocated() / 2**20, 'MiB')\n"

# Each program: its source, the edit, and the line that a person would write.
PROGRAMS: dict[str, tuple[str, Edit, tuple[str, str]]] = {
    "history": (
        """\
losses = []
for step in range(6):
    loss = net(torch.randn(512, 64, device="cuda")).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(net(torch.randn(512, 64, device="cuda")).mean())
print(len(losses))
""",
        Detach(13),
        ('device="cuda")).mean())', 'device="cuda")).mean().data)'),
    ),
    "total": (
        """\
total = 0
for step in range(6):
    loss = net(torch.randn(512, 64, device="cuda")).pow(2).mean()
    total += loss
    opt.zero_grad()
print(float(total))
""",
        Detach(10),
        ("total += loss", "total += loss.detach()"),
    ),
    "previous": (
        """\
with torch.no_grad():
    for step in range(3):
        x = torch.randn(4096, 64, device="cuda")
        wide = net[0](x)
        out = wide.exp()
        print(out.shape)
""",
        DeleteAfterUse(12, "out"),
        ("shape)\n", "shape)\n        out = None\n"),
    ),
    "checkpoint": (
        """\
torch.save({"w": torch.zeros(1 << 20)}, "state.pt")
state = torch.load("state.pt", map_location="cuda")
big = torch.zeros(1 << 20, device="cuda")
print(state["w"].sum().item(), big.sum().item())
""",
        MapLocationCpu(8),
        ('map_location="cuda"', 'map_location="cpu"'),
    ),
    "create_graph": (
        """\
def penalty(x):
    params = list(net.parameters())
    loss = net(x).pow(2).mean()
    loss.backward(create_graph=True)
    grads = [p.grad for p in params]
    return sum(g.pow(2).sum() for g in grads)

for step in range(6):
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).cuda()
    print(penalty(torch.randn(512, 64, device="cuda")).item())
""",
        AutogradGrad(9),
        (
            "    loss.backward(create_graph=True)\n    grads = [p.grad for p in params]\n",
            "    grads = torch.autograd.grad(loss, params, create_graph=True)\n"
            "    for p, g in zip(params, grads):\n"
            "        p.grad = g.detach()\n",
        ),
    ),
    "cache": (
        """\
import functools

@functools.cache
def mask(length):
    return torch.ones(length, length, device="cuda").triu()

with torch.no_grad():
    for length in range(500, 900, 20):
        print(mask(length).sum().item())
""",
        LimitCache(9),
        ("@functools.cache", "@functools.lru_cache(1)"),
    ),
    "evaluation": (
        """\
for step in range(2):
    net(torch.randn(64, 64, device="cuda")).mean().backward()
    opt.step()
    opt.zero_grad()
deep = nn.Sequential(*(nn.Tanh() for _ in range(8)))
for step in range(2):
    score = deep(net(torch.randn(4096, 64, device="cuda"))).mean()
    print(score.item())
""",
        NoGrad(13, 13),
        (
            "for step in range(2):\n    score",
            "torch.set_grad_enabled(False)\nfor step in range(2):\n    score",
        ),
    ),
}
BY_HAND = """\
import runpy, sys
import gpuprobe

with gpuprobe.virtual_gpu({gpu!r}):
    import torch

    runpy.run_path(sys.argv[1], run_name="__main__")
    print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


def by_hand(script: Path) -> tuple[int, int]:
    """The peaks of a program that runs without any trial."""
    runner = script.with_name("run_by_hand.py")
    runner.write_text(BY_HAND.format(gpu=GPU))
    done = subprocess.run(
        [shared().python, runner.name, script.name],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    allocated, reserved = done.stdout.splitlines()[-1].split()
    return int(allocated), int(reserved)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, the working directory. Servers of trials are forked (`warm_python`)."""
    monkeypatch.setattr("sys.executable", shared().python)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trials(script: str = "train.py", *arguments: str) -> RemedyTrials:
    return RemedyTrials([script, *arguments], RemedyOptions(gpu=GPU))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_tried_figure_is_that_of_the_edit_made_by_hand(name: str, project: Path) -> None:
    body, edit, (old, new) = PROGRAMS[name]
    source = HEAD + OPTIMIZER * (name != "create_graph") + body + TAIL
    script = project / "train.py"
    script.write_text(source)
    assert source.count(old) == 1
    fixed = source.replace(old, new)
    before_files = contents(project)
    with trials() as tried:
        found = tried.try_remedy(RemedyRequest({"train.py": [edit]}), 300)
    assert isinstance(found, TriedRemedy), found
    assert contents(project) == before_files
    assert found.output in (OutputComparison.SAME, OutputComparison.OTHER_MEMORY)
    assert found.helps
    elsewhere = project.parent / "by_hand"
    elsewhere.mkdir()
    (elsewhere / "unchanged.py").write_text(source)
    (elsewhere / "fixed.py").write_text(fixed)
    subprocess.run(["git", "apply", "-"], input=found.remedy.patch, cwd=project, check=True)
    (elsewhere / "applied.py").write_bytes(script.read_bytes())
    assert by_hand(elsewhere / "unchanged.py") == (found.before_allocated, found.before_reserved)
    peaks = found.peak_allocated, found.peak_reserved
    # Autograd's thread may release its last blocks shortly after a backward pass has returned.
    late = (1 << 20) * (name == "create_graph")
    applied = by_hand(elsewhere / "applied.py")
    assert abs(applied[0] - peaks[0]) <= late
    assert applied[1] == peaks[1]
    assert abs(by_hand(elsewhere / "fixed.py")[0] - peaks[0]) <= late


@pytest.mark.parametrize("name", ["../project/src/train.py", "link.py", "code/train.py"])
def test_an_edit_is_in_the_program_that_runs_whatever_its_name(name: str, project: Path) -> None:
    (project / "src").mkdir()
    (project / "src" / "train.py").write_text(
        "import torch\n"
        "x = torch.zeros(1 << 20, device='cuda')\n"
        "y = torch.zeros(1 << 20, device='cuda')\n"
    )
    (project / "link.py").symlink_to("src/train.py")
    (project / "code").symlink_to("src")
    with trials(name) as tried:
        outcome = tried.try_remedy(RemedyRequest({name: [DeleteAfterUse(2, "x")]}), 60)
    assert isinstance(outcome, TriedRemedy)
    assert outcome.before_allocated - outcome.peak_allocated == 4 << 20


def test_the_whole_file_system_is_no_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy would be a program that the edit has not changed."""
    script = project / "train.py"
    script.write_text("import torch\nx = torch.zeros(1 << 20, device='cuda')\n")
    monkeypatch.chdir("/")
    with trials(str(script)) as tried:
        outcome = tried.try_remedy(RemedyRequest({str(script): [DeleteAfterUse(2, "x")]}), 60)
    assert isinstance(outcome, UntriedRemedy)
    assert "in no folder of a project" in outcome.reason


def test_a_program_that_fails_or_computes_something_else_saves_nothing(project: Path) -> None:
    (project / "train.py").write_text(
        HEAD
        + OPTIMIZER
        + """\
kept = []
for step in range(2):
    x = torch.randn(512, 64, device="cuda")
    kept.append(net(x))
    gone = kept[-1]
    print("with a graph" if gone.requires_grad else "without")
print("end")
"""
        + TAIL
    )
    with trials() as tried:
        other = tried.try_remedy(RemedyRequest({"train.py": [Detach(10)]}), 300)
        assert isinstance(other, TriedRemedy)
        assert other.output is OutputComparison.DIFFERENT
        assert other.peak_allocated < other.before_allocated
        assert not other.helps
        failing = RemedyRequest({"train.py": [InsertCall(12, "kept.missing()")]})
        failed = tried.try_remedy(failing, 300)
        assert isinstance(failed, FailedRemedy)
        assert "has no attribute 'missing'" in failed.reason
        stopped = RemedyRequest({"train.py": [InsertCall(12, "os._exit(3)")]})
        failed = tried.try_remedy(stopped, 300)
        assert isinstance(failed, FailedRemedy)
        left = RemedyRequest({"train.py": [InsertCall(12, "sys.exit(3)")]})
        failed = tried.try_remedy(left, 300)
        assert isinstance(failed, FailedRemedy)
        assert "exit code 3" in failed.reason
        endless = RemedyRequest({"train.py": [InsertCall(12, "time.sleep(600)")]})
        failed = tried.try_remedy(endless, 1)
        assert isinstance(failed, FailedRemedy)
        assert failed.reason == "it did not end in time"
        refused = tried.try_remedy(RemedyRequest({"train.py": [Detach(1)]}), 300)
        assert isinstance(refused, UntriedRemedy)
        assert refused.refused is not None


def test_the_programs_files_are_safe(project: Path) -> None:
    """Files that the program writes in its project are copies; all others are refused."""
    outside = project.parent / "outside"
    outside.mkdir()
    (outside / "log.txt").write_text("kept")
    (project / "runs" / "old").mkdir(parents=True)
    (project / "runs" / "state.pt").write_bytes(b"x" * (300 << 10))
    (project / "runs" / "old" / "log.txt").write_text("kept")
    (project / "large.bin").write_bytes(b"y" * (300 << 10))
    source = f"{HEAD}{OPTIMIZER}" + (
        """\
import os, pathlib, shutil, sys
torch.save(net.state_dict(), "runs/state.pt")
with open("large.bin", "r+b") as file:
    file.write(b"z")
with open("runs/old/log.txt", "a") as file:
    file.write("more")
os.makedirs("runs/new/deep")
pathlib.Path("runs/new/deep/x").write_text("x")
os.replace("runs/new/deep/x", "runs/old/x")
shutil.rmtree("runs/old")
os.remove("large.bin")
x = [net(torch.randn(64, 64, device="cuda")) for _ in range(4)]
if len(sys.argv) > 1:
    where = pathlib.Path(sys.argv[1])
    if sys.argv[2] == "python":
        where.write_text("lost")
    elif sys.argv[2] == "torch":
        torch.save(1, where)
    else:
        os.system(f"echo lost > {where}")
print(sorted(os.listdir("runs")))
"""
    )
    (project / "train.py").write_text(source)
    line = source[: source.index("x = [net")].count("\n") + 1
    edit = RemedyRequest({"train.py": [Detach(line)]})
    before = contents(project.parent)
    with trials() as tried:
        found = tried.try_remedy(edit, 300)
        assert isinstance(found, TriedRemedy), found
        assert found.helps
    for how in ("python", "torch"):
        with trials("train.py", str(outside / "log.txt"), how) as tried:
            refused = tried.try_remedy(edit, 300)
        assert isinstance(refused, UntriedRemedy), refused
        assert str(outside / "log.txt") in refused.reason
    with trials("train.py", str(outside / "log.txt"), "shell") as tried:
        tried.try_remedy(edit, 300)
    assert contents(project.parent) == before


def test_a_setting_is_tried(project: Path) -> None:
    (project / "train.py").write_text(
        """\
import torch
kept = []
for size in range(20, 60):
    x = torch.empty(size << 20, dtype=torch.uint8, device="cuda")
    del x
print("end")
"""
    )
    with trials() as tried:
        remedy = RemedyRequest(setting=AllocatorSetting("expandable_segments:True"))
        found = tried.try_remedy(remedy, 300)
    assert isinstance(found, TriedRemedy), found
    assert found.peak_reserved < found.before_reserved
    assert found.helps
    assert (
        found.remedy.command == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py"
    )
    assert not found.remedy.patch


@pytest.mark.parametrize(
    ("original", "changed", "memory", "again", "expected"),
    [
        ("loss 0.5\n", "loss 0.5\n", (), None, OutputComparison.SAME),
        ("peak 187 MiB", "peak  76 MiB", (80_000_000,), None, OutputComparison.OTHER_MEMORY),
        ("peak 1.31 GB", "peak 0.62 GB", (620_400_000,), None, OutputComparison.OTHER_MEMORY),
        ("peak 187 MiB", "peak 75 MiB", (80_000_000,), None, OutputComparison.DIFFERENT),
        ("loss 0.5", "loss 0.6", (1 << 30,), None, OutputComparison.DIFFERENT),
        ("loss 0.5", "loss 0.6", (), "loss 0.7", OutputComparison.VARYING),
        # After some seconds, a simulated GPU computes no more values.
        (
            "loss 5\nloss nan\nloss nan",
            "loss 5\nloss 4\nloss nan",
            (),
            None,
            OutputComparison.VARYING,
        ),
        ("loss 5\nloss 4", "loss 5\nloss nan", (1 << 30,), None, OutputComparison.DIFFERENT),
        ("loss 5\nlr 3\nloss nan", "loss 5\nlr 4\nloss 4", (), None, OutputComparison.DIFFERENT),
        # Two runs print the same duration in the first line, and another in the second.
        (
            "data 0.0 loss 5\ndata 0.1 loss 4",
            "data 0.1 loss 5\ndata 0.1 loss 4",
            (),
            "data 0.0 loss 5\ndata 0.2 loss 4",
            OutputComparison.VARYING,
        ),
        (
            "data 0.0 loss 5\ndata 0.1 loss 4",
            "data 0.1 loss 5\ndata 0.1 loss 3",
            (),
            "data 0.0 loss 5\ndata 0.2 loss 4",
            OutputComparison.DIFFERENT,
        ),
        ("step 1: 3.2 ms", "step 1: 4.0 ms", (), None, OutputComparison.VARYING),
        ("loss 0.5", "loss nan", (), None, OutputComparison.DIFFERENT),
        ("a 1 b 2", "a 1", (), None, OutputComparison.DIFFERENT),
        ("x 100", "x 50", (50,), "x 70", OutputComparison.OTHER_MEMORY),
    ],
)
def test_outputs_are_compared(
    original: str,
    changed: str,
    memory: tuple[int, ...],
    again: str | None,
    expected: OutputComparison,
) -> None:
    assert compared(original, changed, memory, again) is expected
