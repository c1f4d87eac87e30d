"""What CONTRIBUTING.md and RELEASING.md name exists. The program there is run as a page's."""

from __future__ import annotations

import re
from pathlib import Path

import blocks
import pytest

PAGES = [blocks.ROOT / name for name in ("CONTRIBUTING.md", "RELEASING.md")]


def test_the_functions_of_the_runtime_can_be_debugged() -> None:
    (name,) = re.findall(r"break (gpn_\w+)", PAGES[0].read_text("utf-8"))
    sources = (blocks.ROOT / "gpuprobe" / "native" / "runtime").glob("*.c")
    function = f"FN({name.removeprefix('gpn_')})("
    assert any(function in source.read_text("utf-8") for source in sources)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_and_files_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    makefile = (blocks.ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = re.findall(r"(?:\$ |`)make ([\w -]+)", text)
    assert named
    assert {word for words in named for word in words.split()} - {"TORCH", "PY_VERSION"} <= targets
    files = re.findall(r"\b((?:tests|packaging|docs|gpuprobe|examples)/[\w/.-]+\.\w+)", text)
    assert files
    assert not [file for file in files if not (blocks.ROOT / file).exists()]


def test_the_page_of_the_runtime_has_each_of_its_files() -> None:
    folder = blocks.ROOT / "gpuprobe" / "native" / "runtime"
    named = set(re.findall(r"`(\w+\.[ch])`", (folder / "README.md").read_text("utf-8")))
    assert named == {file.name for file in folder.glob("*.[ch]")}
