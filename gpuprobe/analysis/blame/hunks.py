"""The change of a program as hunks, each of which can be reverted alone.

Reverting a hunk replaces lines of one file by the lines that were there before. A move is separate
from the edits in the moved text: the hunks are the differences between the old and the new block,
at the new place. Deleted and added Python files exist in all trees, so that a reverted import finds
its module. Files of settings do not, because their existence alone may change the program.
"""

from __future__ import annotations

import ast
import io
import keyword
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Final

from gpuprobe.analysis.blame.source import renamed_files

_MOST_LINES: Final = 40_000
"""Limit of the lines of one file, before and after: larger changes are one hunk (the time of an
alignment is their product)."""

_ALIKE: Final = 0.5
"""The similarity from which one line or block counts as an edit of another."""

_MOST_PAIRS: Final = 400
"""Limit of old times new lines of a hunk; larger ones are not split."""

_MOVED_LINES: Final = 3
"""Lines of the smallest move."""

_COPIED_LINES: Final = 4
"""Lines of the smallest copy."""


@dataclass(frozen=True)
class Hunk:
    """A change of lines. Reverting it puts ``old`` lines (with line ends) in place of ``new`` ones,
    which begin at line ``start`` (from 1) of the current ``file``. ``whole``: ``"added"`` or
    ``"deleted"`` for a file that only exists on one side, else None. ``neutral``: the program's
    code is the same without it. ``within``: for an edit in a copy of an existing block, the lines
    of the copy, ``(start, end)`` of the hunk that adds it; ``old`` are then the original's lines.
    """

    file: str
    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    whole: str | None = None
    neutral: bool = False
    within: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        """The line after the last of ``new``."""
        return self.start + len(self.new)

    @cached_property
    def line(self) -> int:
        """The line that a report refers to."""
        for at, text in enumerate(self.new):
            if _is_code(text) and text not in self.old:
                return self.start + at
        if self.within is not None:
            return min(self.end, self.within[1] - 1)
        return max(1, self.start if self.new else self.start - 1)


def hunks_of(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Hunk, ...]:
    """The hunks between two trees; a tree has the texts of files by name."""
    pairs = renamed_files(before, after)
    found: list[Hunk] = []
    for name, text in sorted(after.items()):
        old = before.get(pairs.get(name, ""))
        if old is None:
            whole = None if name.endswith(".py") else "added"
            found.append(Hunk(name, 1, (), lines_of(text), whole))
        elif old != text:
            found += _aligned(name, lines_of(old), lines_of(text))
    deleted = sorted(before.keys() - set(pairs.values()))
    gone = {name for name in deleted if name.endswith(".py")}  # all trees have them
    for name in deleted:
        whole = None if name.endswith(".py") else "deleted"
        found.append(Hunk(name, 1, lines_of(before[name]), (), whole))
    hunks = _without_moves(found)
    originals = [lines_of(text) for name, text in before.items() if name.endswith(".py")]
    known = [(Counter(_stripped(lines)), lines) for lines in originals if len(lines) <= _MOST_LINES]
    hunks += [edit for hunk in hunks for edit in _edits_of_copy(hunk, known)]
    return tuple(
        replace(hunk, neutral=True) if hunk.file in gone or _is_neutral(hunk) else hunk
        for hunk in hunks
    )


def tree_without(
    hunks: Iterable[Hunk], before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, str | None]:
    """The texts of a tree in which ``hunks`` are reverted, by name; None if the file does not
    exist. Python files that only exist on one side exist in each tree.
    """
    pairs = renamed_files(before, after)
    texts: dict[str, list[str]] = {name: list(lines_of(text)) for name, text in after.items()}
    found: dict[str, str | None] = {}
    # From the end, so that earlier lines keep their numbers; of two hunks at one line, the first
    # has no new lines.
    given = tuple(hunks)
    copies = {(hunk.file, (hunk.start, hunk.end)) for hunk in given if hunk.within is None}
    hunks = (hunk for hunk in given if (hunk.file, hunk.within) not in copies)
    in_order = sorted(hunks, key=lambda item: (item.file, item.start, bool(item.new)))
    for hunk in reversed(in_order):
        if hunk.whole == "added":
            found[hunk.file] = None
        elif hunk.whole == "deleted" or hunk.file not in texts:
            found[hunk.file] = "".join(hunk.old)
        else:
            texts[hunk.file][hunk.start - 1 : hunk.end - 1] = hunk.old
    tree = {name: found.get(name, "".join(lines)) for name, lines in texts.items()}
    for new, old in pairs.items():
        if old not in after:
            tree[old] = tree[new]  # so that a reverted import of the old name finds it
    for name in before.keys() - after.keys() - set(pairs.values()):
        deleted = name.endswith(".py") or found.get(name) is not None
        tree[name] = before[name] if deleted else None
    return tree


def lines_of(text: str) -> tuple[str, ...]:
    """The lines of a text with their ends; one without an end of line gets none."""
    return tuple(re.findall(r"[^\n]*\n|[^\n]+\Z", text))


def dependents(
    hunks: Sequence[Hunk], before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[frozenset[int], ...]:
    """For each hunk, those that have to be reverted together (itself included): those that use a
    name which only it introduces, and those that removed a name which its old lines use.
    """
    old_words, new_words = (
        {word for text in side.values() for word in _words(text)} for side in (before, after)
    )
    used_new = [_words("".join(hunk.new)) for hunk in hunks]
    used_old = [_words("".join(hunk.old)) for hunk in hunks]
    bound_new = [_bound("".join(hunk.new)) - old_words for hunk in hunks]
    bound_old = [_bound("".join(hunk.old)) - new_words for hunk in hunks]
    next_to = [
        {
            other
            for other in range(len(hunks))
            if other != at
            and not _overlap(hunks[at], hunks[other])
            and (bound_new[at] & used_new[other] or bound_old[other] & used_old[at])
        }
        for at in range(len(hunks))
    ]
    found = []
    for at in range(len(hunks)):
        known = {at}
        pending = [at]
        while pending:
            more = next_to[pending.pop()] - known
            known |= more
            pending += more
        found.append(frozenset(known))
    return tuple(found)


def _overlap(one: Hunk, two: Hunk) -> bool:
    """Whether one is an edit in the copy that the other adds."""
    return one.file == two.file and (
        one.within == (two.start, two.end) or two.within == (one.start, one.end)
    )


def halves(hunks: Sequence[Hunk], after: Mapping[str, str]) -> tuple[frozenset[int], ...]:
    """For each hunk, the hunks of the same function that form one edit (itself included): one of
    them assigns a name that the other reads.
    """
    bound = [_assigned(hunk.new) for hunk in hunks]
    words = [_words("".join(hunk.new)) for hunk in hunks]
    lines = {name: lines_of(text) for name, text in after.items() if name.endswith(".py")}
    found = [{at} for at in range(len(hunks))]
    for one, hunk in enumerate(hunks):
        text = lines.get(hunk.file)
        if not text or hunk.whole is not None:
            continue
        last = hunk.start
        for two in range(one + 1, len(hunks)):  # in the order of their lines
            other = hunks[two]
            if other.file != hunk.file or other.within is not None:
                break
            if any(_OPENS.match(line) for line in text[last - 1 : other.end - 1]):
                break
            last = max(last, other.end)
            if bound[one] & words[two] or bound[two] & words[one]:
                found[one].add(two)
                found[two].add(one)
    for _ in hunks:  # the transitive closure
        wider = [set[int]().union(*(found[other] for other in mine)) for mine in found]
        if wider == found:
            break
        found = wider
    return tuple(frozenset(mine) for mine in found)


_OPENS: Final = re.compile(r"\s*(?:async\s+)?(?:def|class)\b")


def _assigned(lines: Sequence[str]) -> set[str]:
    """The variables that lines assign."""
    found = (re.match(r"\s*([^\W\d]\w*)\s*(?::[^=\n]+)?=(?!=)", text) for text in lines)
    return {match[1] for match in found if match is not None}


def described(hunk: Hunk, most: int = 60) -> str:
    """A description of the change: ``removed `@torch.no_grad()```."""
    if hunk.whole is not None:
        return f"the file was {hunk.whole}"
    old = [text.strip() for text in hunk.old if _is_code(text) and text not in hunk.new]
    new = [text.strip() for text in hunk.new if _is_code(text) and text not in hunk.old]
    if hunk.within is not None and (old or new):
        parts = [f"with {_quoted(new, most)}"] if new else []
        if old:
            parts.append(f"{'instead of' if new else 'without'} {_quoted(old, most)}")
        return f"a copy {' '.join(parts)}"
    if old and new:
        return f"{_quoted(new, most)} instead of {_quoted(old, most)}"
    if old:
        return f"removed {_quoted(old, most)}"
    if new:
        return f"added {_quoted(new, most)}"
    return "the lines were put in another order or block"


def _quoted(texts: Sequence[str], most: int) -> str:
    first = texts[0] if len(texts[0]) <= most else f"{texts[0][: most - 1]}…"
    rest = len(texts) - 1
    more = f" and {rest} more line{'s' * (rest > 1)}" if rest else ""
    return f"`{first}`{more}"


def _is_code(text: str) -> bool:
    plain = text.strip()
    return bool(plain) and not plain.startswith(("#", "//", ";"))


def _is_neutral(hunk: Hunk) -> bool:
    """Whether both sides are the same without comments, docstrings and empty lines."""
    if hunk.whole is not None:
        return False
    if hunk.file.endswith(".py"):
        if all(_is_string(side) for side in (hunk.old, hunk.new)):
            return True
        one, two = _code("".join(hunk.old)), _code("".join(hunk.new))
        if one is not None and two is not None:
            return one == two
    one_lines, two_lines = (
        [text.rstrip() for text in side if _is_code(text)] for side in (hunk.old, hunk.new)
    )
    return one_lines == two_lines


def _is_string(lines: Sequence[str]) -> bool:
    """Whether lines are empty, or docstrings: strings in triple quotes that no statement uses."""
    text = textwrap.dedent("".join(lines))
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return False
    rows = text.splitlines()
    return all(
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
        and rows[item.lineno - 1].lstrip("rRuU").startswith(('"""', "'''"))
        for item in body
    )


def _code(text: str) -> list[tuple[int, str]] | None:
    """The tokens of Python code without comments and line breaks; None if the text alone is not
    valid.
    """
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in skipped:
                string = token.string if token.type != tokenize.INDENT else ""
                found.append((token.type, string))
    except (tokenize.TokenError, SyntaxError):
        return None
    first = re.search(r"^[ \t]*(?=[^\s#])", text, re.MULTILINE)
    return [(0, first[0] if first is not None else ""), *found]


def _aligned(name: str, old: Sequence[str], new: Sequence[str]) -> list[Hunk]:
    if len(old) + len(new) > _MOST_LINES:
        return [Hunk(name, 1, tuple(old), tuple(new))]
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    found = []
    for tag, i, i2, j, j2 in matcher.get_opcodes():
        if tag != "equal":
            found += _split(Hunk(name, j + 1, tuple(old[i:i2]), tuple(new[j:j2])))
    return found


def _split(hunk: Hunk) -> list[Hunk]:
    """Split a hunk: one for each edited line, and one for the lines added or removed between them.

    Lines of one statement stay together, as do those of an added or removed block.
    """
    if not hunk.old or not hunk.new or len(hunk.old) == len(hunk.new) == 1:
        return [hunk]
    if len(hunk.old) * len(hunk.new) > _MOST_PAIRS or not _is_complete(hunk):
        return [hunk]
    pairs = _edited_pairs(hunk.old, hunk.new)
    alone = (*(t for at, t in enumerate(hunk.old) if at not in dict(pairs)),
             *(t for at, t in enumerate(hunk.new) if at not in {j for _, j in pairs}))  # fmt: skip
    if not pairs or any(re.search(r":\s*(#.*)?$|^\s*@", text) for text in alone):
        return [hunk]
    found = []
    i = j = 0
    for one, two in [*pairs, (len(hunk.old), len(hunk.new))]:
        if i < one or j < two:
            found.append(Hunk(hunk.file, hunk.start + j, hunk.old[i:one], hunk.new[j:two]))
        if one < len(hunk.old) and hunk.old[one] != hunk.new[two]:
            part = Hunk(hunk.file, hunk.start + two, hunk.old[one : one + 1], (hunk.new[two],))
            found.append(part)
        i, j = one + 1, two + 1
    return found


def _edited_pairs(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of old and edited lines, in order; the alignment with the largest similarity."""
    best: list[list[tuple[float, list[tuple[int, int]]]]] = [
        [(0.0, [])] * (len(new) + 1) for _ in range(len(old) + 1)
    ]
    for i, one in enumerate(old):
        for j, two in enumerate(new):
            options = [best[i][j + 1], best[i + 1][j]]
            alike = _likeness(one, two)
            if alike >= _ALIKE:
                score, pairs = best[i][j]
                options.append((score + alike, [*pairs, (i, j)]))
            best[i + 1][j + 1] = max(options, key=lambda item: item[0])
    return best[-1][-1][1]


def _likeness(one: str, two: str) -> float:
    """The similarity of two lines, 0 to 1; 0 if their indentation differs."""
    if _indent(one) != _indent(two):
        return 0.0
    return SequenceMatcher(None, one.strip(), two.strip(), autojunk=False).ratio()


def _is_complete(hunk: Hunk) -> bool:
    """Whether each line is a complete statement, without open brackets."""
    return all(
        sum(text.count(c) for c in "([{") == sum(text.count(c) for c in ")]}")
        and text.count('"""') % 2 == 0
        and not text.rstrip().endswith("\\")
        for text in (*hunk.old, *hunk.new)
    )


def _without_moves(found: Sequence[Hunk]) -> list[Hunk]:
    """The hunks, with the edits inside moved text in place of the removal and the addition."""
    hunks = list(found)
    for removed in [item for item in hunks if _may_move(item.old) and item.whole is None]:
        best, most = None, _ALIKE
        for added in hunks:
            if added is removed or added.whole is not None or not _may_move(added.new):
                continue
            if len(_stripped(added.old)) > len(_stripped(added.new)) // 2:
                continue
            matcher = SequenceMatcher(None, _stripped(removed.old), _stripped(added.new), False)
            same = sum(block.size for block in matcher.get_matching_blocks())
            alike = same / max(1, len(_stripped(removed.old)))
            if alike > most and same >= _MOVED_LINES:
                best, most = added, alike
        if best is None or (_stripped(removed.new) and _is_mostly_new(removed)):
            continue
        hunks[hunks.index(best) : hunks.index(best) + 1] = _inside(removed, best)
        hunks.remove(removed)
        if removed.new:
            hunks.append(replace(removed, old=()))
    return sorted(hunks, key=lambda item: (item.file, item.start))


def _may_move(lines: Sequence[str]) -> bool:
    return len(_stripped(lines)) >= _MOVED_LINES


def _is_mostly_new(hunk: Hunk) -> bool:
    return len(_stripped(hunk.new)) * 2 > len(_stripped(hunk.old))


def _stripped(lines: Sequence[str]) -> list[str]:
    return [text.strip() for text in lines if text.strip()]


def _inside(removed: Hunk, added: Hunk) -> list[Hunk]:
    """The differences between a removed block and its new version, as hunks at the new place. Text
    before and behind that was never part of the block is left out.
    """
    one, two = [text.strip() for text in removed.old], [text.strip() for text in added.new]
    matcher = SequenceMatcher(None, one, two, autojunk=False)
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    first, last = blocks[0], blocks[-1]
    shift = _indent(added.new[first.b]) - _indent(removed.old[first.a])
    found = []
    for tag, i, i2, j, j2 in matcher.get_opcodes():
        edge = j < first.b or i >= last.a + last.size
        if tag == "equal" or (edge and i == i2):
            continue
        old = tuple(_indented(text, shift) for text in removed.old[i:i2])
        found += _split(Hunk(added.file, added.start + j, old, added.new[j:j2]))
    return found


def _edits_of_copy(hunk: Hunk, before: Sequence[tuple[Counter[str], Sequence[str]]]) -> list[Hunk]:
    """The edits in a block that an added hunk copied, as hunks inside it. ``before``: the lines of
    the old files, counted and in order.
    """
    code = Counter(_stripped(hunk.new))
    if hunk.whole is not None or hunk.old or not hunk.file.endswith(".py"):
        return []
    if not _COPIED_LINES <= code.total() <= _MOST_LINES:
        return []
    best: tuple[float, Sequence[str]] = (_ALIKE, ())
    for counted, lines in before:
        shared = (code & counted).total()
        if shared >= max(_COPIED_LINES, best[0] * code.total()):
            best = max(best, _original(hunk.new, lines), key=lambda item: item[0])
    if not best[1]:
        return []
    skipped = next(at for at, text in enumerate(hunk.new) if text.strip())
    copy = replace(hunk, start=hunk.start + skipped, new=hunk.new[skipped:])
    found = _inside(Hunk(hunk.file, 1, tuple(best[1]), ()), copy)
    return [replace(edit, within=(hunk.start, hunk.end)) for edit in found]


def _original(copy: Sequence[str], lines: Sequence[str]) -> tuple[float, Sequence[str]]:
    """The share of ``copy`` that is in its original, and the original: a stretch of ``lines``, with
    the copy's name if it is a function or class.
    """
    # Empty lines would all be equal; each gets a distinct text.
    one = [text.strip() or f"{at}" for at, text in enumerate(lines)]
    two = [text.strip() for text in copy]
    anchor = SequenceMatcher(None, one, two, autojunk=False).find_longest_match()
    spare = len(two) // 4 + 2
    begin = max(0, anchor.a - anchor.b - spare)
    end = anchor.a + len(two) - anchor.b + spare
    matcher = SequenceMatcher(None, one[begin:end], two, autojunk=False)
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    same = sum(block.size for block in blocks)
    if same < _COPIED_LINES:
        return 0.0, ()
    first, last = begin + blocks[0].a, begin + blocks[-1].a + blocks[-1].size
    # Include a decorator, a header and last lines that differ in the copy.
    head = blocks[0].b
    while first and lines[first - 1].strip() and (head > 0 or _HEADER.match(one[first - 1])):
        first, head = first - 1, head - 1
    left = len(two) - blocks[-1].b - blocks[-1].size
    while left and last < len(one) and lines[last].strip() and not _HEADER.match(one[last]):
        last, left = last + 1, left - 1
    found = list(lines[first:last])
    names = [_DEFINED.findall("".join(side)) for side in (found, copy)]
    for old, new in zip(names[0][:1], names[1][:1], strict=False):
        found = [re.sub(rf"\b{old}\b", new, text) for text in found]
    return same / len(_stripped(copy)), found


_HEADER: Final = re.compile(r"@|(?:async\s+)?(?:def|class)\b")
_DEFINED: Final = re.compile(r"\b(?:def|class)\s+(\w+)")


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _indented(text: str, shift: int) -> str:
    if shift >= 0 or not text.strip():
        return " " * max(0, shift) * bool(text.strip()) + text
    return text[min(-shift, _indent(text)) :]


_WORD: Final = re.compile(r"[^\W\d]\w*")
_BINDING: Final = re.compile(
    r"""
    ^[ \t]*(?:async[ ]+)?(?:def|class)[ ]+(?P<defined>\w+)
    | ^[ \t]*(?:self\.)?(?P<assigned>[^\W\d]\w*)\s*(?::[^=\n]+)?=(?!=)
    | (?<=[(,\s])(?P<argument>[^\W\d]\w*)\s*(?::[^=,()\n]+)?=(?!=)
    | (?:import|as|,)[ ]+(?P<imported>[^\W\d]\w*)
    | ^\s*-?\s*["']?(?P<key>[^\W\d]\w*)["']?\s*:
    """,
    re.VERBOSE | re.MULTILINE,
)


def _words(text: str) -> set[str]:
    return {word for word in _WORD.findall(text) if not keyword.iskeyword(word)}


def _bound(text: str) -> set[str]:
    """The names that a text defines: functions, variables, arguments, imports, keys of settings."""
    found: set[str] = set()
    for match in _BINDING.finditer(text):
        found.update(name for name in match.groups() if name)
    for line in re.findall(r"^\s*(?:async )?def \w+\((.*)", text, re.MULTILINE):
        found |= _words(line)
    return found
