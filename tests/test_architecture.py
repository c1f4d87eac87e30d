"""The shape of the package: the field's words, a true map, no circles."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Container
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gpuprobe"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_names_and_texts_use_the_words_of_the_field() -> None:
    """Words that once stood for "reported", "non-tensor memory", "allocated" and "unmatched". One
    is in the name of an old key, in the history of a document.
    """
    private = re.compile(
        r"(?<![a-z])(heard|beside(?!_tensors)|born|strangers)(?![a-z])", re.IGNORECASE
    )
    texts = [file for file in PACKAGE.rglob("*.*") if file.suffix != ".pyc"]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in texts
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert not found


def test_the_map_names_files_that_exist() -> None:
    pages = ("docs/explanation/architecture.md", "CONTRIBUTING.md")
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    paths = re.findall(r"`((?:gpuprobe|tests|docs|benchmarks|examples)/[\w./-]+)`", text)
    assert len(paths) > 60
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_no_two_classes_have_one_name() -> None:
    """A name means one thing, wherever it is read. Each integration has a ``MemoryCallback``."""
    places: dict[str, list[str]] = {}
    for file in SOURCES:
        for node in _parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(file.relative_to(ROOT).as_posix())
    assert len(places) > 300
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert shared.pop("MemoryCallback") == [
        "gpuprobe/integrations/huggingface.py",
        "gpuprobe/integrations/lightning.py",
    ]
    assert not shared


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count; those for type checkers alone do not."""
    modules = {_module(file): file for file in SOURCES}
    imports = {name: _imports(file, modules) - {name} for name, file in modules.items()}
    left = set(imports)
    before = 0
    while len(left) != before:  # without what imports nothing that is left, or is not imported
        before = len(left)
        imported = set().union(*(imports[name] for name in left))
        left = {name for name in left & imported if imports[name] & left}
    assert not {name: sorted(imports[name] & left) for name in left}


def test_what_runs_in_a_program_has_clocks_that_the_program_cannot_replace() -> None:
    rooms = ("hazard_watch", "hazards", "model", "native", "recording", "sampler", "torch_support")
    files = [file for room in rooms for file in (PACKAGE / room).rglob("*.py")]
    assert len(files) > 100
    assert not [file for file in files if "time" in _imports(file, {"time"})]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(file: Path, modules: Container[str]) -> set[str]:
    found: set[str] = set()
    waiting: list[ast.AST] = [_parsed(file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
        waiting += ast.iter_child_nodes(node)
    return found


@pytest.mark.xdist_group("a group")
def test_pytest_xdist_forms_groups(request: pytest.FixtureRequest) -> None:
    """Without them each worker makes all fixtures of modules."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@a group")
