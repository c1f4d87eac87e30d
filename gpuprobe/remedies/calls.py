"""Keywords of calls: added, replaced and removed."""

from __future__ import annotations

import ast
import tokenize

from gpuprobe.remedies.imports import full_name
from gpuprobe.remedies.text import ProgramText, Refusal, Refused, Replacement


def keyword_set(
    text: ProgramText,
    line: int,
    call: str,
    keyword: str,
    value: str | None,
    position: int | None = None,
) -> list[Replacement] | Refused:
    """Set a keyword of a call to ``value``, source code; None removes the keyword."""
    if value is not None:
        try:
            ast.parse(value, mode="eval")
        except (SyntaxError, ValueError):
            return Refused(Refusal.INVALID, value)
    node = call_at(text, line, call, keyword)
    if isinstance(node, Refused):
        return node
    given = next((one for one in node.keywords if one.arg == keyword), None)
    plain = [one for one in node.args if not isinstance(one, ast.Starred)]
    current: ast.expr | None = given.value if given is not None else None
    if given is None and position is not None and position < len(plain) == len(node.args):
        current = plain[position]
    if current is not None and value is not None:
        if ast.unparse(current) == ast.unparse(ast.parse(value, mode="eval")):
            return Refused(Refusal.DONE_ALREADY)
        return [Replacement(*text.span(current), value)]
    if given is not None:
        return _without(text, node, given)
    if current is not None:
        return Refused(Refusal.NOT_MECHANICAL, "it is passed by its position")
    if any(one.arg is None for one in node.keywords):
        return Refused(Refusal.STAR_ARGUMENTS)
    if value is None:
        return Refused(Refusal.DONE_ALREADY)
    starred = any(isinstance(one, ast.Starred) for one in node.args)
    if starred and position is not None:
        return Refused(Refusal.STAR_ARGUMENTS)
    return _with(text, node, f"{keyword}={value}")


def call_at(text: ProgramText, line: int, call: str, keyword: str = "") -> ast.Call | Refused:
    """The call in a line whose name ends with ``call``; of several, the one with ``keyword``."""
    found = [
        one
        for statement in text.statements(line)
        for one in ast.walk(statement)
        if isinstance(one, ast.Call)
        and f".{full_name(text, one.func)}".endswith(f".{call}")
        and (not hasattr(statement, "body") or _in_header(text, statement, one))
    ]
    if not found:
        return Refused(Refusal.NO_STATEMENT, call)
    if len(found) > 1:
        found = [one for one in found if any(row.arg == keyword for row in one.keywords)] or found
    if len(found) > 1:
        found = [one for one in found if one.lineno == line] or found
    if len(found) > 1:
        return Refused(Refusal.AMBIGUOUS, call)
    if any(isinstance(around, ast.JoinedStr) for around in text.ancestors(found[0])):
        return Refused(Refusal.IN_A_STRING)
    return found[0]


def _in_header(text: ProgramText, statement: ast.stmt, node: ast.Call) -> bool:
    around = text.ancestors(node)
    inner = next(one for one in around if isinstance(one, (ast.stmt, ast.ExceptHandler)))
    return inner is statement


def _with(text: ProgramText, node: ast.Call, argument: str) -> list[Replacement] | Refused:
    """Add an argument behind the last one, in the same line."""
    if len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp):
        return Refused(Refusal.NOT_MECHANICAL, "the argument is a generator without parentheses")
    begin, end = text.span(node.func)[1], text.span(node)[1] - 1
    tokens = [one for one in text.tokens_between(begin, end) if one.kind != tokenize.COMMENT]
    last = tokens[-1]
    empty = not node.args and not node.keywords
    separator = "" if empty else " " if last.text == "," else ", "
    return [Replacement(last.end, last.end, f"{separator}{argument}")]


def _without(text: ProgramText, node: ast.Call, given: ast.keyword) -> list[Replacement] | Refused:
    """Remove the keyword, and the comma before or after it."""
    start, stop = text.span(given)
    begin, end = text.span(node.func)[1], text.span(node)[1] - 1
    before = text.tokens_between(begin, start)
    after = text.tokens_between(stop, end)
    closing = 0  # of the value's own parentheses, which are no part of its node
    while closing < len(after) and after[closing].text == ")":
        closing += 1
    stop = after[closing - 1].end if closing else stop
    rest = after[closing:]
    if before[-1].text == ",":
        start = before[-1].start
    elif rest and rest[0].text == ",":
        following = rest[1].start if len(rest) > 1 else end
        stop = following if before[-1].kind != tokenize.COMMENT else rest[0].end
    if any(one.kind == tokenize.COMMENT for one in text.tokens_between(start, stop)):
        return Refused(Refusal.COMMENT)
    if before[-1].kind == tokenize.COMMENT and rest[:1] != [] and rest[0].text == ",":
        return [Replacement(start, rest[0].end, "")]
    if before[-1].kind == tokenize.COMMENT:
        return Refused(Refusal.COMMENT)
    return [Replacement(start, stop, "")]
