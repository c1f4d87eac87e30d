"""Each cause that `gpuprobe explain` names is described, and can be judged."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "gpuprobe" / "causes" / "rules"


def names() -> Iterator[str]:
    """The names that rules give to their answers."""
    files = (*RULES.glob("*.py"), RULES.parent / "recorded.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    constants = {
        node.targets[0].id: node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(node, ast.Call):
            continue
        if (made := ast.unparse(node.func)) == "Answer":
            given: ast.expr = node.args[0]
        elif made == "MemoryCause":  # one that is no answer about a group
            given = next(word.value for word in node.keywords if word.arg == "rule")
        else:
            continue
        if isinstance(given, ast.Constant):
            assert isinstance(given.value, str)
            yield given.value
        elif isinstance(given, ast.Name):
            yield constants[given.id]


def test_the_page_describes_each_cause() -> None:
    page = (ROOT / "docs" / "reference" / "memory-causes.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`([a-z-]+)`", page))
    found = set(names())
    assert len(found) > 30
    assert found <= described


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the table needs a reader of TOML")
def test_the_frozen_cases_can_judge_each_cause() -> None:
    from cause_cases import _WORDS

    assert set(names()) == set(_WORDS)
