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
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Answer":
                first = node.args[0]
                assert isinstance(first, (ast.Constant, ast.Name))
                name = first.value if isinstance(first, ast.Constant) else constants[first.id]
                assert isinstance(name, str)
                yield name


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
