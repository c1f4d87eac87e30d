"""Two walks through gpuprobe, by its real calls: of an allocation from the simulated GPU to a line
of the report, and of a hazard from the hook to the printed fix. The page of the architecture
describes them in the order in which the code runs; each may have only so many files.

A walk is followed from station to station, which are functions. From one to the next it goes along
the stack: up to the function that calls both, and down again. All files on the way count. Each walk
has two parts: the second begins with what the first one leaves, which is a file of the recording,
or the races that the engine keeps until the check ends.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

import gpuprobe
from gpuprobe.cli import main

pytestmark = pytest.mark.simulated

PACKAGE = Path(gpuprobe.__file__).parent
PAGE = PACKAGE.parent / "docs/explanation/architecture.md"


class Station(NamedTuple):
    """A function by its file in the package, and its name."""

    file: str
    function: str


RECORDED = (
    Station("torch_support/memory_history.py", "read"),
    Station("torch_support/snapshots.py", "_trace"),
    Station("sampler/tracing/cuda.py", "_categorise"),
    Station("recording/writer.py", "trace"),
    Station("recording/chunks.py", "encode_chunk"),
)
REPORTED = (
    Station("recording/chunks.py", "decode_chunk"),
    Station("analysis/trace/ledger.py", "_matched"),
    Station("analysis/peak/peaks.py", "by_line"),
    Station("user_frames.py", "place"),
    Station("reporters/sections/report/memory.py", "_shares"),
    Station("reporters/text/draw.py", "_table"),
)
DETECTED = (
    Station("torch_support/operator_calls.py", "_operator"),
    Station("hazard_watch/names.py", "context_at_hand"),
    Station("user_frames.py", "innermost"),
)
FIXED = (
    Station("hazard_watch/results.py", "fill"),
    Station("hazards/findings/explain.py", "propose"),
    Station("hazards/engine.py", "is_fixed"),
    Station("hazards/findings/repairs.py", "fix"),
    Station("hazards/findings/code.py", "unified_diff"),
    Station("reporters/sections/hazards.py", "finding_section"),
    Station("reporters/text/draw.py", "_section"),
)

TRAINING = """
import torch

model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(torch.randn(64, 512, device="cuda")).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RACE = """
import torch

side = torch.cuda.Stream()
x = torch.zeros(1 << 16, device="cuda")
with torch.cuda.stream(side):
    y = x + 1
torch.cuda.synchronize()
"""

_Call = tuple[FrameType, str]  # a frame, which no other one is while it is referred to; its file


class Follower:
    """Follows calls along the stations of a part of a walk."""

    def __init__(self, stations: Sequence[Station]) -> None:
        self.first = stations[0]
        self.left = list(stations[1:])
        self.files: dict[str, None] = {}
        """The files of the walk, in its order."""
        self._stack: list[_Call] = []  # of the last station

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if not self.files and _is_at(frame, self.first):
            self._stack = _calls(frame)  # again, until the next one is called
        elif self._stack and self.left and _is_at(frame, self.left[0]):
            self.left.pop(0)
            if not self.files:
                self.files[self.first.file] = None
            self._walk_to(_calls(frame))

    def _walk_to(self, stack: list[_Call]) -> None:
        """From the last station to the one on this stack (outermost first)."""
        both = 0
        for (one, _), (other, _) in zip(stack, self._stack, strict=False):
            if one is not other:
                break
            both += 1
        way = (*reversed(self._stack[both:]), *stack[max(0, both - 1) :])
        self.files.update(dict.fromkeys(file for _, file in way))
        self._stack = stack


def _is_at(frame: FrameType, station: Station) -> bool:
    code = frame.f_code
    return code.co_name == station.function and code.co_filename == str(PACKAGE / station.file)


def _calls(frame: FrameType | None) -> list[_Call]:
    """The calls of gpuprobe that a frame is in, outermost first."""
    inside = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            inside.append((frame, file.relative_to(PACKAGE).as_posix()))
        frame = frame.f_back
    return inside[::-1]


def walked(stations: Sequence[Station], *arguments: str) -> list[str]:
    """The files of the part of a walk that a command goes."""
    follower = Follower(stations)
    before: Callable[..., object] | None = sys.getprofile()
    sys.setprofile(follower)
    threading.setprofile(follower)
    try:
        main(list(arguments))
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    assert not follower.left, f"{arguments[0]} does not call {follower.left[0]}"
    return list(follower.files)


def described(title: str) -> list[str]:
    """The files that the numbered steps of a section name, each once, in their order."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0] + "\n"
    steps = re.findall(r"^\d\. .*?\n(?=\d\. |\n)", section, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`gpuprobe/([\w/]+\.py)`", "".join(steps))
    return list(dict.fromkeys(named))


def test_an_allocation_on_a_simulated_gpu_to_a_line_of_the_report(tmp_path: Path) -> None:
    program, recording = tmp_path / "train.py", str(tmp_path / "a.gpuprobe")
    program.write_text(TRAINING, encoding="utf-8")
    first = walked(
        RECORDED, "run", "--gpu", "t4", "--level", "trace", "-o", recording, str(program)
    )
    second = walked(REPORTED, "report", recording)
    files = list(dict.fromkeys((*first, *second)))
    assert len(files) <= 15
    assert described("The path of an allocation") == files


def test_a_hazard_from_the_hook_to_the_printed_fix(tmp_path: Path) -> None:
    program, recording = tmp_path / "race.py", str(tmp_path / "a.gpuprobe")
    program.write_text(RACE, encoding="utf-8")
    files = walked(DETECTED, "run", "--gpu", "t4", "--hazards", "-o", recording, str(program))
    again = walked(
        FIXED, "run", "--gpu", "t4", "--hazards", "-o", recording, "--force", str(program)
    )
    files = list(dict.fromkeys((*files, *again)))
    assert len(files) <= 16
    assert described("The path of a hazard") == files
