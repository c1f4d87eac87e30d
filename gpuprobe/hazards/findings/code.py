"""The program's source around a line: statements, their enclosing contexts, and changes.

A file is parsed as `linecache` has it. A line without source, or whose file is not Python, has no
statement.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import NamedTuple

from gpuprobe.hazards.findings.results import Proof
from gpuprobe.model.findings import Finding, Insertion
from gpuprobe.model.patches import file_diff

_parsed: dict[str, tuple[int, ast.Module | None]] = {}


class StreamBlock(NamedTuple):
    """A ``with torch.cuda.stream(...)``: its statement, and the stream's expression."""

    statement: ast.stmt
    stream: str


@dataclass(frozen=True)
class StatementAt:
    """The innermost statement of a line that is the first on its own line. ``around``: the
    statements that enclose it, innermost first, up to its function.
    """

    file: str
    node: ast.stmt
    around: tuple[ast.stmt, ...]
    inner: tuple[ast.stmt, ...]
    """Statements within ``node`` that the line belongs to, if they are written in one line."""

    @property
    def line(self) -> int:
        decorators = getattr(self.node, "decorator_list", ())
        return min((self.node.lineno, *(int(one.lineno) for one in decorators)))

    @property
    def end(self) -> int:
        return self.node.end_lineno or self.node.lineno

    @property
    def names_of_comprehensions(self) -> frozenset[str]:
        """The variables that exist only in comprehensions of the statement."""
        return frozenset(
            name.id
            for node in ast.walk(self.node)
            if isinstance(node, ast.comprehension)
            for name in ast.walk(node.target)
            if isinstance(name, ast.Name)
        )

    @property
    def indent(self) -> str:
        text = linecache.getline(self.file, self.line)
        return text[: len(text) - len(text.lstrip())]

    @property
    def blocks(self) -> list[StreamBlock]:
        """Enclosing blocks of streams, innermost first."""
        return [block for node in self.around for block in _stream_blocks(node)]

    @property
    def inner_blocks(self) -> list[StreamBlock]:
        """Blocks of streams that it begins itself and that enclose the line."""
        return [block for node in (self.node, *self.inner) for block in _stream_blocks(node)]

    def before(self, *code: str) -> Insertion:
        """An insertion of lines before it."""
        return Insertion(self.file, self.line, "".join(f"{self.indent}{one}\n" for one in code))

    def after(self, *code: str) -> Insertion:
        """An insertion of lines after it."""
        return Insertion(self.file, self.end + 1, "".join(f"{self.indent}{one}\n" for one in code))

    @property
    def leaves(self) -> bool:
        """Whether the next statement is not reached."""
        return isinstance(self.node, (ast.Return, ast.Raise, ast.Break, ast.Continue))

    @property
    def branches(self) -> list[ast.stmt]:
        """Enclosing statements that may be skipped or repeated."""
        return [node for node in self.around if not isinstance(node, (ast.With, ast.AsyncWith))]


def statement(file: str, line: int) -> StatementAt | None:
    """The statement of a line; None if its source is unknown."""
    module = _module(file)
    if module is None:
        return None
    chain = list(_chain(module.body, line))
    while chain and isinstance(chain[-1], ast.ExceptHandler):
        chain.pop()
    inner: list[ast.stmt] = []
    while chain and not _begins_a_line(file, chain[-1]):
        inner.insert(0, chain.pop())
    if not chain:
        return None
    around: list[ast.stmt] = []
    for node in chain[-2::-1]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        around.append(node)
    return StatementAt(file, chain[-1], tuple(around), tuple(inner))


def _module(file: str) -> ast.Module | None:
    lines = linecache.getlines(file)
    if not lines:
        return None
    text = "".join(lines)
    key = hash(text)
    known = _parsed.get(file)
    if known is None or known[0] != key:
        try:
            tree: ast.Module | None = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            tree = None
        _parsed[file] = known = (key, tree)
    return known[1]


def _chain(body: Sequence[ast.AST], line: int) -> Iterator[ast.stmt]:
    """Statements that contain the line, outermost first."""
    for node in body:
        first = min(
            (node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))),  # type: ignore[attr-defined]
        )
        if first <= line <= (node.end_lineno or node.lineno):  # type: ignore[attr-defined]
            yield node  # type: ignore[misc]
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                yield from _chain(getattr(node, name, ()), line)
            return


def _begins_a_line(file: str, node: ast.AST) -> bool:
    if not isinstance(node, ast.stmt):
        return False  # a case of a match
    text = linecache.getline(file, node.lineno)
    before = text.encode()[: node.col_offset]
    return not before.strip() and not text.lstrip().startswith(("elif ", "elif("))


def _stream_blocks(node: ast.stmt) -> Iterator[StreamBlock]:
    if not isinstance(node, (ast.With, ast.AsyncWith)):
        return
    for item in reversed(node.items):
        call = item.context_expr
        if (
            isinstance(call, ast.Call)
            and len(call.args) == 1
            and ast.unparse(call.func).rpartition(".")[2] == "stream"
        ):
            yield StreamBlock(node, ast.unparse(call.args[0]))
        elif isinstance(call, (ast.Name, ast.Attribute)):
            yield StreamBlock(node, ast.unparse(call))


def handle_of_call(found: StatementAt) -> str | None:
    """The name that the result of an asynchronous collective is assigned to; an empty one if it is
    discarded; None if the statement is anything else.
    """
    node = found.node
    if not isinstance(node, (ast.Expr, ast.Assign)) or not isinstance(node.value, ast.Call):
        return None
    call = node.value
    functional = ast.unparse(call.func).startswith("torch.ops.")
    if not functional and not any(keyword.arg == "async_op" for keyword in call.keywords):
        return None
    if isinstance(node, ast.Expr):
        return ""
    target = node.targets[0]
    named = len(node.targets) == 1 and isinstance(target, (ast.Name, ast.Attribute))
    return ast.unparse(target) if named else None


def is_name(expression: str) -> bool:
    """Whether an expression is a name, or an attribute of one: it has no effects."""
    return all(part.isidentifier() for part in expression.split("."))


def is_plain(expression: str) -> bool:
    """Whether an expression for a stream is a name, an attribute, or an item (``streams[i % 2]``):
    it can be evaluated twice.
    """
    return _is_plain(ast.parse(expression, mode="eval").body)


def _is_plain(node: ast.expr, *, index: bool = False) -> bool:
    if isinstance(node, ast.Attribute):
        return _is_plain(node.value)
    if isinstance(node, ast.Subscript):
        return _is_plain(node.value) and _is_plain(node.slice, index=True)
    if isinstance(node, ast.BinOp):
        return index and _is_plain(node.left, index=True) and _is_plain(node.right, index=True)
    return isinstance(node, ast.Name) or (index and isinstance(node, ast.Constant))


def free_name(found: StatementAt, name: str) -> str:
    """A name that the file does not use."""
    words = set(re.findall(r"\w+", "".join(linecache.getlines(found.file))))
    candidate, number = name, 2
    while candidate in words:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def torch_name(file: str) -> str:
    """The file's name for ``torch.cuda``, from its imports."""
    module = _module(file)
    for node in ast.walk(module) if module is not None else ():
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for name in node.names:
                if name.name == "cuda":
                    return name.asname or name.name
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "torch" and name.asname:
                    return f"{name.asname}.cuda"
    return "torch.cuda"


def applied(lines: Sequence[str], insertions: Iterable[Insertion]) -> list[str]:
    """The lines of a file with insertions; equal ones at one line are inserted once."""
    by_line: dict[int, list[Insertion]] = {}
    for one in dict.fromkeys(insertions):
        by_line.setdefault(one.line, []).append(one)
    changed = list(lines)
    for line in sorted(by_line, reverse=True):
        places = by_line[line]
        text = "".join(one.text for one in sorted(places, key=lambda one: one.replaces > 0))
        start = line - 1
        changed[start : start + max(one.replaces for one in places)] = text.splitlines(True)
    return changed


def unified_diff(
    insertions: Iterable[Insertion], name_of: Callable[[str], str] | None = None
) -> str:
    """The changes as a unified diff, by file. ``name_of`` returns the path of a file in the diff;
    by default those below the current folder are relative to it.
    """
    text = ""
    by_file: dict[str, list[Insertion]] = {}
    for one in insertions:
        by_file.setdefault(one.file, []).append(one)
    for file, changes in by_file.items():
        lines = _lines(file)
        name = (name_of or _relative)(file)
        text += file_diff(name, lines, applied(lines, changes))
    return text


class Patch(NamedTuple):
    """The changes of several findings as one unified diff, for ``git apply`` in ``folder``.
    ``left_out``: the number of findings without a change of known lines, with one that did not
    remove the race when it was checked, or with one of lines that another finding replaces.
    """

    text: str
    folder: Path
    left_out: int


def patch_of(findings: Iterable[Finding], folder: Path) -> Patch:
    """One patch of all findings. Its paths are relative to ``folder`` if all files are below it,
    otherwise to the deepest folder that contains them.
    """
    chosen: dict[Insertion, None] = {}
    replaced: dict[tuple[str, int], Insertion] = {}
    left_out = 0
    for finding in findings:
        changes = _in_files(finding)
        lines = {
            (one.file, line): one
            for one in changes
            for line in range(one.line, one.line + one.replaces)
        }
        conflict = any(replaced.get(key, one) != one for key, one in lines.items())
        if not changes or conflict or Proof.of(finding) is Proof.FAILS:
            left_out += 1
            continue
        replaced.update(lines)
        chosen.update(dict.fromkeys(changes))
    files = {one.file for one in chosen}
    if not all(Path(file).is_relative_to(folder) for file in files):
        folder = Path(os.path.commonpath([str(Path(file).parent) for file in files]))
    names = {file: Path(file).relative_to(folder).as_posix() for file in files}
    return Patch(unified_diff(chosen, names.__getitem__), folder, left_out)


def _in_files(finding: Finding) -> list[Insertion]:
    """The changes of a finding's fix, with the absolute paths of their files. Empty if one of them
    is not the file of a place in the finding.
    """
    places = [*finding.related, *([] if finding.location is None else [finding.location])]
    files = {Path(place.file).absolute().as_posix() for place in places}
    found = []
    for one in () if finding.fix is None else finding.fix.insertions:
        file = next((name for name in files if f"/{name}".endswith(f"/{one.file}")), None)
        if file is None:
            return []
        found.append(replace(one, file=file))
    return found


def _relative(file: str) -> str:
    """A path for `git apply` and ``patch -p1``: relative to the working directory or to the
    program's folder if it is in one of them; else to the root folder.
    """
    path = PurePath(file)
    if not path.is_absolute():
        return path.as_posix()
    for folder in (Path.cwd, _program_folder):
        with contextlib.suppress(ValueError, OSError):
            return path.relative_to(folder()).as_posix()
    return path.relative_to(path.anchor).as_posix()


def _program_folder() -> Path:
    """The folder of the script that runs. Raises ValueError if none does."""
    script = Path(sys.argv[0]) if sys.argv else Path()
    if not script.is_file():
        raise ValueError("no script")
    return script.absolute().parent


def _lines(file: str) -> list[str]:
    """The lines of a file, with or without a last newline: `linecache` always adds one."""
    lines = linecache.getlines(file)
    if lines:
        try:
            with Path(file).open("rb") as stream:
                stream.seek(-1, 2)
                if stream.read() not in (b"\n", b"\r"):
                    lines = [*lines[:-1], lines[-1].removesuffix("\n")]
        except (OSError, ValueError):
            return lines  # no file: compiled from a string
    return lines
