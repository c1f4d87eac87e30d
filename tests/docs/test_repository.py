"""The repository's name is set in one place."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import repository

from gpuprobe.cli import parser

LINKS = re.compile(r"github\.com/([\w.-]+/[\w.-]+?)(?=[/\"'\s)]|$)|uses: ([\w.-]+/[\w.-]+)@")
OTHERS = re.compile(r"(pytorch|actions|NVIDIA|huggingface|triton-lang|meta-pytorch)/")


def names(root: Path) -> dict[str, set[str]]:
    """Repositories of GitHub by the files that mention them, but for other people's."""
    found: dict[str, set[str]] = {}
    for path in repository.files(root):
        for link, used in LINKS.findall(path.read_text("utf-8")):
            if not OTHERS.match(link or used):
                found.setdefault(str(path.relative_to(root)), set()).add(link or used)
    return found


def test_every_page_and_message_has_the_name_of_the_one_place() -> None:
    mentioned = names(repository.ROOT)
    expected = {
        "pyproject.toml",
        "README.md",
        "docs/how-to/install.md",
        "docs/how-to/gate-memory-in-ci.md",
        "gpuprobe/cli/parser.py",
    }
    ours = {path for path, found in mentioned.items() if repository.name() in found}
    assert expected <= ours
    assert f"https://github.com/{repository.name()}/issues" == parser._ISSUES


def test_a_maintainer_changes_it_everywhere_at_once(tmp_path: Path) -> None:
    before = repository.name()
    for path in repository.files():
        copy = tmp_path / path.relative_to(repository.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    assert len(repository.rename("someone/probe", tmp_path)) >= 5
    assert repository.name(tmp_path) == "someone/probe"
    after = names(tmp_path)
    assert not any(before in found for found in after.values())
    assert after["docs/how-to/gate-memory-in-ci.md"] >= {"someone/probe"}
    assert "from gpuprobe.cli" in (tmp_path / "gpuprobe/cli/parser.py").read_text("utf-8")
    assert repository.rename("someone/probe", tmp_path) == []
    with pytest.raises(ValueError, match="is not OWNER/NAME"):
        repository.rename("someone", tmp_path)
