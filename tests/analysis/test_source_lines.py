"""Lines of a program's source that a cause is about."""

from __future__ import annotations

import pytest

from gpuprobe.causes.lines import capture_line, loop_line, retaining_line, stored_as, storing_lines
from gpuprobe.remedies.text import ProgramText

PROGRAM = """\
import torch

LAST = None
kept = []

class Loop:
    def __init__(self):
        self.outputs = []
        self.best = None
        self.twice = compute()

    def step(self, loss, other):
        global LAST
        self.outputs.append(loss)
        self.best = loss
        kept[0]["x"] = loss
        LAST = str(loss)
        self.twice = loss
        loss.backward(retain_graph=True)
        other.backward(retain_graph=False)
        with torch.no_grad():
            with torch.cuda.graph(graph):
                out = model(x)
"""
TEXT = ProgramText("train.py", PROGRAM.encode())


def _only_line(text: ProgramText, name: str, function: str | None = None) -> int:
    lines = storing_lines(text, name, function)
    return lines.pop() if len(lines) == 1 else 0


def line_of(part: str) -> int:
    return next(at for at, line in enumerate(PROGRAM.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("outputs", "self.outputs.append"),
        ("best", "self.best = loss"),
        ("kept", 'kept[0]["x"]'),
        ("LAST", "LAST = str"),
    ],
)
def test_the_line_that_stores(name: str, part: str) -> None:
    assert _only_line(TEXT, name) == line_of(part)


@pytest.mark.parametrize(
    ("name", "part", "expected"),
    [
        ("outputs", "self.outputs.append", "self.outputs"),
        ("best", "self.best = loss", "self.best"),
        ("kept", 'kept[0]["x"]', "kept"),
        ("outputs", "self.best = loss", ""),
    ],
)
def test_the_name_by_which_a_line_stores(name: str, part: str, expected: str) -> None:
    assert stored_as(TEXT, line_of(part), name) == expected


def test_a_variable_is_stored_in_its_function() -> None:
    """Also where a function of the same file has a variable of the same name."""
    text = ProgramText("train.py", OF_TWO_FUNCTIONS.encode())
    lines = OF_TWO_FUNCTIONS.splitlines()
    assert _only_line(text, "logits") == 0
    assert lines[_only_line(text, "logits", "") - 1] == "logits, loss = model(x)"
    assert lines[_only_line(text, "logits", "sample") - 1].endswith("logits = model(x)[0][:, -1]")
    assert _only_line(text, "logits", "other") == 0
    assert lines[_only_line(text, "last", "") - 1].endswith("last = x.exp()")


OF_TWO_FUNCTIONS = """\
def sample(model, x):
    global last
    logits = model(x)[0][:, -1]
    logits[logits < 0] = -float("inf")
    last = x.exp()

logits, loss = model(x)
"""


@pytest.mark.parametrize("name", ["twice", "unknown"])
def test_several_lines_or_none_are_no_line(name: str) -> None:
    assert _only_line(TEXT, name) == 0


def test_the_backward_pass_that_keeps_its_graph() -> None:
    assert retaining_line(TEXT, "loss") == line_of("retain_graph=True")
    assert retaining_line(TEXT, "other") == 0


LOOPS = """\
for epoch in range(2):
    for size in (1, 2):
        with capture():
            run()

def once():
    run()

while True:
    def each():
        run()
"""


@pytest.mark.parametrize(("line", "loop"), [(4, 2), (3, 2), (1, 1), (7, 0), (11, 0)])
def test_the_loop_around_a_line(line: int, loop: int) -> None:
    assert loop_line(ProgramText("train.py", LOOPS.encode()), line) == loop


def test_the_capture_around_a_line() -> None:
    assert capture_line(TEXT, line_of("out = model")) == line_of("torch.cuda.graph")
    assert capture_line(TEXT, line_of("self.best = loss")) == 0
