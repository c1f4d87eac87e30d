"""Edits of random programs: the result is Python, other lines stay, git makes the same file."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.remedies.edits import (
    CloneStored,
    DeleteAfterUse,
    Detach,
    Edit,
    ExpandInsteadOfRepeat,
    InsertCall,
    LimitCache,
    LimitEntries,
    MapLocationCpu,
    NoGrad,
    ReleasePart,
    SetKeyword,
    ToCpu,
    Where,
    apply,
)
from gpuprobe.remedies.text import ProgramText, Refusal, Refused, parsed

NAMES = ("a", "b", "c")
SIMPLE = (
    "{n} = f({m}, {k})",
    "{n} = {m} + {n}",
    "{n} += {m}",
    "h.append({m})",
    "h['é'].append(({m}, {k}))",
    "h.append(\n{i}    {m}  # kept\n{i}    + {n},\n{i})",
    "self.{n} = {m} * {k}",
    "if {m}: g({n}); h.append({m})",
    "g({n}); {m} = 3  # ü",
    '{n} = """\n{m}\n  {n}"""',
    "print(f'{{{n}}} {{{m}:>{k}}}')",
    "g(({n} := {m}), k={k},)",
    "{n} = torch.load('p', **{m})",
    "{n} = torch.load(\n{i}    'p',\n{i})",
    "{m}.backward()",
    "{n} = [{m} + i for i in range({k})]",
    "k = lambda: {n}",
    "del {n}",
    "return {m}",
    "yield {m}",
    "break",
    "continue",
    "global {n}",
    "assert {m}, \\\n    {n}",
    "pass",
    "d[{k}] = {m}",
)
INSERTING = (InsertCall, LimitEntries, DeleteAfterUse, ReleasePart)
HEADERS = (
    "for {n} in range({k}):",
    "while {m} < {k}:",
    "if {m}:",
    "with torch.no_grad() as {n}:",
    "def f{k}({n}, {m}=None):",
    "@staticmethod\n{i}def g{k}({n}):",
    "@functools.lru_cache({k})\n{i}def c{k}({n}):",
    "class A{k}:",
    "async def e{k}(\n{i}    {n}\n{i}):",
)


@st.composite
def blocks(draw: st.DrawFn, indent: str, unit: str, depth: int) -> str:
    """The source of statements, indented."""
    text = ""
    for _ in range(draw(st.integers(1, 4))):
        words = {
            "n": draw(st.sampled_from(NAMES)),
            "m": draw(st.sampled_from(NAMES)),
            "k": draw(st.integers(0, 9)),
            "i": indent,
        }
        if depth and draw(st.booleans()):
            header = draw(st.sampled_from(HEADERS)).format(**words)
            text += f"{indent}{header}\n{draw(blocks(indent + unit, unit, depth - 1))}"
            other = draw(st.sampled_from(("", "", "else", "elif", "try")))
            if other == "try":
                body = draw(blocks(indent + unit, unit, 0))
                text += f"{indent}try:\n{body}{indent}except E as {words['n']}:\n{body}"
            elif other and header.startswith(("if", "while", "for")):
                elif_ = other == "elif" and header.startswith("if")
                text += f"{indent}{'elif ' + words['m'] if elif_ else 'else'}:\n"
                text += draw(blocks(indent + unit, unit, 0))
        else:
            text += f"{indent}{draw(st.sampled_from(SIMPLE)).format(**words)}\n"
        text += draw(st.sampled_from(("", "", "\n", "# é\n")))
    return text


@st.composite
def sources(draw: st.DrawFn) -> bytes:
    """A program that Python can compile, with one kind of line ends."""
    unit = draw(st.sampled_from(("    ", "\t", "  ")))
    head = draw(st.sampled_from(("", "import torch\n", '"""Doc."""\nimport torch as th\n', "#!\n")))
    outer, indent = "", ""
    if draw(st.booleans()):  # where a statement may leave a function and a loop
        outer, indent = f"def run(a, b, c):\n{unit}for a in b:\n", unit * 2
    text = head + outer + draw(blocks(indent, unit, 2))
    if draw(st.booleans()):
        text = text.rstrip("\n")
    text = text.replace("\n", draw(st.sampled_from(("\n", "\n", "\r\n"))))
    return text.encode()


@st.composite
def edits(draw: st.DrawFn, lines: int) -> Edit:
    """An edit of any line."""
    line = draw(st.integers(1, lines))
    name = draw(st.sampled_from(NAMES))
    return draw(
        st.sampled_from(
            [
                Detach(line),
                Detach(line, name),
                ToCpu(line, name),
                DeleteAfterUse(line, name),
                ReleasePart(line, f"{name}.out"),
                NoGrad(line, line),
                NoGrad(line, min(lines, line + 2)),
                SetKeyword(line, "f", "k", "1"),
                SetKeyword(line, "g", "k", None),
                MapLocationCpu(line),
                CloneStored(line),
                ExpandInsteadOfRepeat(line),
                InsertCall(line, "gc.collect()"),
                InsertCall(line, "gc.collect()", Where.END_OF_LOOP),
                InsertCall(line, "torch.cuda.empty_cache()", Where.AFTER_LOOP),
                LimitEntries(line, "d", 2),
                LimitCache(line),
            ]
        )
    )


def rows(data: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+\Z", data)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_programs(data: st.DataObject) -> None:
    source = data.draw(sources())
    text = parsed("a b.py", source)
    if isinstance(text, Refused):
        return
    edit = data.draw(edits(len(text.starts)))
    found = apply(text, [edit])
    if isinstance(found, Refused):
        assert found.reason not in (Refusal.INVALID, Refusal.OVERLAP)
        return
    ast.parse(found.text)
    compile(found.data, "a.py", "exec", dont_inherit=True)
    assert_other_lines_stay(edit, text, found)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a b.py")
        path.write_bytes(source)
        patch = text.patch(found)
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, input=patch, cwd=folder, check=True)
        assert path.read_bytes() == found.data


def assert_other_lines_stay(edit: Edit, text: ProgramText, found: ProgramText) -> None:
    """The lines that the edit does not change are in the result, in order, with their bytes."""
    before, after = rows(text.data), rows(found.data)
    changed = set(range(len(before)))
    at = 0
    for number, row in enumerate(before):
        last = number == len(before) - 1 and not row.endswith(b"\n")
        for here in range(at, len(after)):
            if after[here] == row or (last and after[here].rstrip(b"\r\n") == row):
                changed.discard(number)
                at = here + 1
                break
    if isinstance(edit, NoGrad):
        # Its lines are indented, and no other is changed.
        assert all(
            any(row.strip() == other.strip() for other in after)
            for row in (before[number] for number in changed)
        )
        return
    if isinstance(edit, INSERTING) and not one_line(text):
        assert not changed
    assert len(changed) <= 4


def one_line(text: ProgramText) -> bool:
    return b";" in text.data or any(
        isinstance(node, ast.If) and node.body[0].lineno == node.lineno
        for node in ast.walk(text.tree)
    )
