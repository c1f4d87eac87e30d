"""What watching adds to a step, by the runtime's own log of calls: nothing that waits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from native_commands import python

pytestmark = pytest.mark.slow

PROGRAM = """\
import contextlib, json, sys
from collections import Counter

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.process import load

runtime = load(parse_spec("h100-80gb"))
import torch

import gpuprobe
from gpuprobe.sampler import gpu_clock

gpu_clock.takes_time = lambda: True  # as on a GPU, on which phases are timed by events
level = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(64, 512, device="cuda")


def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


step()
with contextlib.ExitStack() as stack:
    if level == "hazards":
        stack.enter_context(gpuprobe.detect_hazards())
    elif level != "bare":
        recorder = gpuprobe.record(
            "run.gpuprobe", model=model, optimizer=optimizer, level=level.split()[0]
        )
        stack.enter_context(recorder)
    for _ in range(6 if level == "trace later" else 1):
        step()
    runtime.start_log()
    step()
    runtime.stop_log()
    calls = Counter(call.kind.name for call in runtime.take_log())
print(json.dumps(calls))
"""
WAITING = {"EVENT_SYNC", "STREAM_SYNC", "DEVICE_SYNC"}


def calls(level: str, folder: Path) -> Counter[str]:
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    done = python("program.py", level, cwd=folder)
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("level", "added"),
    [
        ("counters", {"EVENT_RECORD", "EVENT_QUERY"}),
        ("trace", {"EVENT_RECORD", "EVENT_QUERY"}),
        ("trace later", {"EVENT_RECORD", "EVENT_QUERY"}),
        ("hazards", set()),
    ],
)
def test_a_level_adds_no_call_that_waits(level: str, added: set[str], tmp_path: Path) -> None:
    bare = calls("bare", tmp_path)
    watched = calls(level, tmp_path)
    assert bare["LAUNCH"]
    assert not bare - watched
    assert set(watched - bare) == added
    assert not WAITING & set(watched)
