"""The program's own memory history, next to gpuprobe's: what it gets equals what it gets alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from native_commands import environment, python

import gpuprobe

pytestmark = pytest.mark.slow

PROGRAM = """\
import json, pickle, sys
import torch

memory = torch.cuda.memory
shown = []


def stack(frames):
    assert not any("/gpuprobe/" in frame["filename"] for frame in frames), frames
    return [[f["name"], f["line"]] for f in frames if f["filename"].endswith("program.py")]


def show(found):
    shown.append([
        [[(e["action"], e["size"], stack(e.get("frames", ()))) for e in t]
         for t in found["device_traces"]],
        [(b["size"], b["state"], stack(b["frames"]))
         for segment in found["segments"] for b in segment["blocks"]],
        [(s["total_size"], stack(s.get("frames", ()))) for s in found["segments"]],
        torch._C._cuda_isHistoryEnabled(),
        len(torch.cuda.memory_snapshot()),
    ])


model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def step():
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def traced():
    return [memory._allocation_traceback(t.untyped_storage().data_ptr()) is not None for t in kept]


def allocated(size):
    return torch.ones(size, 100, device="cuda")


step()
show(memory._snapshot())
kept = [allocated(100)]
before = allocated(300)
memory._record_memory_history(max_entries=int(sys.argv[1]), stacks="python")
kept.append(allocated(100))
del before
kept.append(allocated(300))  # at the same address, by the same line
step()
show(memory._snapshot())
step()
memory._dump_snapshot("dump.pickle")
with open("dump.pickle", "rb") as file:
    show(pickle.load(file))
if hasattr(memory, "_allocation_traceback"):
    shown.append(traced())
memory._record_memory_history(enabled=None)
show(memory._snapshot())
step()
memory._record_memory_history("state", stacks="python")
step()
show(memory._snapshot())
options = dict(context="alloc", stacks="python", max_entries=20, clear_history=True)
memory._record_memory_history("all", **options)
step()
show(memory._snapshot())
for limit in (500, 30, 3, 50, 7):  # a smaller one removes no entries, and orders them anew
    memory._record_memory_history("all", max_entries=limit, stacks="python")
    allocated(limit)
    show(memory._snapshot())
with open("shown.json", "w") as file:
    json.dump(shown, file)
"""
BARE = """\
import runpy, sys
import gpuprobe

del sys.argv[0]
with gpuprobe.virtual_gpu("t4", "shapes"):
    runpy.run_path("program.py", run_name="__main__")
"""
RUN = ("-m", "gpuprobe", "run", "--gpu", "t4", "--compute", "shapes", "--force", "-q")


def shown(folder: Path, *command: str) -> Any:
    """What the program got."""
    done = python(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "shown.json").read_text())


@pytest.mark.parametrize("entries", ["1000", "30"])
def test_a_program_gets_the_history_that_it_has_alone(tmp_path: Path, entries: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "bare.py").write_text(BARE)
    alone = shown(tmp_path, "bare.py", "program.py", entries)
    assert alone[0][0] == [[]]
    assert any(stack for _, _, stack in alone[1][1])
    assert len(alone[1][0][0]) <= int(entries)
    for options in ((), ("--trace-steps", "all"), ("--level", "trace", "--hazards")):
        assert shown(tmp_path, *RUN, *options, "program.py", entries) == alone, options

    session = gpuprobe.load(tmp_path / "program.gpuprobe").ranks[0]
    missing = [spot.what for spot in session.blind_spots if "_record_memory_history" in spot.what]
    assert len(missing) == 1


SEGMENTS = """\
import json
import torch

memory = torch.cuda.memory
torch.nn.Linear(4, 5).cuda()(torch.rand(6, 4, device="cuda")).sum().backward()
large = torch.empty(100, 2**20, device="cuda")
shown = [memory._snapshot()]
memory._record_memory_history(max_entries=100, stacks="python")
again = torch.empty(100, 2**20, device="cuda")
shown.append(memory._snapshot())
with open("shown.json", "w") as file:
    json.dump([[[s["total_size"], [f["line"] for f in s["frames"] if f["filename"].endswith(
        "program.py")]] for s in one["segments"]] for one in shown], file)
"""


def test_segments_from_before_the_history_of_a_program_have_no_stack(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SEGMENTS)
    (tmp_path / "bare.py").write_text(BARE)
    alone = shown(tmp_path, "bare.py", "program.py")
    size = 400 * 2**20
    assert [size, []] in alone[0]
    assert [size, [9]] in alone[1]  # torch.empty, of the program's history
    assert shown(tmp_path, *RUN, "--trace-steps", "all", "program.py") == alone


COMPILES = """\
import sys
import torch

assert "torch._dynamo" not in sys.modules
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 64, device="cuda")
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert "torch._dynamo" not in sys.modules

import torch._dynamo

step = torch.optim.AdamW.step
while hasattr(step, "__wrapped__"):
    if step.__code__.co_name == "_use_grad":
        assert "graph_break" in step.__code__.co_names
    step = step.__wrapped__
for _ in range(2):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert "__dynamo_disable" in vars(torch.optim.Optimizer.zero_grad.__wrapped__)
"""


def test_an_estimate_imports_the_compiler_only_for_programs_that_do(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(COMPILES)
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "estimate", "--gpu", "t4", "program.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
