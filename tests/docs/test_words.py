"""The word list of CONTRIBUTING.md: no phrase of its first column reaches a user.

Public docstrings, help texts and the tables made from the code are checked where the generated
pages quote them (`test_generated.py` keeps those current); messages are checked here as string
literals, with a pair of braces for each value that is filled in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import blocks
import pytest

CONTRIBUTING = blocks.ROOT / "CONTRIBUTING.md"
_ROW = re.compile(r"^\| (`.+`) \| (.+) \|$", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def word_list(text: str) -> dict[str, str]:
    """Each phrase to avoid, and what to write instead."""
    rows = _ROW.findall(text)
    return {phrase: instead for cell, instead in rows for phrase in re.findall(r"`(.+?)`", cell)}


@cache
def avoided() -> dict[str, re.Pattern[str]]:
    """Each phrase in lower case, with what matches it: whole words, across line breaks."""
    patterns = {}
    for phrase in word_list(CONTRIBUTING.read_text(encoding="utf-8")):
        body = r"\s+".join(map(re.escape, phrase.split()))
        after = r"(?!\w)" if phrase[-1].isalnum() else ""
        patterns[phrase.lower()] = re.compile(rf"(?<!\w){body}{after}", re.IGNORECASE)
    return patterns


def matches(text: str) -> Iterator[re.Match[str]]:
    """Every phrase of the list in a text. Searching plainly first is many times as fast."""
    plain = " ".join(text.lower().split())
    for phrase, pattern in avoided().items():
        if phrase in plain:
            yield from pattern.finditer(text)


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string literal that is more than one word; docstrings apart."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Expr):  # a docstring, or one of an attribute
            skipped.add(id(node.value))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in skipped
        ):
            yield node.lineno, node.value


def in_page(text: str) -> list[str]:
    """What a page has of the list, with its line; the list itself, at its end, apart."""
    text, _, _ = text.partition("\n## Word list\n")
    return [f"{text.count(chr(10), 0, m.start()) + 1}: {m[0]!r}" for m in matches(text)]


def in_source(source: str) -> list[str]:
    texts = list(literals(source))
    if not any(matches("\n".join(text for _, text in texts))):
        return []
    return [f"{line}: {m[0]!r}" for line, text in texts for m in matches(text)]


def found(paths: Iterator[Path], what: str) -> list[str]:
    check = in_source if what == "source" else in_page
    return [
        f"{path.relative_to(blocks.ROOT)}:{hit}"
        for path in sorted(paths)
        for hit in check(path.read_text(encoding="utf-8"))
    ]


def test_the_documentation_keeps_to_the_word_list() -> None:
    pages = [*blocks.pages(), *blocks.ROOT.glob("*.md")]
    assert CONTRIBUTING in pages
    hits = found(iter(pages), "pages")
    assert not hits, "see the word list in CONTRIBUTING.md:\n" + "\n".join(hits)


def test_messages_keep_to_the_word_list() -> None:
    hits = found((blocks.ROOT / "gpuprobe").rglob("*.py"), "source")
    assert not hits, "see the word list in CONTRIBUTING.md:\n" + "\n".join(hits)


def test_every_phrase_has_a_replacement() -> None:
    phrases = word_list(CONTRIBUTING.read_text(encoding="utf-8"))
    assert len(phrases) > 60
    assert all(instead.strip() for instead in phrases.values())


@pytest.mark.parametrize("phrase", ["says", "where there is", "not known", "of its own"])
def test_a_phrase_that_is_put_back_is_found(phrase: str) -> None:
    middle = phrase.replace(" ", "\n", 1)
    assert in_page(f"One line.\nIt {middle} here, as in `{phrase}`.")[0].startswith("2: ")
    assert len(in_source(f'x = 1\nraise ValueError("it " "{phrase} {{x}}")')) == 1
    assert len(in_source(f'raise ValueError(f"it {phrase} {{x}}")')) == 1


def test_what_no_user_reads_is_not_checked() -> None:
    source = (
        '"""It says so."""\ndef f():\n    "it says so"\n    return {"says": 1}\nX = 1\n"said"\n'
    )
    assert in_source(source) == []
    assert in_page("essays, unsaid\n\n## Word list\n\n| `says` | shows |\n") == []
    assert len(in_page("| `says` | it said |\n")) == 2
