"""The source of a program as a baseline stores it (a digest of each statement, no text), and the
changes between two sources.

A digest covers what a statement does, without comments, docstrings, annotations, line breaks and
redundant brackets. The *shape* is the same without the names that people choose (variables, the
program's own functions and attributes), so that a renaming is distinct from a change.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Final, NamedTuple

from gpuprobe.errors import DataError

_TOKEN: Final = re.compile(
    r"\.|(?P<indent>[\w-])(?P<exact>[\w-]{4})(?P<shape>[\w@-][\w-]{2})|,([\w-]{4})"
)
DECORATED: Final = "@"
"""The first character of a decorator's shape."""

_DIGITS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@dataclass(frozen=True, slots=True)
class Statement:
    """A simple statement, or the header of a compound one, on lines ``start`` to ``end`` (from 1).
    ``parts``: the digest of the text of each of its lines.
    """

    start: int
    end: int
    indent: int
    exact: str
    shape: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The source of one file. ``text`` is None if it was read from a baseline with digests only."""

    statements: tuple[Statement, ...]
    count: int  # lines
    text: str | None = None

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The text of its lines; empty if unknown."""
        return tuple((self.text or "").split("\n")) if self.text is not None else ()

    @cached_property
    def by_line(self) -> dict[int, int]:
        """The index of the innermost statement that covers each line."""
        found: dict[int, int] = {}
        for number, statement in enumerate(self.statements):
            for line in range(statement.start, statement.end + 1):
                found[line] = number
        return found

    def encode(self) -> str:
        """All digests as one string, seven or eight characters for each line with code."""
        tokens: list[list[str]] = [[] for _ in range(self.count)]
        for item in self.statements:
            tokens[item.start - 1].append(f"{_DIGITS[item.indent]}{item.exact}{item.shape}")
            for line, part in enumerate(item.parts, item.start - 1):
                if len(item.parts) > 1:
                    tokens[line].append(f",{part}")
        return "".join("".join(token) + "." for token in tokens)


def decode(word: str) -> Source:
    """The source that `Source.encode` wrote. Raises DataError for anything else."""
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
    """Split a file's text into statements; into lines if it is not valid Python."""
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
    """Whether a statement is a string or an ellipsis, which does nothing."""
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
    """The digest of a text in ``length`` characters, at most 8."""
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
    """A statement's syntax tree as text, the same for all versions of Python from 3.10. ``blind``:
    without the names that people choose.
    """
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


NEW: Final = "new"  # nothing equal or similar existed
GAP: Final = "gap"  # a neighbour was removed
INDENTED: Final = "indented"  # it is in another block
RENAMED: Final = "renamed"  # the same with other names
MOVED: Final = "moved"  # it was elsewhere before

_MOST_STATEMENTS: Final = 20_000
"""Limit of the statements of one file, before and after: larger files are not aligned (the time is
their product)."""

_ALIKE: Final = 0.5
"""The share of statements that files of different names must have in common to be the same file."""


_NO_SOURCE: Final = Source((), 0)


@dataclass(frozen=True, slots=True)
class ChangedLine:
    """A changed line: ``line`` as a diff shows it, in ``statement`` (the index in the file).
    ``removed``: the old lines that it replaces, ``(first, last)``, or None. ``old_text``: the text
    of the old line, if it is a single one and known.
    """

    file: str
    line: int
    statement: int
    kind: str
    removed: tuple[int, int] | None = None
    old_text: str = ""


def changes(before: Mapping[str, Source], after: Mapping[str, Source]) -> tuple[ChangedLine, ...]:
    """The changed lines of ``after``, by file and line. Files that only exist on one side are new,
    deleted, or renamed.
    """
    pairs = _paired(before, after)
    removed: Counter[str] = Counter()
    added: Counter[str] = Counter()
    aligned = {}
    for name, source in after.items():
        old = before.get(pairs.get(name, ""))
        aligned[name] = blocks = list(_aligned(old, source))
        for block in blocks:
            if not block.equal:
                removed.update(item.exact for item in block.before)
                added.update(item.exact for _, item in block.after)
    for name in before.keys() - set(pairs.values()):
        removed.update(item.exact for item in before[name].statements)
    found: list[ChangedLine] = []
    for name, blocks in aligned.items():
        old = before.get(pairs.get(name, ""))
        for block in blocks:
            if block.equal:
                found += _reindented(name, block)
            else:
                changed = _block_changes(name, after[name], block, removed, added)
                found += (replace(change, old_text=_text_of(old, change)) for change in changed)
    # Statements that left a block already report its removed header.
    indented = {(change.file, change.statement) for change in found if change.kind == INDENTED}
    kept = [
        change
        for change in found
        if change.kind != GAP
        or not indented & {(change.file, change.statement + next_) for next_ in (0, 1)}
    ]
    return tuple(sorted(kept, key=lambda change: (change.file, change.line, change.kind)))


def renamed_files(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The name in ``before`` of each file in ``after`` that exists there, given the texts of
    both."""
    alone = {name for name in (*before, *after) if name not in before or name not in after}
    if not before.keys() - after.keys() or not after.keys() - before.keys():
        return {name: name for name in after if name in before}
    sides = [
        {name: source_of(text) if name in alone else _NO_SOURCE for name, text in side.items()}
        for side in (before, after)
    ]
    return _paired(*sides)


def _text_of(old: Source | None, change: ChangedLine) -> str:
    """The old line that a change replaced; empty if there are none or several, or it is unknown."""
    if old is None or change.removed is None or change.removed[0] != change.removed[1]:
        return ""
    number = change.removed[0]
    return old.lines[number - 1].strip() if number <= len(old.lines) else ""


def _paired(before: Mapping[str, Source], after: Mapping[str, Source]) -> dict[str, str]:
    """The name before of each name after."""
    pairs = {name: name for name in after if name in before}
    left = [name for name in before if name not in after]
    for name in after:
        if name in pairs:
            continue
        ours = Counter(item.exact for item in after[name].statements)
        best, most = "", 0.0
        for other in left:
            theirs = Counter(item.exact for item in before[other].statements)
            alike = (ours & theirs).total() / max(1, ours.total(), theirs.total())
            alike += 0.01 * (posixpath.basename(name) == posixpath.basename(other))
            if alike > most:
                best, most = other, alike
        if most >= _ALIKE:
            pairs[name] = best
            left.remove(best)
    return pairs


class _Block(NamedTuple):
    """A stretch of both sources. ``after``: statements with their indices, from ``at`` on."""

    equal: bool
    before: list[Statement]
    at: int
    after: list[tuple[int, Statement]]


def _aligned(before: Source | None, after: Source) -> Iterator[_Block]:
    two = list(enumerate(after.statements))
    if before is None:
        yield _Block(False, [], 0, two)
        return
    one = list(before.statements)
    if len(one) + len(two) > _MOST_STATEMENTS:
        return
    matcher = SequenceMatcher(
        None, [item.exact for item in one], [item.exact for _, item in two], autojunk=False
    )
    for tag, i, i2, j, j2 in matcher.get_opcodes():
        yield _Block(tag == "equal", one[i:i2], j, two[j:j2])


def _reindented(name: str, block: _Block) -> Iterator[ChangedLine]:
    for one, (number, two) in zip(block.before, block.after, strict=True):
        if one.indent != two.indent:
            yield ChangedLine(name, two.start, number, INDENTED)


def _block_changes(
    name: str, after: Source, block: _Block, removed: Counter[str], added: Counter[str]
) -> Iterator[ChangedLine]:
    """The changes of one stretch that differs. ``removed`` and ``added`` count the statements of
    all such stretches, by digest.
    """
    shapes = Counter(item.shape for item in block.before)
    is_new = False
    for number, item in block.after:
        replaced = None
        if removed[item.exact] > 0:
            removed[item.exact] -= 1
            kind = MOVED
        elif shapes[item.shape] > 0:
            shapes[item.shape] -= 1
            kind = RENAMED
        else:
            kind, is_new = NEW, True
            if block.before:
                replaced = (block.before[0].start, block.before[-1].end)
        yield ChangedLine(name, _changed_line(item, block.before), number, kind, replaced)
    if is_new:
        return
    # Statements that were removed without a replacement, and are not elsewhere now.
    renamed = Counter(item.shape for _, item in block.after)
    lost = []
    for item in block.before:
        if added[item.exact] > 0:
            added[item.exact] -= 1
        elif renamed[item.shape] > 0:
            renamed[item.shape] -= 1
        else:
            lost.append(item)
    if lost:
        yield _gap(name, after, lost, block.at + len(block.after))


def _changed_line(item: Statement, ones: Iterable[Statement]) -> int:
    """The first line of a statement that the old text does not have."""
    if len(item.parts) == 1:
        return item.start
    known = {part for one in ones for part in one.parts}
    lines = (item.start + at for at, part in enumerate(item.parts) if part not in known)
    return next(lines, item.start)


def _gap(name: str, after: Source, lost: list[Statement], at: int) -> ChangedLine:
    """The change for statements that were removed before index ``at``. It is reported at the
    neighbour in the same block, preferably the one before; behind a block's header, at the first
    statement of the block; for a decorator, at the decorated function or class.
    """
    statements = after.statements
    indent = min(item.indent for item in lost)
    number = max(0, at - 1)
    if at < len(statements):
        here = statements[at]
        is_before = bool(at) and statements[at - 1].indent >= indent
        if (
            not is_before or any(item.shape.startswith(DECORATED) for item in lost)
        ) and here.indent >= indent:
            number = at
    removed = (lost[0].start, lost[-1].end)
    if not statements:
        return ChangedLine(name, 1, 0, GAP, removed)
    return ChangedLine(name, statements[number].start, number, GAP, removed)
