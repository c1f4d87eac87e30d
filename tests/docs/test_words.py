"""The word lists of CONTRIBUTING.md, over the documentation, messages, docstrings, comments, names.

Help texts and the tables made from the code are checked where the generated pages quote them
(`test_generated.py` keeps those current); messages are checked here as string literals, with a
pair of braces for each value that is filled in.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import blocks
import pytest

CONTRIBUTING = blocks.ROOT / "CONTRIBUTING.md"
_ROW = re.compile(r"^\| (`.+`) \| (.+) \|$", re.MULTILINE)
_QUOTED = re.compile(r"``.*?``|`[^`]*`|\"[^\"]*\"|'[^'\n]*'(?!\w)", re.DOTALL)
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NAMES_OF_OTHERS = frozenset(
    [
        "STANDS_OUT",
        "asked",
        "devices_seen",
        "look_ahead",
        "seen_in_steps",
        "stands_out",
        "total_memory_seen",
    ]
)
"""Names that torch, the standard library or a released document chose."""

PACKAGES = sorted(
    path.name
    for path in (blocks.ROOT / "gpuprobe").iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
)


def word_list(text: str, heading: str = "avoid") -> dict[str, str]:
    """Each phrase of the table with this heading, and its replacement."""
    _, _, rest = text.partition(f"\n| {heading} | write |\n")
    table, _, _ = rest.partition("\n\n")
    rows = _ROW.findall(table)
    return {phrase: instead for cell, instead in rows for phrase in re.findall(r"`(.+?)`", cell)}


@cache
def avoided(*headings: str) -> dict[str, re.Pattern[str]]:
    """Each phrase in lower case, with what matches it: whole words, across line breaks."""
    patterns = {}
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for phrase in [phrase for heading in headings for phrase in word_list(text, heading)]:
        body = r"\s+".join(map(re.escape, phrase.split()))
        after = r"(?!\w)" if phrase[-1].isalnum() else ""
        patterns[phrase.lower()] = re.compile(rf"(?<!\w){body}{after}", re.IGNORECASE)
    return patterns


def matches(text: str, *headings: str) -> Iterator[re.Match[str]]:
    """Every phrase of the lists in a text. Searching plainly first is many times as fast."""
    plain = " ".join(text.lower().split())
    for phrase, pattern in avoided(*(headings or ("avoid",))).items():
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


def explanations(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, of attributes too, and of each block of comments. Quoted
    text is replaced by dots.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, _QUOTED.sub("...", node.value.value)
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield last - len(block) + 1, _QUOTED.sub("...", "\n".join(block))
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield last - len(block) + 1, _QUOTED.sub("...", "\n".join(block))


def names(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each name that the source defines: functions, classes, arguments, variables,
    attributes that it assigns.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def in_code(source: str) -> list[str]:
    """Phrases to avoid in the docstrings, comments and names of a module, with their lines."""
    hits = [
        (line + text.count("\n", 0, m.start()), repr(m[0]))
        for line, text in explanations(source)
        for m in matches(text, "avoid", "avoid in code")
    ]
    parts = word_list(CONTRIBUTING.read_text(encoding="utf-8"), "avoid in names")
    hits += [
        (line, f"the name {name}")
        for line, name in names(source)
        if name not in _NAMES_OF_OTHERS
        and not parts.keys().isdisjoint(part.lower() for part in _PART.findall(name))
    ]
    return [f"{line}: {hit}" for line, hit in sorted(set(hits))]


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


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_comments_and_names_keep_to_the_word_list(package: str) -> None:
    path = blocks.ROOT / "gpuprobe" / package
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    hits = [
        f"{file.relative_to(blocks.ROOT)}:{hit}"
        for file in files
        for hit in in_code(file.read_text(encoding="utf-8"))
    ]
    assert not hits, "see the word lists in CONTRIBUTING.md:\n" + "\n".join(hits)


@pytest.mark.parametrize(
    "source",
    [
        '"""It\nsays so."""\n',
        "x = 1  # a comment that says\n# so\n",
        "# the row is\n# of a table\n",
        "def told(): ...\n",
        "def f(wanted): ...\n",
        "class _Seen: ...\n",
        "self.x.was_asked = 1\n",
        'X = 1\n"""What is wanted."""\n',
    ],
)
def test_a_word_that_is_put_back_in_the_code_is_found(source: str) -> None:
    assert in_code(source)


def test_quoted_text_and_names_of_others_are_exempt() -> None:
    assert in_code('"""torch\'s `says`, "told" and ``asked``."""\nx.said()\n') == []


def test_every_phrase_has_a_replacement() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for heading, least in (("avoid", 60), ("avoid in code", 15), ("avoid in names", 35)):
        phrases = word_list(text, heading)
        assert len(phrases) > least
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
