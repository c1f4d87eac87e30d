"""Where a fix goes, and what it says there in the program's own names.

A wait is put before the statement that races, or further out, where the program has names for
both streams; the stream that is current there is never named. Without names, an event is recorded
after the first statement, and waited for before the second.
"""

from __future__ import annotations

import linecache
import re
from typing import Final, NamedTuple

from gpuprobe.hazards.accesses import HOST, Race, RaceContext, Scope
from gpuprobe.hazards.findings.code import (
    StatementAt,
    free_name,
    handle_of_call,
    is_name,
    is_plain,
    statement,
    torch_name,
)
from gpuprobe.model.findings import Insertion
from gpuprobe.model.place import Place

_EVENT: Final = "done"
FUNCTIONAL: Final = "functional"
"""The note of accesses by a functional collective, whose result itself is waited for."""


class CodeChange(NamedTuple):
    """``code``: as lines to be pasted, each with where it goes; ``insertions``: the same for the
    source. ``how``: "wait", "event", "host wait", "host event", "device", "record", "work",
    "keep", "clone", "split" or "blocking": what it does to the log.
    """

    how: str
    code: str
    insertions: tuple[Insertion, ...] = ()


class Sites(NamedTuple):
    """The statements of a race's two accesses, where their source is known."""

    first: StatementAt | None
    second: StatementAt | None


def sites(there: Place | None, here: Place | None) -> Sites:
    first = None if there is None else statement(there.file, there.line)
    second = None if here is None else statement(here.file, here.line)
    return Sites(first, second)


def ordered_by_event(race: Race, at: Sites, *, host: bool) -> CodeChange | None:
    """An event right after the first statement; None where the second may come without it."""
    first, second = at.first, at.second
    if first is None or second is None or first.leaves or not _follows(race, first, second):
        return None
    if host and race.first.actor == HOST:
        return None
    cuda = torch_name(first.file)
    name = free_name(second, _EVENT)
    if first.inner_blocks:  # written in one line: what follows it is not on the stream
        stream = first.inner_blocks[-1].stream
        record = f"{name} = {stream}.record_event()" if is_plain(stream) else ""
    else:
        record = f"{name} = {cuda}.current_stream().record_event()"
    if not record or second.inner_blocks:
        return None
    wait = f"{name}.synchronize()" if host else f"{cuda}.current_stream().wait_event({name})"
    insertions = (first.after(record), second.before(wait))
    return CodeChange("host event" if host else "event", listing(insertions), insertions)


def _follows(race: Race, first: StatementAt, second: StatementAt) -> bool:
    """Whether the first statement has always been run when the second is: both are of one
    function, and the first is in no branch that the second is not in.
    """
    one, other = race.first.site, race.second.site
    if first.file != second.file or not one or not other or one[0] is not other[0]:
        return False
    if first.end >= second.line:
        return False
    branches = second.branches
    return all(any(node is branch for branch in branches) for node in first.branches)


def wait_by_name(race: Race, waiter: int, source: int) -> CodeChange | None:
    """``waiter`` waits for all of ``source``, said where the program has names for both."""
    context = race.context
    if context is None:
        return None
    crossed: str | None = ""  # the stream of a block between this place and the access
    blocks = list(context.blocks)
    for scope in context.scopes:
        found = statement(scope.file, scope.line)
        if found is None or scope.code.co_name.startswith("<l"):
            return None  # a lambda is not run where its statement is
        cuda = torch_name(scope.file)
        current = f"{cuda}.current_stream()"
        # Before the statement itself.
        for block in found.inner_blocks:
            crossed = block.stream
            blocks = blocks[1:]
        mine = current if not crossed else _usable(crossed, scope, waiter)
        yours = _name(scope, source)
        if crossed and _outer(context, blocks, waiter, source):
            yours = current
        if mine and yours and mine != yours:
            insertion = found.before(f"{mine}.wait_stream({yours})")
            return CodeChange("wait", listing((insertion,)), (insertion,))
        # Before a block around it, from whose outside the stream is current that is waited for.
        for block in found.blocks:
            if blocks and blocks[0] == (waiter, source) and is_plain(block.stream):
                outside = statement(scope.file, block.statement.lineno)
                if outside is not None and not outside.inner_blocks[1:]:
                    insertion = outside.before(f"{block.stream}.wait_stream({current})")
                    return CodeChange("wait", listing((insertion,)), (insertion,))
            crossed = block.stream
            blocks = blocks[1:]
    return None


def _outer(context: RaceContext, left: list[tuple[int, int]], waiter: int, source: int) -> bool:
    """Whether the stream waited for is current outside of the blocks that were left."""
    count = len(context.blocks) - len(left)
    return count > 0 and context.blocks[count - 1][1] == source and context.blocks[0][0] == waiter


def _usable(expression: str, scope: Scope, actor: int) -> str:
    """An expression of the scope for a stream: the block's own, or a name."""
    names = scope.streams.get(actor, ())
    if expression in names or (is_name(expression) and not names):
        return expression
    return names[0] if names else ""


def _name(scope: Scope, actor: int) -> str:
    names = scope.streams.get(actor, ())
    return names[0] if names else ""


def host_wait(race: Race, at: Sites) -> CodeChange | None:
    """The host waits for a stream before the second statement."""
    context, second = race.context, at.second
    if context is None or second is None or not context.scopes:
        return None
    scope = context.scopes[0]
    stream = _name(scope, race.first.actor)
    if race.first.actor in context.current and not second.inner_blocks:
        stream = f"{torch_name(second.file)}.current_stream()"
    if not stream:
        return None
    insertion = second.before(f"{stream}.synchronize()")
    return CodeChange("host wait", listing((insertion,)), (insertion,))


def whole_device(at: Sites, *, several: bool) -> CodeChange | None:
    """The host waits for everything: always right, and always slow."""
    if at.second is None:
        return None
    cuda = torch_name(at.second.file)
    code = [f"{cuda}.synchronize()"]
    if several:
        code = [f"for device in range({cuda}.device_count()):", f"    {cuda}.synchronize(device)"]
    insertion = at.second.before(*code)
    return CodeChange("device", listing((insertion,)), (insertion,))


def recorded(at: Sites, names: tuple[str, ...]) -> CodeChange | None:
    """``record_stream`` where another stream uses the tensor."""
    first = at.first
    if first is None:
        return None
    # A variable of a comprehension has no value before its statement.
    inside = first.names_of_comprehensions
    usable = tuple(dict.fromkeys(name for name in names if is_name(name) and name not in inside))
    if not usable:
        return None
    cuda = torch_name(first.file)
    stream = f"{cuda}.current_stream()"
    if first.inner_blocks:
        stream = first.inner_blocks[-1].stream
        if not is_plain(stream):
            return None
    insertion = first.before(*(f"{name}.record_stream({stream})" for name in usable))
    return CodeChange("record", listing((insertion,)), (insertion,))


def awaited_handle(race: Race, at: Sites) -> CodeChange | None:
    """``wait()`` on what a collective returned, before the second statement if it has a name
    there, else right after the collective.
    """
    first, second = at.first, at.second
    if first is None or first.inner_blocks:
        return None
    handle = handle_of_call(first)
    if handle is None:
        return None
    insertions: list[Insertion] = []
    if not handle:
        handle = free_name(first, "work")
        text = first.before(f"{handle} = ").text.rstrip("\n")
        insertions.append(_rewritten(first, text))
    code = f"{handle}.wait()"
    if race.first.note == FUNCTIONAL:
        code = f"torch.ops._c10d_functional.wait_tensor({handle})"
    if second is not None and _follows(race, first, second) and not second.inner_blocks:
        insertions.append(second.before(code))
    else:
        insertions.append(first.after(code))
    return CodeChange("work", listing(tuple(insertions)), tuple(insertions))


def kept_alive(freed: Place | None, names: tuple[str, ...]) -> CodeChange | None:
    """Another reference to the tensor, before it is dropped."""
    found = None if freed is None else statement(freed.file, freed.line)
    usable = [name for name in names if is_name(name)]
    if found is None or not usable:
        return None
    name = usable[0]
    kept = free_name(found, f"static_{name.rpartition('.')[2]}")
    insertion = found.before(f"{kept} = {name}")
    return CodeChange("keep", listing((insertion,)), (insertion,))


def cloned(at: Sites, names: tuple[str, ...]) -> CodeChange | None:
    """A clone in place of the tensor in the statement that sends it."""
    first = at.first
    if first is None or first.end != first.line or len(names) != 1:
        return None
    text = _text(first)
    pattern = re.compile(rf"(?<=[(,\s]){re.escape(names[0])}(?=[,)\s])")
    changed, count = pattern.subn(f"{names[0]}.clone()", text)
    if count != 1:
        return None
    insertion = Insertion(first.file, first.line, changed, 1)
    return CodeChange("clone", changed.strip(), (insertion,))


def _text(found: StatementAt) -> str:
    lines = linecache.getlines(found.file)[found.line - 1 : found.end]
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _rewritten(found: StatementAt, begin: str) -> Insertion:
    text = begin + _text(found)[len(found.indent) :]
    return Insertion(found.file, found.line, text, found.end - found.line + 1)


def listing(insertions: tuple[Insertion, ...]) -> str:
    """The lines, each with where it goes."""
    lines = []
    for one in insertions:
        where = f"in place of line {one.line}" if one.replaces else f"before line {one.line}"
        code = one.text.rstrip("\n").splitlines()
        indent = len(code[0]) - len(code[0].lstrip())
        for at, line in enumerate(code):
            lines.append(f"{line[indent:]}  # {where}" if not at else line[indent:])
    return "\n".join(lines)
