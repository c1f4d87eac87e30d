"""Hypothesis strategies for the model, derived from its type hints.

A class that is added to the model is covered the moment it exists.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
import typing
from array import array
from collections.abc import Mapping
from enum import Enum
from typing import Any

from hypothesis import strategies as st

import gpuprobe.model
from gpuprobe.model.memory import Category, Segment, TraceAction
from gpuprobe.model.run.launches import (
    LaunchedKernel,
    LaunchPlace,
    StepLaunches,
    step_launches,
)
from gpuprobe.model.run.work import Action, StepWork, Work, WorkPlace, pack
from gpuprobe.model.trace import (
    AllocatorSettings,
    Annotation,
    EventColumns,
    Frame,
    LiveColumns,
    MemoryTrace,
    StackTable,
)
from gpuprobe.model.values import MOST_BYTES, Bounds, Bytes, NewestMicroseconds

TEXT = st.text(max_size=12)
UNDECODABLE = "caf\udce9.py"
"""A file name that is not UTF-8, as Python has it (surrogateescape)."""
INTEGERS = st.integers(-(2**63), 2**64 - 1)


_NOT_DECODED = (
    "Bounds", "MemoryTrace", "Parsed", "Recording", "RankRecording", "Reading", "Report", "Steps"
)  # fmt: skip
"""Written in another way, or (reports) never read again, or (bounds, parsed) part of a type."""


def model_classes() -> list[type]:
    """Every dataclass of the model that the codec is for (columns have a separate format)."""
    found = []
    for info in pkgutil.walk_packages(gpuprobe.model.__path__, "gpuprobe.model."):
        if info.name == "gpuprobe.model.io.codec":
            continue
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and dataclasses.is_dataclass(value)
                and value.__module__ == info.name
                and value.__name__ not in _NOT_DECODED
            ):
                found.append(value)
    return found


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint."""
    if hint is Bytes:
        return st.integers(0, MOST_BYTES)
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _bounded(args[0], args[1])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(arg) for arg in args])
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return st.tuples(*map(values_of, args))
    if origin in (tuple, list):
        return st.lists(values_of(args[0]), max_size=2).map(origin)
    if origin in (dict, Mapping):
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=2)
    return _instances(origin or hint, args)


_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    None: st.none(),
    type(None): st.none(),
    bool: st.booleans(),
    int: INTEGERS,
    float: st.floats(allow_nan=False),  # NaN differs from itself; a separate test covers it
    str: TEXT,
    Any: st.one_of(INTEGERS, TEXT),
}


def _bounded(hint: Any, bounds: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, within its bounds if it has some."""
    if not isinstance(bounds, Bounds):
        return values_of(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = typing.get_args(hint)
        numbers = [_bounded(arm, bounds) for arm in arms if arm in (int, float)]
        return st.one_of([*numbers, *(values_of(arm) for arm in arms if arm not in (int, float))])
    if hint is float:
        return st.floats(bounds.least, bounds.most)
    return st.integers(int(bounds.least), int(bounds.most))


def _work(works: list[Work], place: WorkPlace, stream: str) -> StepWork:
    """Work whose operators launch one kernel each, and the first of them a copy, too."""
    count = len(works)
    operators = array("I", range(1, count + 1)), array("I", [0] * count)
    kernel, copy = Action.KERNEL.value, Action.COPY.value
    entries = (
        array("B", [kernel] * count + [copy] * (count > 0)),
        array("H", [0] * (count + (count > 0))),
        array("I", [*range(1, count + 1), *([1] * (count > 0))]),
        array("Q", [0] * count + [1] * (count > 0)),
    )
    return StepWork(
        works=tuple(works),
        places=(place,),
        streams=(stream,),
        operators=pack(operators),
        entries=pack(entries),
    )


def _instances(cls: Any, args: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Instances of an enumeration or a dataclass with these type arguments."""
    if cls is StepLaunches:  # its columns belong together
        row = st.tuples(values_of(LaunchedKernel), values_of(LaunchPlace), st.integers(0, 2**31))
        return st.lists(row, max_size=3).map(step_launches)
    if cls is StepWork:  # its columns refer to each other
        return st.builds(_work, st.lists(values_of(Work), max_size=3), values_of(WorkPlace), TEXT)
    if issubclass(cls, Enum):
        return st.sampled_from(cls)
    bound = dict(zip(getattr(cls, "__parameters__", ()), args, strict=False))
    hints = typing.get_type_hints(cls, include_extras=True)

    def values(optional: bool) -> dict[str, st.SearchStrategy[Any]]:
        return {
            f.name: values_of(_bind(hints[f.name], bound))
            for f in dataclasses.fields(cls)
            if f.init and _optional(f) == optional
        }

    def field_values() -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({}, optional=values(True)).flatmap(
            lambda given: st.builds(
                cls, **{k: st.just(v) for k, v in given.items()}, **values(False)
            )
        )

    return st.deferred(field_values)


def _optional(field: Any) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _bind(hint: Any, bound: dict[Any, Any]) -> Any:
    if isinstance(hint, typing.TypeVar):
        return bound.get(hint, Any)
    args = typing.get_args(hint)
    if not args:
        return hint
    new = tuple(_bind(arg, bound) for arg in args)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.Union[new]  # noqa: UP007 - built from a tuple
    return typing.get_origin(hint)[new]


U64 = st.integers(0, 2**64 - 1)
TIMES = st.integers(0, NewestMicroseconds)
LINES = st.integers(0, 2**31 - 1)


@st.composite
def stack_tables(draw: st.DrawFn) -> StackTable:
    table = StackTable()
    for text in draw(st.lists(TEXT, max_size=3)):
        table.string(text)
    for frame in draw(st.lists(st.builds(Frame, TEXT, LINES, TEXT), max_size=3)):
        table.frame(frame)
    indices = st.lists(st.integers(0, len(table.frames) - 1), max_size=3).map(tuple)
    for stack in draw(st.lists(indices, max_size=3)):
        table.stack(stack)
    return table


@st.composite
def memory_traces(draw: st.DrawFn, sizes: st.SearchStrategy[int] = U64) -> MemoryTrace:
    """Traces whose columns hold anything their types can, in valid tables."""
    stacks = draw(stack_tables())
    pools = [(0, 0), *draw(st.lists(st.tuples(U64, U64), max_size=2))]

    def row(actions: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(
            actions,
            U64,
            sizes,
            U64,
            TIMES,
            st.integers(0, len(stacks.stacks) - 1),
            st.integers(0, len(Category) - 1),
            st.integers(0, len(stacks.strings) - 1),
            st.integers(0, len(stacks.strings) - 1),
            st.integers(0, len(pools) - 1),
            U64,
        )

    events, baseline = EventColumns(), LiveColumns()
    for values in draw(st.lists(row(st.integers(0, len(TraceAction) - 1)), max_size=5)):
        events.append(*values)
    for values in draw(st.lists(row(st.just(TraceAction.ALLOC.code)), max_size=3)):
        baseline.append(*values)
    return MemoryTrace(
        device=draw(TEXT),
        events=events,
        baseline=baseline,
        stacks=stacks,
        pools=pools,
        segments=tuple(_in_table(s) for s in draw(st.lists(values_of(Segment), max_size=2))),
        settings=draw(st.none() | values_of(AllocatorSettings)),
        complete=draw(st.booleans()),
        step=draw(st.none() | st.integers(0, 2**53 - 1)),
        annotations=tuple(draw(st.lists(st.builds(Annotation, TEXT, TEXT, TIMES), max_size=2))),
    )


def _in_table(segment: Segment) -> Segment:
    """The segment without stacks: those of a segment are rows of its trace's table."""
    blocks = tuple(dataclasses.replace(block, stack=0) for block in segment.blocks)
    return dataclasses.replace(segment, stack=0, blocks=blocks)


def same_trace(a: MemoryTrace, b: MemoryTrace) -> bool:
    """Equal in every field; stack tables are compared by their contents."""
    for f in dataclasses.fields(MemoryTrace):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if f.name == "stacks":
            x, y = ((t.strings, t.frames, t.stacks) for t in (x, y))
        if type(x) is not type(y) or x != y:
            return False
    return True
