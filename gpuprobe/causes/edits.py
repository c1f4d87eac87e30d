"""The edits to try for a cause: where in the program its remedy belongs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from gpuprobe.causes.answer import EditKind
from gpuprobe.causes.find import Diagnosed
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.causes.lines import stored_as
from gpuprobe.causes.rules.holders import limited_entries
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.run.holders import Holder, HolderRoot
from gpuprobe.remedies.edits import (
    AutogradGrad,
    CloneStored,
    DeleteAfterUse,
    Detach,
    Edit,
    ExpandInsteadOfRepeat,
    FreeGradients,
    InsertCall,
    LimitCache,
    MapLocationCpu,
    NoGrad,
    ReleasePart,
    SetKeyword,
    ToCpu,
    Where,
    WithoutAllocatorOption,
    apply,
)
from gpuprobe.remedies.text import FUNCTIONS, LOOPS, ProgramText, Refusal, Refused

_MOST = 3

_KEYWORDS: Final[Mapping[EditKind, tuple[tuple[str, ...], str, str | None]]] = {
    EditKind.RETAIN_GRAPH: (("backward",), "retain_graph", None),
    EditKind.SET_TO_NONE: (("zero_grad",), "set_to_none", "True"),
    EditKind.CHUNK_SIZE: (("vmap",), "chunk_size", "32"),
    EditKind.ALL_USED: (("DistributedDataParallel",), "find_unused_parameters", None),
    EditKind.BUCKET_VIEW: (("DistributedDataParallel",), "gradient_as_bucket_view", "True"),
    EditKind.EVALUATE_TO_CPU: (
        ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"),
        "eval_accumulation_steps",
        "1",
    ),
}
"""The calls, their keyword, and the value to set; None removes it."""

_OPTIMIZER: Final = re.compile(r"\boptim\.([A-Z]\w*)\(")


class EditCandidate(NamedTuple):
    """An edit of the file ``path``, and one that is made in addition."""

    path: str
    edit: Edit
    also: EditCandidate | None = None


def files_of(cause: Diagnosed, script: str) -> list[str]:
    """The files of the program in which a remedy may belong, the likeliest first."""
    group = cause.group
    places = [group.main.made_at, group.main.last_use]
    if cause.answer.edit is EditKind.NO_GRAD_AT_CALL:
        places = [cause.kept_at]
    found = [place.file for place in places if isinstance(place, Place)]
    holder = "" if group.holder is None else group.holder.file
    return [name for name in dict.fromkeys([holder, *found, script]) if name.endswith(".py")]


def candidates(cause: Diagnosed, path: str, text: ProgramText) -> list[EditCandidate]:
    """The edits of a file that apply, at most three."""
    found = []
    for edit in _edits(cause, path, text):
        if not isinstance(apply(text, [edit]), Refused):
            found.append(EditCandidate(path, edit))
        if len(found) == _MOST:
            break
    return found


def backward_of_a_part(holder: Holder | None, text: ProgramText) -> str:
    """The place of a backward pass, if each line of a file that stores graphs in a container may
    store the one of which the backward pass comes; "" otherwise.
    """
    if holder is None or holder.container is None:
        return ""
    name, places = stored_name(holder), set()
    for line in _lines_with(text, name):
        if stored_as(text, line, name):
            done = apply(text, [Detach(line, every=True)])
            if not isinstance(done, Refused):
                return ""
            if done.reason is Refusal.NEEDED_BY_BACKWARD:
                places.add(done.detail)
    return min(places, default="")


def without_option(text: ProgramText, option: str) -> Iterator[Edit]:
    """The edits that remove an option from allocator settings in a file."""
    for line in _lines_with(text, option):
        edit = WithoutAllocatorOption(line, option)
        if not isinstance(apply(text, [edit]), Refused):
            yield edit


class _Place(NamedTuple):
    """A group in the file ``path``: the lines that made it, used it last, and call or store what
    keeps it, 0 if these are elsewhere.
    """

    group: HeldGroup
    path: str
    text: ProgramText
    made: int
    used: int
    kept: int

    @property
    def stored(self) -> list[int]:
        """The lines with the name under which it is stored."""
        return list(_lines_with(self.text, stored_name(self.group.holder)))


def _edits(cause: Diagnosed, path: str, text: ProgramText) -> Iterator[Edit]:
    kind, group = cause.answer.edit, cause.group
    places = (group.main.made_at, group.main.last_use, cause.kept_at)
    made, used, kept = (_line_in(place, path) for place in places)
    if kind in _KEYWORDS:
        calls, keyword, value = _KEYWORDS[kind]
        for call in calls:
            for line in _lines_with(text, call):
                yield SetKeyword(line, call, keyword, value)
    elif kind in _EDITS:
        yield from _EDITS[kind](_Place(group, path, text, made, used, kept))


def _deletions(place: _Place) -> Iterator[Edit]:
    holder = place.group.holder
    if holder is None or not holder.path:
        return
    name = holder.path[0].label
    in_methods = [
        stored_as(place.text, line, stored_name(holder))
        for line in place.stored
        if holder.of_object
    ]
    for part in dict.fromkeys(filter(None, (*in_methods, holder.part))):
        lines = [place.used, place.made, *_lines_with(place.text, re.split(r"\W", part)[0])]
        yield from (
            ReleasePart(line, part, holder.of_named_tuple) for line in dict.fromkeys(lines) if line
        )
    if name in ("self", "cls"):
        return  # its caller has it as well
    lines = [place.used] if place.used else _last_lines(place, name)
    lines += [place.made, *(_last_lines(place, name) if holder.part else ())]
    yield from (DeleteAfterUse(line, name) for line in dict.fromkeys(lines) if line)


def _last_lines(place: _Place, name: str) -> list[int]:
    """The lines that use a name, after the line that made its value and in the same function, the
    last first.
    """
    made = place.text.statements(place.made)[:1] if place.made else []
    around = (node for one in made for node in place.text.ancestors(one))
    function = next((node for node in around if isinstance(node, FUNCTIONS)), place.text.tree)
    end = getattr(function, "end_lineno", None) or len(place.text.starts)
    lines = [line for line in _lines_with(place.text, name) if place.made < line <= end]
    return lines[::-1] if made else []


def _clones(place: _Place) -> Iterator[Edit]:
    for line in dict.fromkeys([*place.stored, place.made]):
        if line:
            yield CloneStored(line)


def _without_gradients(place: _Place) -> Iterator[Edit]:
    """``no_grad`` for the function that calls the model, for each loop around the call, the
    outermost first, and for the call alone; then for the calls of that function, which training may
    call, too. `candidates` leaves out those around a backward pass.
    """
    frames = [frame for frame in place.group.main.frames if frame.filename == place.path]
    lines = [frame.line for frame in frames]
    outer = lines[lines.index(place.kept) + 1 :] if place.kept in lines else []
    for line in (place.kept, *outer):
        for call in place.text.statements(line)[:1]:
            around: list[int] = []
            for node in place.text.ancestors(call):
                if isinstance(node, LOOPS):
                    around.insert(0, node.lineno)
                elif isinstance(node, FUNCTIONS):
                    yield NoGrad(node.lineno, node.lineno)
                    break
            for first in (*around, line):
                yield NoGrad(first, first)


def _optimizers(place: _Place) -> Iterator[Edit]:
    source = place.text.data.decode("utf-8", "replace")
    for number, line in enumerate(source.splitlines(), 1):
        for found in _OPTIMIZER.finditer(line):
            yield SetKeyword(number, found[1], "foreach", "False")


def _where_stored(place: _Place, edit: Callable[[int, bool], Edit]) -> Iterator[Edit]:
    """An edit of the lines that store the memory: of all values that one of them stores, if it
    stores several.
    """
    for line in place.stored:
        alone = apply(place.text, [edit(line, False)])
        several = isinstance(alone, Refused) and alone.reason is Refusal.AMBIGUOUS
        yield edit(line, several)


def _moves(place: _Place) -> Iterator[Edit]:
    values = _in_dictionaries(place.group.holder)
    return _where_stored(
        place, lambda line, every: ToCpu(line, detach=True, every=every, values=values)
    )


def _in_dictionaries(holder: Holder | None) -> bool:
    """Whether the elements of a holder's container are dictionaries of tensors."""
    many = None if holder is None else holder.container
    if holder is None or many is None:
        return False
    at = holder.path.index(many)
    return [one.kind for one in holder.path[at + 1 :]] == ["dict", "Tensor"]


def _where_made(edit: Callable[[int], Edit]) -> Callable[[_Place], Iterator[Edit]]:
    """An edit of the line that made the memory."""

    def edits(place: _Place) -> Iterator[Edit]:
        if place.made:
            yield edit(place.made)

    return edits


def _detachments(place: _Place) -> Iterator[Edit]:
    return _where_stored(place, lambda line, every: Detach(line, every=every))


def _limits(place: _Place) -> Iterator[Edit]:
    for line in place.stored:
        edit = limited_entries(place.group, line)
        if edit is not None:
            yield edit


def _without_graph(place: _Place) -> Iterator[Edit]:
    """Without gradients, at the line that made it, or that called the function which did."""
    for frame in place.group.main.frames:
        if frame.filename == place.path:
            yield NoGrad(frame.line, frame.line)


def _freed_gradients(place: _Place) -> Iterator[Edit]:
    for line in [place.used] if place.used else _lines_with(place.text, "step"):
        yield FreeGradients(line)


def _limited_caches(place: _Place) -> Iterator[Edit]:
    holder = place.group.holder
    if holder is not None and holder.file == place.path:
        yield LimitCache(holder.line)  # of the decorator


def _gradients_without_cycle(place: _Place) -> Iterator[Edit]:
    for line in dict.fromkeys([place.made, *_lines_with(place.text, "create_graph")]):
        if line:
            yield AutogradGrad(line)


_EDITS: Final[Mapping[EditKind, Callable[[_Place], Iterator[Edit]]]] = {
    EditKind.DETACH: lambda place: chain(_detachments(place), _without_graph(place)),
    EditKind.TO_CPU: lambda place: chain(_moves(place), _deletions(place)),
    EditKind.LIMIT_ENTRIES: _limits,
    EditKind.DELETE: _deletions,
    EditKind.CLONE: _clones,
    EditKind.FOREACH: _optimizers,
    EditKind.FREE_GRADIENTS: _freed_gradients,
    EditKind.LIMIT_CACHE: _limited_caches,
    EditKind.AUTOGRAD_GRAD: _gradients_without_cycle,
    EditKind.MAP_LOCATION: _where_made(MapLocationCpu),
    EditKind.NO_GRAD: _without_graph,
    EditKind.NO_GRAD_AT_CALL: _without_gradients,
    EditKind.EXPAND: _where_made(ExpandInsteadOfRepeat),
    EditKind.COLLECT: _where_made(lambda line: InsertCall(line, "gc.collect()", Where.END_OF_LOOP)),
}


def _line_in(place: Place | NoPlace | None, path: str) -> int:
    return place.line if isinstance(place, Place) and place.file == path else 0


def stored_name(holder: Holder | None) -> str:
    """The last name of a path: ``sum`` of ``meter.sum.grad_fn``; of an exception that a name keeps,
    that of the exception.
    """
    return next(iter(stored_names(holder)), "")


def stored_names(holder: Holder | None) -> list[str]:
    """The names on a path, the innermost first."""
    if holder is None:
        return []
    labels = [step.label for step in holder.path]
    if holder.root is HolderRoot.EXCEPTION:
        labels = re.findall(r"\.?[A-Za-z_]\w*", re.sub(r"\[[^\]]*\]", "", holder.via))
    names = [re.fullmatch(r"\.?([A-Za-z_]\w*)", label) for label in labels]
    return [name[1] for name in reversed(names) if name and name[1] not in _OF_TORCH]


_OF_TORCH: Final = ("grad_fn", "grad", "saved", "__traceback__", "sys", "last_value", "last_exc")


def _lines_with(text: ProgramText, name: str) -> Iterator[int]:
    """The lines in which a name occurs, in order."""
    if name:
        word = re.compile(rf"\b{re.escape(name)}\b")
        lines = text.data.decode("utf-8", "replace").splitlines()
        yield from (number for number, line in enumerate(lines, 1) if word.search(line))
