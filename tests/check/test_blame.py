"""What changed in a source, and which changed line explains what grew."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.blame.blame import Blame, GrowthPath, SourceGraph
from gpuprobe.analysis.blame.source import changes, decode, source_of
from gpuprobe.errors import DataError

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import torch

RATE = 0.1


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def train(model, batches, optimizer):
    for x in batches:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()


def main(model, batches):
    optimizer = make_optimizer(model)
    train(model, batches, optimizer)
"""
LONG = "(\n        model.parameters(),\n        lr=RATE,\n    )"


@pytest.mark.parametrize("path", ["gpuprobe/api/check.py", "tests/check/test_blame.py"])
def test_digests_come_back_as_they_were(path: str) -> None:
    source = source_of((ROOT / path).read_text(encoding="utf-8"))
    again = decode(source.encode())
    assert again.statements == source.statements
    assert again.count == source.count
    assert source.encode().isascii()
    with pytest.raises(DataError):
        decode(source.encode() + "?")


@given(st.text())
def test_any_text_has_digests(text: str) -> None:
    source = source_of(text)
    assert decode(source.encode()).statements == source.statements


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RATE = 0.1\n", "# how fast\nRATE = 0.1  # a lot\n"),
        ("def make_optimizer(model):", "def make_optimizer(model: object) -> object:"),
        ("(model.parameters(), lr=RATE)", LONG),
        ("optimizer):\n", 'optimizer):\n    "Go."\n'),
        ("loss.backward()", "(loss.backward())"),
    ],
)
def test_what_does_nothing_is_no_change(old: str, new: str) -> None:
    assert old in PROGRAM
    assert kinds(PROGRAM, PROGRAM.replace(old, new)) == []


def kinds(before: str, after: str) -> list[tuple[int, str]]:
    found = changes({"a.py": source_of(before)}, {"a.py": source_of(after)})
    return [(change.line, change.kind) for change in found]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("lr=RATE", "lr=RATE, momentum=0.9", [(7, "new")]),
        ("loss", "value", [(12, "renamed"), (13, "renamed")]),
        ("        optimizer.step()\n", "", [(13, "gap")]),
        (
            "(model.parameters(), lr=RATE)",
            "(\n        model.parameters(),\n        lr=2 * RATE,\n    )",
            [(7, "new")],
        ),
    ],
)
def test_kinds_of_change(old: str, new: str, told: list[tuple[int, str]]) -> None:
    assert kinds(PROGRAM, PROGRAM.replace(old, new)) == told


def test_the_changed_line_of_a_statement_of_several_is_named() -> None:
    long = PROGRAM.replace("(model.parameters(), lr=RATE)", LONG)
    assert kinds(long, long.replace("lr=RATE", "lr=2 * RATE")) == [(9, "new")]


def test_moved_and_taken_out_of_a_block() -> None:
    head, _, rest = PROGRAM.partition("def train(")
    first, _, optimizer = head.partition("def make_optimizer(")
    moved = f"{first}def train({rest}\n\ndef make_optimizer({optimizer}"
    assert {kind for _, kind in kinds(PROGRAM, moved)} == {"moved"}
    one = "def f(x):\n    with no_grad():\n        y = g(x)\n        z = h(y)\n"
    two = "def f(x):\n    y = g(x)\n    z = h(y)\n"
    assert kinds(one, two) == [(2, "indented"), (3, "indented")]


def blamed(after: str, *path: int, category: str = "optimizer_state") -> list[int]:
    now = {"a.py": source_of(after)}
    found = changes({"a.py": source_of(PROGRAM)}, now)
    way = GrowthPath(tuple(f"a.py:{line} in f" for line in path), 1000, category)
    return [suspect.change.line for suspect in Blame(SourceGraph(now), found).suspects([way])]


def test_a_line_that_no_path_crosses_is_found_by_the_names() -> None:
    """State of an optimizer is allocated in step(), and made larger where it is constructed."""
    after = PROGRAM.replace("lr=RATE", "lr=RATE, momentum=0.9")
    assert blamed(after, 19, 14) == [7]


def test_a_line_that_a_path_crosses_goes_first() -> None:
    after = PROGRAM.replace("loss.backward()", "loss.backward(retain_graph=True)")
    after = after.replace("RATE = 0.1", "RATE = 0.2")
    assert blamed(after, 19, 13)[0] == 13
    # Where only the other one explains anything, it is named.
    assert blamed(PROGRAM.replace("RATE = 0.1", "RATE = 0.2"), 19, 14) == [3]


def test_a_renaming_is_no_cause_while_there_is_another() -> None:
    after = PROGRAM.replace("loss", "value").replace("lr=RATE", "lr=RATE, momentum=0.9")
    assert blamed(after, 19, 13, category="gradient") == [7]
    assert blamed(PROGRAM.replace("loss", "value"), 19, 13)[0] == 13
