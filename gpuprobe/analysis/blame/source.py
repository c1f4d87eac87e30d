"""The source of a program as a baseline keeps it: a digest of each statement, no text.

A statement's digest is of what it does: comments, docstrings, annotations, line breaks and
brackets that change nothing are not in it. Its *shape* is the same without the names that people
choose (variables, the program's own functions and attributes), so that a renaming can be told from
a change.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from gpuprobe.errors import DataError

_TOKEN: Final = re.compile(
    r"\.|(?P<indent>[\w-])(?P<exact>[\w-]{4})(?P<shape>[\w@-][\w-]{2})|,([\w-]{4})"
)
DECORATED: Final = "@"
"""What the shape of a decorator begins with."""

_DIGITS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@dataclass(frozen=True, slots=True)
class Statement:
    """A simple statement, or the header of a compound one, on lines ``start`` to ``end`` (from 1).
    ``parts``: the digests of the text of each of its lines."""

    start: int
    end: int
    indent: int
    exact: str
    shape: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """One file. ``text`` is None where only digests are known, of a baseline that was read."""

    statements: tuple[Statement, ...]
    count: int  # of its lines
    text: str | None = None

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The text of its lines; empty where it is not known."""
        return tuple((self.text or "").split("\n")) if self.text is not None else ()

    @cached_property
    def by_line(self) -> dict[int, int]:
        """From a line to the number of the innermost statement that covers it."""
        found: dict[int, int] = {}
        for number, statement in enumerate(self.statements):
            for line in range(statement.start, statement.end + 1):
                found[line] = number
        return found

    def encode(self) -> str:
        """All digests as one word of characters, seven or eight for each line that has code."""
        tokens: list[list[str]] = [[] for _ in range(self.count)]
        for item in self.statements:
            tokens[item.start - 1].append(f"{_DIGITS[item.indent]}{item.exact}{item.shape}")
            for line, part in enumerate(item.parts, item.start - 1):
                if len(item.parts) > 1:
                    tokens[line].append(f",{part}")
        return "".join("".join(token) + "." for token in tokens)


def decode(word: str) -> Source:
    """What `Source.encode` wrote. Raises DataError for anything else."""
    statements: list[Statement] = []
    line, at = 1, 0
    open_: list[str] = []

    def close() -> None:
        if open_:
            last = statements[-1]
            end = last.start + len(open_) - 1
            statements[-1] = Statement(
                last.start, end, last.indent, last.exact, last.shape, tuple(open_)
            )
            open_.clear()

    while at < len(word):
        match = _TOKEN.match(word, at)
        if match is None:
            raise DataError("the digests of a source file are damaged")
        at = match.end()
        if match[0] == ".":
            line += 1
        elif match["exact"]:
            close()
            indent = _DIGITS.index(match["indent"])
            statements.append(Statement(line, line, indent, match["exact"], match["shape"], ("",)))
        else:
            open_.append(match[4])
    close()
    return Source(tuple(statements), line - 1)


def source_of(text: str) -> Source:
    """Take a file's text apart. What is not valid Python is taken line by line."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = text.split("\n")
    count = len(lines) - (not lines[-1])
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        found = [
            _statement(lines, number, number, line.strip(), line.strip())
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        return Source(tuple(found), count, text)
    return Source(tuple(_statements(tree, lines)), count, text)


def header_end(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> int:
    """The last line of a statement, or of a compound one's header."""
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    first = getattr(node, "lineno", 0)
    if not body or not isinstance(body, list):
        return int(getattr(node, "end_lineno", None) or first)
    inner = body[0]
    start = min((d.lineno for d in getattr(inner, "decorator_list", ())), default=0)
    start = start or getattr(inner, "lineno", 0) or inner.pattern.lineno
    return max(first, start - 1) if start > first else first


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is text alone, which does nothing."""
    return isinstance(node, ast.Expr) and (
        isinstance(node.value, ast.Constant) and isinstance(node.value.value, (str, type(...)))
    )


def nested(node: ast.AST) -> Iterator[ast.AST]:
    """The statements, handlers and cases in a block of a compound statement."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield from block


def _statements(tree: ast.AST, lines: Sequence[str]) -> Iterator[Statement]:
    for node in nested(tree):
        if isinstance(node, ast.stmt) and not is_docstring(node):
            for decorator in getattr(node, "decorator_list", ()):
                end = decorator.end_lineno or decorator.lineno
                words = ("@" + _words(decorator, False), "@" + _words(decorator, True))
                found = _statement(lines, decorator.lineno, end, *words)
                yield replace(found, shape=DECORATED + found.shape[:2])
            words = _words(node, False), _words(node, True)
            end = _code_end(lines, node.lineno, header_end(node))
            yield _statement(lines, node.lineno, end, *words)
        elif isinstance(node, ast.ExceptHandler):
            yield _statement(lines, node.lineno, node.lineno, _words(node, False), "except")
        elif isinstance(node, ast.match_case):
            line = node.pattern.lineno
            yield _statement(lines, line, line, _words(node, False), "case")
        yield from _statements(node, lines)


def _code_end(lines: Sequence[str], start: int, end: int) -> int:
    """``end`` without the blank lines and comments after a header."""
    while end > start and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return end


def _statement(lines: Sequence[str], start: int, end: int, exact: str, shape: str) -> Statement:
    first = lines[start - 1]
    indent = min(
        len(_DIGITS) - 1, (len(first.expandtabs()) - len(first.expandtabs().lstrip())) // 2
    )
    parts = tuple(digest(lines[line - 1].strip(), 4) for line in range(start, end + 1))
    if len(parts) == 1:
        parts = ("",)
    return Statement(start, end, indent, digest(exact, 4), digest(shape, 3), parts)


def digest(text: str, length: int) -> str:
    """``length`` characters, at most 8, that stand for a text."""
    found = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return base64.urlsafe_b64encode(found).decode("ascii")[:length]


_BLOCKS = frozenset(("body", "orelse", "finalbody", "handlers", "cases", "decorator_list"))
_LEFT_OUT = frozenset(
    (
        "ctx",
        "type_comment",
        "returns",
        "kind",
        "type_params",
        "annotation",
        "simple",
        "type_ignores",
    )
)


def _words(node: ast.AST, blind: bool) -> str:
    """What a statement does, as text: the same for all versions of Python from 3.10. ``blind`` to
    names that people choose."""
    return "".join(_serialized(node, blind, top=True))


def _serialized(node: object, blind: bool, *, top: bool = False) -> Iterator[str]:
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _serialized(item, blind)
        yield "]"
        return
    if not isinstance(node, ast.AST):
        yield f"{node!r} "
        return
    yield f"({type(node).__name__} "
    if blind and isinstance(node, ast.Name):
        yield ")"
        return
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name in _LEFT_OUT or (top and name in _BLOCKS):
            continue
        if blind and (
            (name in ("name", "asname", "arg") and not isinstance(node, ast.keyword))
            or (name == "attr" and _is_self(node))
            or name in ("names", "module", "level")
        ):
            continue
        yield f"{name}="
        yield from _serialized(value, blind)
    yield ")"


def _is_self(node: ast.AST) -> bool:
    """Whether this is an attribute of ``self``, or of one of its attributes."""
    value = getattr(node, "value", None)
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in ("self", "cls")
