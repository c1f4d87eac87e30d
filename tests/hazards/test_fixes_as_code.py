"""The proposed code, put where it says (before the second of two lines, if it says nothing),
ends the race of the two.
"""

from __future__ import annotations

import linecache
import re
from typing import Any

import pytest
import torch

import gpuprobe

_READ_WITHIN = """
x = torch.ones(64, device="cuda")
with torch.cuda.stream(side):
    y = x * 2
"""
_READ_AFTER = """
with torch.cuda.stream(side):
    x = torch.ones(64, device="cuda")
y = x * 2
"""
_ON_ANOTHER_DEVICE = """
with torch.cuda.stream(side):
    x = torch.ones(64, device="cuda:1")
y = x * 2
"""
_ACROSS_DEVICES = """
x = torch.ones(64, device="cuda:0")
y = torch.empty(64, device="cuda:1")
gpuprobe.declare_access(reads=x, writes=y, stream=torch.cuda.default_stream(1))
"""
_TWO_SIDES = """
with torch.cuda.stream(other):
    x = torch.ones(64, device="cuda")
with torch.cuda.stream(side):
    y = x * 2
"""
_READ_BY_THE_HOST = """
x = torch.ones(64, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    buffer = x.to("cpu", non_blocking=True)
total = buffer.sum()
"""
_FREED_ON_MAIN = """
x = torch.ones(64, device="cuda")
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    y = x * 2
del x  # dropped
z = torch.zeros(64, device="cuda")
"""
_FREED_ON_SIDE = """
with torch.cuda.stream(side):
    x = torch.ones(64, device="cuda")
torch.cuda.current_stream().wait_stream(side)
y = x * 2
del x  # dropped
with torch.cuda.stream(side):
    z = torch.zeros(64, device="cuda")
"""
_OWN_STREAM = """
with torch.cuda.stream(side):
    x = torch.ones(64, device="cuda")
    x.record_stream(side)
    del x
    z = torch.empty(64, device="cuda")
z.fill_(1)
"""
_GRAPH_INPUT = """
x = torch.ones(64, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
del x  # dropped
graph.replay()
"""


def judge(text: str, device: int) -> Any:
    name = f"<fix {hash(text)}>.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    streams = {name: torch.cuda.Stream(device) for name in ("side", "other")}
    with gpuprobe.detect_hazards() as found:
        exec(compile(text, name, "exec"), {"torch": torch, "gpuprobe": gpuprobe, **streams})
    return found.races


@pytest.mark.parametrize(
    ("text", "device"),
    [
        (_READ_WITHIN, 0),
        (_READ_AFTER, 0),
        (_ON_ANOTHER_DEVICE, 1),
        (_ACROSS_DEVICES, 0),
        (_TWO_SIDES, 0),
        (_READ_BY_THE_HOST, 0),
        (_FREED_ON_MAIN, 0),
        (_FREED_ON_SIDE, 0),
        (_OWN_STREAM, 0),
        (_GRAPH_INPUT, 0),
    ],
)
def test_the_race_is_gone(text: str, device: int) -> None:
    with gpuprobe.virtual_gpu("2xh100-80gb"):
        (race,) = judge(text, device)
        assert dict(race.evidence)["fix verified"].startswith("yes")
        code = race.fix.code
        at = race.location.line - 1
        lines = text.splitlines()
        if "before it is dropped" in code or "kept as long" in code:
            at = next(number for number, line in enumerate(lines) if "# dropped" in line)
            code = re.sub(r"\btensor\b", "x", code)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at:at] = [indent + line for line in code.splitlines()]
        assert judge("\n".join(lines) + "\n", device) == []
