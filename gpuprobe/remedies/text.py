"""A source file as bytes, its syntax tree and tokens; its changes, and their unified diff.

Positions are offsets in the decoded text, so that an edit replaces characters and leaves all others
alone: encodings, line ends, tabs and comments are those of the file.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from gpuprobe.model.patches import file_diff

Statement: TypeAlias = ast.stmt
Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
BLOCKS: Final = ("body", "orelse", "finalbody")
"""The fields of a statement with statements; those of handlers and cases are within these nodes."""


class Refusal(str, Enum):
    """Why an edit does not apply."""

    NOT_PYTHON = "the file is not valid Python"
    NO_STATEMENT = "the line has no such statement"
    AMBIGUOUS = "several places of the line qualify"
    NOTHING_STORED = "the line stores no such value"
    NO_TENSOR = "the stored value is not a tensor with a graph"
    DONE_ALREADY = "the program does this already"
    NEEDED_BY_BACKWARD = "the backward pass needs it"
    USED_LATER = "it is used later"
    VISIBLE_ELSEWHERE = "other code can reach the name"
    NOT_A_LOCAL = "the name is not a variable of this scope"
    MAY_BE_UNBOUND = "the variable may have no value there"
    NOT_REACHED = "no statement can follow: the block ends there"
    IN_A_STRING = "it is inside an f-string"
    ONE_LINE = "it shares its line with another statement"
    STAR_ARGUMENTS = "the call passes ** arguments, which may have the keyword"
    COMMENT = "a comment would be lost"
    NAME_TAKEN = "the file uses the name of the module for something else"
    NOT_MECHANICAL = "the rewrite is not mechanical here"
    INVALID = "the replacement is not valid Python"
    ELSEWHERE = "the file is not one of the project"
    OVERLAP = "two edits change the same text"


class Refused(NamedTuple):
    """An edit that does not apply, with the reason. ``detail``: the name, line or expression."""

    reason: Refusal
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.value}{f': {self.detail}' if self.detail else ''}"


class Replacement(NamedTuple):
    """``text`` replaces the characters from ``start`` to ``end``, offsets in the text."""

    start: int
    end: int
    text: str


class _Token(NamedTuple):
    kind: int
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class ProgramText:
    """A file of a program. ``name``: its path in patches, with ``/``."""

    name: str
    data: bytes

    @cached_property
    def encoding(self) -> str:
        """As Python detects it. Raises SyntaxError for an unknown one."""
        return tokenize.detect_encoding(io.BytesIO(self.data).readline)[0]

    @cached_property
    def text(self) -> str:
        """The decoded text. Raises SyntaxError or UnicodeDecodeError if Python would."""
        return self.data.decode(self.encoding)

    @cached_property
    def tree(self) -> ast.Module:
        """Raises SyntaxError, ValueError or RecursionError if the file is not valid Python."""
        return ast.parse(self.text)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each line, as Python counts lines."""
        return (0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", self.text)))

    def line(self, number: int) -> str:
        """The text of a line (from 1), with its end."""
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end]

    def line_at(self, offset: int) -> int:
        """The number of the line (from 1) with a character."""
        return bisect_right(self.starts, offset)

    def indent(self, node: Statement) -> str:
        """The white space at the beginning of a statement's line."""
        text = self.line(first_line(node))
        return text[: len(text) - len(text.lstrip(" \t\f"))]

    def newline(self, number: int) -> str:
        """The end of a line; of the last one without an end, that of the first."""
        for text in (self.line(number), self.line(1)):
            found = re.search(r"[\r\n]+\Z", text)
            if found is not None:
                return found[0]
        return "\n"

    def _offset(self, line: int, column: int) -> int:
        """The offset of a column that counts UTF-8 bytes, as `ast` has it."""
        text = self.line(line)
        if not text.isascii():
            column = len(text.encode("utf-8", "surrogatepass")[:column].decode("utf-8", "replace"))
        return self.starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """The offsets of a node's first character and of the one after its last."""
        end_line, end_column = node.end_lineno, node.end_col_offset
        assert end_line is not None
        assert end_column is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(end_line, end_column),
        )

    def source(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    @cached_property
    def tokens(self) -> tuple[_Token, ...]:
        """The significant tokens and the comments."""
        skipped = (
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        )
        lines = iter([self.line(number) for number in range(1, len(self.starts) + 1)])
        # A carriage return alone ends a line for the parser, not for `tokenize`.
        plain = (re.sub(r"\r\n?\Z", "\n", line) for line in lines)
        found = []
        for token in tokenize.generate_tokens(lambda: next(plain, "")):
            if token.type not in skipped:
                start, end = (self.starts[row - 1] + at for row, at in (token.start, token.end))
                found.append(_Token(token.type, token.string, start, end))
        return tuple(found)

    def tokens_between(self, start: int, end: int) -> list[_Token]:
        """The tokens that begin within a span."""
        begins = [token.start for token in self.tokens]
        return list(self.tokens[bisect_right(begins, start - 1) : bisect_right(begins, end - 1)])

    @cached_property
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        """The parent of each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> Scope | ast.ClassDef:
        """The function, class or module that a node is directly in."""
        for found in self.ancestors(node):
            if isinstance(found, (*FUNCTIONS, ast.ClassDef, ast.Module)):
                return found
        raise AssertionError("every node is in the module")

    def statements(self, line: int) -> list[Statement]:
        """The innermost statements that the line belongs to: several if they share the line. Of a
        compound statement only the lines of its header count.
        """
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and first_line(node) <= line <= header_end(node)
        ]

    def block(self, node: Statement) -> list[Statement]:
        """The statements of the block that a statement is directly in."""
        parent = self.parents[node]
        for name in BLOCKS:
            found = getattr(parent, name, None)
            if isinstance(found, list) and node in found:
                return found
        raise AssertionError("a statement is in a block of its parent")

    def alone(self, node: Statement) -> bool:
        """Whether no other statement shares a line with this one."""
        start, end = self.span(node)
        if getattr(node, "decorator_list", None):
            start = self.starts[first_line(node) - 1]
        before = self.text[self.starts[first_line(node) - 1] : start]
        line_end = self.line(node.end_lineno or node.lineno)
        after = self.text[end : self.starts[(node.end_lineno or node.lineno) - 1] + len(line_end)]
        return (
            not before.strip()
            and re.match(r"[ \t\f]*;?[ \t\f]*(#.*)?$", after.rstrip("\r\n")) is not None
        )

    def edited(self, changes: Iterable[Replacement]) -> ProgramText | Refused:
        """The file with all changes; refused if they overlap or the result is not Python."""
        text = self.text
        limit = len(text) + 1
        ordered = sorted(
            enumerate(dict.fromkeys(changes)), key=lambda row: (row[1].start, row[1].end, row[0])
        )
        for _, (start, end, replacement) in reversed(ordered):
            if end > limit:
                return Refused(Refusal.OVERLAP)
            limit = start
            text = text[:start] + replacement + text[end:]
        try:
            found = ProgramText(self.name, text.encode(self.encoding))
            _compile(found)
        except (SyntaxError, ValueError, RecursionError) as error:
            return Refused(Refusal.INVALID, str(error))
        return found

    def patch(self, changed: ProgramText) -> bytes:
        """The difference as a patch for ``git apply``."""
        name = self.name.encode("utf-8", "surrogateescape").decode("latin-1")
        return file_diff(name, _lines(self.data), _lines(changed.data)).encode("latin-1")


def parsed(name: str, data: bytes) -> ProgramText | Refused:
    """A file that Python can compile."""
    found = ProgramText(name, data)
    try:
        _compile(found)
        found.tokens  # noqa: B018 - computed here
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
        return Refused(Refusal.NOT_PYTHON, str(error))
    return found


def _compile(text: ProgramText) -> None:
    """Raises SyntaxError, ValueError or RecursionError if Python cannot compile the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the program's own
        text.tree  # noqa: B018 - computed here
        compile(text.data, text.name, "exec", dont_inherit=True)


def first_line(node: Statement) -> int:
    """The line of a statement's first decorator, or of itself."""
    decorators: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    return min((node.lineno, *(one.lineno for one in decorators)))


def header_end(node: Statement) -> int:
    """The last line of a statement, or of a compound one's header."""
    inner = getattr(node, "body", None) or getattr(node, "cases", None)
    if not inner:
        return node.end_lineno or node.lineno
    first = inner[0]
    start = first.pattern.lineno if isinstance(first, ast.match_case) else first_line(first)
    return max(node.lineno, start - 1)


def _lines(data: bytes) -> list[str]:
    """The lines that git counts, each byte as one character."""
    return re.findall(r"[^\n]*\n|[^\n]+\Z", data.decode("latin-1"))
