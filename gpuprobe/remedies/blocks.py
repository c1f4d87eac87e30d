"""Statements inserted before and after others, in the same block."""

from __future__ import annotations

import ast

from gpuprobe.remedies.flow import leaves
from gpuprobe.remedies.text import (
    ProgramText,
    Refusal,
    Refused,
    Replacement,
    Statement,
    first_line,
)


def inserted_before(text: ProgramText, node: Statement, *code: str) -> list[Replacement] | Refused:
    """Lines before a statement; in its line if that is shared."""
    if is_elif(text, node):
        return Refused(Refusal.NOT_MECHANICAL, "elif")
    line = first_line(node)
    if _begins_its_line(text, node):
        rows = "".join(f"{text.indent(node)}{one}{text.newline(line)}" for one in code)
        start = text.starts[line - 1]
        return [Replacement(start, start, rows)]
    start = text.span(node)[0]
    return [Replacement(start, start, "".join(f"{one}; " for one in code))]


def inserted_after(text: ProgramText, node: Statement, *code: str) -> list[Replacement] | Refused:
    """Lines after a statement; in its line if that is shared."""
    if leaves(node):
        return Refused(Refusal.NOT_REACHED)
    if is_elif(text, node):
        return Refused(Refusal.NOT_MECHANICAL, "elif")
    if not text.alone(node):
        if hasattr(node, "body"):
            return Refused(Refusal.ONE_LINE)
        end = text.span(node)[1]
        return [Replacement(end, end, "".join(f"; {one}" for one in code))]
    last = node.end_lineno or node.lineno
    newline = text.newline(last)
    end = text.starts[last] if last < len(text.starts) else len(text.text)
    rows = "".join(f"{text.indent(node)}{one}{newline}" for one in code)
    if text.line(last)[-1:] not in ("\n", "\r"):  # the end of the file
        rows = newline + rows.removesuffix(newline)
    return [Replacement(end, end, rows)]


def appended_to_loop(
    text: ProgramText, loop: ast.For | ast.AsyncFor | ast.While, code: str
) -> list[Replacement] | Refused:
    """A line at the end of the loop's body."""
    return inserted_after(text, loop.body[-1], code)


def is_elif(text: ProgramText, node: Statement) -> bool:
    """Whether a statement is an ``elif``: it has no place before or after it in its block."""
    parent = text.parents[node]
    return (
        isinstance(node, ast.If)
        and isinstance(parent, ast.If)
        and parent.orelse == [node]
        and text.text.startswith("elif", text.span(node)[0])
    )


def _begins_its_line(text: ProgramText, node: Statement) -> bool:
    line = first_line(node)
    if line < node.lineno:  # a decorator
        return True
    return not text.text[text.starts[line - 1] : text.span(node)[0]].strip()
