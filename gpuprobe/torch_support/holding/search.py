"""The search for what holds the memory of tensors.

Breadth first from the names of the program: variables of the functions that run in any thread, of
those that an exception ended which is handled, and globals of its modules. What the collector can
reach from an object is what it consists of (`gc.get_referents`), so that nothing of the program is
called; gradients and what autograd saved are read from tensors. A second search begins at the
library's functions, and a third at the tensors that neither reached (`holding.unreached`).

Not found: derivatives of forward-mode AD, what the C++ part of a library keeps (reported as outside
Python), and attributes of a ``threading.local`` in other threads.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from types import FrameType, ModuleType, TracebackType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from gpuprobe.frame_variables import variables, variables_elsewhere
from gpuprobe.model.run.holders import HeldBy, Holder, HolderRoot, Kept
from gpuprobe.model.values import Bytes
from gpuprobe.torch_support.holding.names import (
    CACHED,
    SUSPENDED,
    Names,
    Path,
    Start,
    attributes,
    is_a,
)
from gpuprobe.torch_support.holding.objects import (
    ARRAY,
    CLASS,
    EXACT_DATA,
    FRAME,
    GRADIENT,
    GRAPH,
    LOCAL,
    LOCAL_DATA,
    MODEL,
    NODE,
    OUTSIDE,
    PLAIN,
    STATE,
    STORAGE,
    TENSOR,
    Allowance,
    Graphs,
    Key,
    Kinds,
    Reached,
    SearchLimits,
    Stopped,
    dtype_of,
    grad_fn,
    gradient,
    holder,
    is_leaf,
    kind_of,
    requires_grad,
    retains_grad,
    storage_keys,
)  # fmt: skip
from gpuprobe.torch_support.holding.unreached import Backwards
from gpuprobe.user_frames import PACKAGE, is_user_file

_CHUNK: Final = 20_000
_INSTANCES: Final = ("self", "cls")
_FOREIGN: Final = (type(None), threading._DummyThread)


_Variable: TypeAlias = tuple[HolderRoot, str, str, str]
"""The root, name, function and module of a variable."""


_ALL: Final = 0
"""As the identity of a child: each that the parent refers to."""


class Link(NamedTuple):
    """The last reference of a path, by the identities of its objects: what a remedy removes."""

    parent: int = 0
    child: int = 0
    graph_of: int = 0
    """A tensor whose autograd graph the path leads into; the reference is that to the graph."""
    start: _Variable | None = None
    """Of a path of one step: the variable."""
    error: str = ""
    """Of a path from the frames of an exception that is handled: its type."""


class Holders(dict[Key, Holder]):
    """The holder of each storage that was found. ``incomplete``: why others may be missing; empty
    if the search was finished. ``links``: by storage, the last reference to it, as long as the
    program does not run on; of those that the search from names found.
    """

    visited = 0
    incomplete = ""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[Key, Link] = {}


def holders_of(
    storages: Collection[Key],
    *,
    frames: Iterable[FrameType] | None = None,
    error: BaseException | None = None,
    limits: SearchLimits | None = None,
) -> Holders:
    """What holds each of these storages; the values of a mapping are their sizes in bytes, which
    autocast's cache and DDP's buckets are recognised by.

    ``frames``: the innermost frame of each thread to search, by default all that run. ``error``: an
    exception whose frames are searched too. Call it while no other thread of the program changes
    its objects, if possible: an object that does may be missed.

    Nothing of the program is called or changed, and no reference remains; the collector does not
    run meanwhile. Nothing is raised: `Holders.incomplete` has the reason.
    """
    with _Quiet():
        search = _Search(set(storages), frames, error, limits or SearchLimits())
        found = search.run()
        _infer(found, search, storages)
    return found


def lasting_holders_of(storages: Collection[Key]) -> Holders:
    """What holds each of these storages by a name that outlives the functions that run: globals,
    and variables of the outermost function of the program in each thread. Like `holders_of`, but
    for storages that no such name leads to, which are left out.
    """
    with _Quiet():
        return _Search(set(storages), None, None, SearchLimits()).run_lasting()


_MOST_SEARCHES: Final = 8


def held_elsewhere(
    found: Holders,
    sizes: Mapping[Key, int],
    *,
    frames: Iterable[FrameType] | None = None,
) -> Holders:
    """What else holds storages whose holders were `found`: for each holder, what a search finds
    that does not follow the last references to what it holds. Of memory that a graph keeps this is
    the reference to the graph, as `detach` removes it.

    ``sizes``: in bytes. Only holders with an eighth of all bytes are tried, one after the other,
    which share the time of one search. To be called before the program runs on.
    """
    groups: dict[tuple[object, ...], list[Key]] = defaultdict(list)
    for key in found.links:
        groups[found[key].owner].append(key)
    least = sum(sizes.values()) / _MOST_SEARCHES
    large = [keys for keys in groups.values() if sum(sizes[key] for key in keys) >= least]
    limits = SearchLimits()
    limits = replace(limits, seconds=limits.seconds / max(1, len(large)))
    others = Holders()
    with _Quiet():
        for keys in large:
            cut = _Cut(found.links[key] for key in keys)
            search = _Search(set(keys), frames, None, limits, cut)
            rest = search.run()
            others.update(rest)
            others.incomplete = others.incomplete or rest.incomplete
            others.visited += rest.visited
    return others


def other_names_of(holders: Mapping[Key, Holder], sizes: Mapping[Key, int]) -> Holders:
    """By which other names that last the program reaches storages whose ``holders`` are known: for
    each object that a variable leads to them by, what a search finds that does not begin with this
    variable. Deleting one name frees nothing. Of what `held_elsewhere` tries.
    """
    groups: dict[_Variable, list[Key]] = defaultdict(list)
    for key, one in holders.items():
        of_name = one.root in (HolderRoot.LOCAL, HolderRoot.GLOBAL) and one.kept is Kept.TENSOR
        if len(one.path) > 1 and of_name:
            module = one.name.removesuffix("".join(step.label for step in one.path))
            start = Start(one.root, one.path[0].label, one.function, module=module.rstrip("."))
            groups[_identity(start)].append(key)
    least = sum(sizes.values()) / _MOST_SEARCHES
    others = Holders()
    with _Quiet():
        for variable, keys in groups.items():
            if sum(sizes[key] for key in keys) >= least:
                cut = _Cut()
                cut.starts.add(variable)
                search = _Search(set(keys), None, None, SearchLimits(), cut)
                others.update(search.run_lasting())
    return others


class _Cut:
    """References that a search does not follow."""

    def __init__(self, links: Iterable[Link] = ()) -> None:
        self.starts: set[_Variable] = set()
        self.errors: set[str] = set()
        self.graphs: set[int] = set()
        self.children: dict[int, set[int]] = defaultdict(set)
        for link in links:
            if link.graph_of:
                self.graphs.add(link.graph_of)
            elif link.error:
                self.errors.add(link.error)
            elif link.start is not None:
                self.starts.add(link.start)
            else:
                self.children[link.parent].add(link.child)

    def has(self, parent: object, child: object) -> bool:
        """Whether a reference is not followed."""
        children = self.children.get(id(parent), ())
        return id(child) in children or _ALL in children

    def begins(self, start: Start) -> bool:
        """Whether a variable is not followed."""
        of_error = start.root is HolderRoot.EXCEPTION and start.error in self.errors
        return of_error or _identity(start) in self.starts


MOST_HOLDERS: Final = 5
_LEAST: Final = 3
"""The elements with tensors, or saved tensors, from which a container or variable may grow."""


def largest_holders(
    error: BaseException | None = None,
    frames: Iterable[FrameType] | None = None,
) -> tuple[Holder, ...]:
    """The containers and variables of the program that keep the most memory, apart from weights and
    optimizer state: those with autograd graphs first.
    """
    with _Quiet():
        search = _Search(None, frames, error, SearchLimits(100_000, 1.0))
        found = search.run()
        return _most(_grouped(found, search.sizes))


def with_earlier(found: tuple[Holder, ...], before: tuple[Holder, ...]) -> tuple[Holder, ...]:
    """Those at the end of the program, and those that functions had which have returned."""
    known = {(one.name, one.function) for one in found}
    returned = [one for one in before if one.function and (one.name, one.function) not in known]
    return _most([*found, *returned])


def _most(found: Iterable[Holder]) -> tuple[Holder, ...]:
    ordered = sorted(
        found,
        key=lambda one: (
            not (one.graphs or one.saved_tensors),
            -one.bytes - one.saved_bytes,
            one.name,
        ),
    )
    return tuple(ordered[:MOST_HOLDERS])


def _grouped(found: Holders, sizes: dict[Key, int]) -> Iterator[Holder]:
    """A holder for each container of which several elements, and each graph of which several nodes,
    keep memory.
    """
    groups: dict[tuple[HolderRoot, str, str, str, tuple[str, ...]], list[tuple[Key, Holder]]] = (
        defaultdict(list)
    )
    for key, one in found.items():
        path = _outermost(one.path)
        names = tuple(step.label for step in path)
        module = one.name[: len(one.name) - len("".join(step.label for step in one.path))]
        groups[(one.root, module, one.function, one.via, names)].append((key, one))
    for (_, module, _, _, names), members in groups.items():
        if len(members) >= _LEAST:
            first = members[0][1]
            path = _outermost(first.path)
            own = [(key, one) for key, one in members if one.kept not in _BY_GRAPH]
            size = sum(sizes[key] for key, _ in own)
            yield replace(
                first,
                name=module + "".join(names),
                kind=kind_of(path),
                path=path,
                kept=Kept.TENSOR,
                node="",
                tensors=len(own),
                graphs=sum(one.graphs for _, one in own),
                bytes=Bytes(size),
                saved_tensors=len(members) - len(own),
                saved_bytes=Bytes(sum(sizes[key] for key, _ in members) - size),
            )


_BY_GRAPH: Final = (Kept.SAVED, Kept.VARIABLE)


def _outermost(path: tuple[HeldBy, ...]) -> tuple[HeldBy, ...]:
    """The path to the container with the most elements that keep memory, or to a graph."""
    counts = [step.holding or 0 for step in path]
    most = max(counts, default=0)
    if most >= _LEAST:
        return path[: counts.index(most) + 1]
    for at, step in enumerate(path):
        if step.label.startswith(GRAPH):
            return (*path[:at], HeldBy(GRAPH, "graph"))
    return path


class _Quiet:
    """The state that a search runs in: without the collector, and without what modes and subclasses
    of tensors do. Restored afterwards.
    """

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()
        self._function = torch._C.DisableTorchFunction()
        self._function.__enter__()
        self._dispatch = torch._C._DisableTorchDispatch()

    def __exit__(self, *_: object) -> None:
        del self._dispatch
        self._function.__exit__(None, None, None)
        if self._collects:
            gc.enable()


class _Edge(NamedTuple):
    """A step that no referent is: from a tensor, a module or a thread's variables."""

    parent: object
    label: str
    kept: Kept


class _Search:
    """Visits each object once. ``targets``: the storages to find, None for all but weights."""

    def __init__(
        self,
        targets: set[Key] | None,
        frames: Iterable[FrameType] | None,
        error: BaseException | None,
        limits: SearchLimits,
        cut: _Cut | None = None,
    ) -> None:
        self.targets = targets
        self._cut = cut
        self.sizes: dict[Key, int] = {}  # without targets
        self.weights: list[tuple[int, int]] = []  # elements, bytes of an element
        self.parallel: list[object] = []  # DistributedDataParallel
        self._addresses = targets is not None and any(type(key) is tuple for key in targets)
        self._budget = Allowance(limits)
        self.kinds = Kinds()
        self.graphs = Graphs()
        self.visited: set[int] = set()
        self._edges: dict[int, _Edge] = {}
        self._found: dict[Key, Reached] = {}
        self._levels: list[list[object]] = []
        self._starts: dict[int, Start] = {}
        self._holders = Holders()
        self._error = error
        self._nodes = 0
        self._weights: list[tuple[_Edge, object]] = []
        own = threading.get_ident()
        if frames is None:
            threads = sys._current_frames()
            # This call's frame has the dict as a variable, which has the frame: a cycle.
            threads[own] = _caller()
        else:
            threads = dict(enumerate(frames))
        # A thread of autograd's engine: that which called the engine waits for it.
        self._in_engine = type(threading._active.get(own)) in _FOREIGN  # type: ignore[attr-defined]
        self._threads = [
            (thread == own or frames is not None, list(_callers(frame)))
            for thread, frame in sorted(threads.items(), key=lambda item: item[0] != own)
        ]
        del threads
        self._running = {id(frame) for _, called in self._threads for frame in called}
        self.modules: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if is_a(module, ModuleType):
                self.modules.setdefault(id(vars(module)), name)
        self.visited.update(self.modules)

    @property
    def missing(self) -> set[Key]:
        """The storages that are not found yet."""
        return set() if self.targets is None else self.targets - self._holders.keys()

    def run(self) -> Holders:
        """Search from the program's names, then from the library's, then backwards."""
        found = self._holders
        with self._searching():
            self._from(self._script())
            if self.targets is None or self.missing:
                self._from(self._frames(users=True, instances=True))
            if self.targets is None or self.missing:
                self._from(self._modules())
            if self.missing:
                self._from(self._suspended())
            if self.missing:
                self._from(self._frames(users=False))
            if self.missing and self._cut is None:
                self._forget()
                backwards = Backwards(self.kinds, self.visited, self.modules, self.check_limits)
                found.update(backwards.run(self.missing))
                found.incomplete = backwards.incomplete
        found.visited = len(self.visited) + self._nodes
        if not EXACT_DATA and self._nodes:
            found.incomplete = found.incomplete or (
                f"torch {torch.__version__} does not report saved tensors without running hooks"
            )
        return found

    def run_lasting(self) -> Holders:
        """Search from the names that outlive the functions that run."""
        found = self._holders
        # Their frames are those of functions that run, or wait for the next value.
        self.visited.update(id(one) for one in gc.get_objects() if type(one) in SUSPENDED)
        with self._searching():
            self._from(self._lasting())
            if self.missing:
                self._from(self._modules())
            of_function = None if self._cut is None else {one[2] for one in self._cut.starts}
            for own, frame in self._callers_of_innermost():
                known = of_function is None or frame.f_code.co_name in of_function
                if self.missing and known:
                    self._from(self._variables(frame, own=own, instances=False))
        return found

    @contextmanager
    def _searching(self) -> Iterator[None]:
        """Inside, what ends the search early is why it is incomplete."""
        try:
            yield
        except Stopped as stop:
            self._resolve()
            self._holders.incomplete = str(stop)
        except Exception as fault:  # noqa: BLE001 - the program's objects may be in any state
            self._holders.incomplete = f"an internal error: {type(fault).__name__}: {fault}"
        finally:
            self._forget()  # the frames refer to the search

    def _lasting(self) -> Iterator[tuple[Start, object]]:
        for own, called in self._threads:
            users = [one for one in called if _is_function_of_program(one)]
            for frame in users[-1:]:
                yield from self._variables(frame, own=own)
        main = sys.modules.get("__main__")
        if main is not None:
            yield from _names_of(vars(main), "")

    def _callers_of_innermost(self) -> Iterator[tuple[bool, FrameType]]:
        """The program's functions that run between the outermost and the innermost of each thread,
        the outer ones first: what they pass on outlives the calls.
        """
        for own, called in self._threads:
            users = [one for one in called if _is_function_of_program(one)]
            for frame in users[-2:0:-1]:
                yield own, frame

    def _variables(
        self, frame: FrameType, *, own: bool, instances: bool = True
    ) -> Iterator[tuple[Start, object]]:
        code = frame.f_code
        place = (code.co_name, code.co_filename, frame.f_lineno or code.co_firstlineno)
        for name, value in (variables if own else variables_elsewhere)(frame).items():
            if instances or name not in _INSTANCES:
                yield Start(HolderRoot.LOCAL, name, *place), value

    def _forget(self) -> None:
        """Release what the searches so far refer to, which would be found as holders."""
        self._levels, self._edges, self._starts, self._found = [], {}, {}, {}
        self._weights = []
        self._threads = []
        self._nodes += len(self.graphs.nodes)
        self.graphs = Graphs()

    def check_limits(self) -> None:
        """Raise `Stopped` if there was enough."""
        self._budget.check(len(self.visited) + self._nodes + len(self.graphs.nodes))

    # Where paths begin

    def _script(self) -> Iterator[tuple[Start, object]]:
        yield from self._frames(users=True)
        yield from self._exceptions()
        main = sys.modules.get("__main__")
        if main is not None:
            yield from _names_of(vars(main), "")
        known = set(self.modules)
        for _, called in self._threads:
            for frame in called:
                namespace = frame.f_globals
                if id(namespace) not in known and is_user_file(frame.f_code.co_filename):
                    known.add(id(namespace))
                    yield from _names_of(namespace, "")

    def _modules(self) -> Iterator[tuple[Start, object]]:
        main = sys.modules.get("__main__")
        for name, module in list(sys.modules.items()):
            if module is not main and is_a(module, ModuleType) and is_program_module(module):
                yield from _names_of(vars(module), name)

    def _frames(self, *, users: bool, instances: bool = False) -> Iterator[tuple[Start, object]]:
        """The variables of the program's functions, or, if not ``users``, the library's.
        ``instances``: what the program's methods call ``self``. That is searched after all other
        names: one that stays, such as ``trainer``, is clearer.
        """
        for own, called in self._threads:
            waiting = self._in_engine and called[0].f_code.co_name == "_engine_run_backward"
            for frame in called:
                code = frame.f_code
                if is_user_file(code.co_filename) is not users or code.co_filename.startswith(
                    PACKAGE
                ):
                    continue
                if code.co_name == "<module>":  # its globals
                    continue
                read = variables if own or waiting else variables_elsewhere
                place = (code.co_name, code.co_filename, frame.f_lineno or code.co_firstlineno)
                for name, value in read(frame).items():
                    if not users or (name in _INSTANCES) is instances:
                        yield Start(HolderRoot.LOCAL, name, *place), value

    def _exceptions(self) -> Iterator[tuple[Start, object]]:
        """Variables of the functions that exceptions ended, which are handled or were the last."""
        errors: list[tuple[BaseException | None, str]] = [(self._error, "")]
        handled: Any
        for handled in sys._current_exceptions().values():
            error = handled[1] if type(handled) is tuple else handled
            if error is not None and _passes_on(error):
                error = error.__context__
            errors.append((error, ""))
        errors += [(vars(sys).get(name), f"sys.{name}") for name in ("last_exc", "last_value")]
        known: set[int] = set()
        while errors:
            error, via = errors.pop(0)
            if error is None or id(error) in known:
                continue
            known.add(id(error))
            at: TracebackType | None = error.__traceback__
            while at is not None:
                code = at.tb_frame.f_code
                if id(at.tb_frame) not in self._running and code.co_name != "<module>":
                    name = type(error).__name__
                    place = (code.co_name, code.co_filename, at.tb_lineno)
                    for variable, value in variables(at.tb_frame).items():
                        start = Start(HolderRoot.EXCEPTION, variable, *place, error=name, via=via)
                        yield start, value
                at = at.tb_next
            errors += [(error.__context__, via), (error.__cause__, via)]

    def _suspended(self) -> Iterator[tuple[Start, object]]:
        """Variables of the program's generators that no name refers to: a loop runs them."""
        for one in [one for one in gc.get_objects() if type(one) in SUSPENDED]:
            if id(one) in self.visited:
                continue
            frame_name, code_name = SUSPENDED[type(one)]
            code = getattr(one, code_name)
            if code.co_filename.startswith(PACKAGE):  # this one is among them
                continue
            frame = getattr(one, frame_name)
            if frame is not None and id(frame) not in self._running:
                place = (code.co_name, code.co_filename, frame.f_lineno or code.co_firstlineno)
                for name, value in variables(frame).items():
                    yield Start(HolderRoot.GENERATOR, name, *place), value

    # The search

    def _from(self, starts: Iterator[tuple[Start, object]]) -> None:
        level: list[object] = []
        self._levels = [level]
        for start, value in starts:
            if self._cut is not None and self._cut.begins(start):
                continue
            if id(value) not in self.visited and self.kinds[type(value)]:
                self.visited.add(id(value))
                self._starts[id(value)] = start
                level.append(value)
        while self._levels[-1]:
            if self.targets is not None and self.targets <= self._found.keys() | self._holders:
                break
            self.check_limits()
            self._levels.append(self._next(self._levels[-1]) or self._weights_of_graphs())
        self._weights = []
        self._resolve()

    def _weights_of_graphs(self) -> list[object]:
        """The weights that graphs accumulate into, and no name has led to."""
        following: list[object] = []
        for edge, weight in self._weights:
            self._add(edge, weight, following)
        self._weights = []
        return following

    def _next(self, level: list[object]) -> list[object]:
        """The objects one step further."""
        following: list[object] = []
        kinds, visited = self.kinds, self.visited
        for start in range(0, len(level), _CHUNK):
            self.check_limits()
            chunk = level[start : start + _CHUNK]
            plain = [one for one in chunk if kinds[type(one)] is PLAIN]
            if len(plain) < len(chunk):
                for one in chunk:
                    kind = kinds[type(one)]
                    if kind is not PLAIN and self._special(one, kind, following):
                        plain.append(one)
            inner = self._referents(plain)
            # Most are numbers and strings: without a loop in Python, as SKIPPED is 0.
            searched = compress(inner, map(kinds.__getitem__, map(type, inner)))
            fresh = [one for one in searched if id(one) not in visited]
            # One that several refer to is in the list several times.
            unique = {id(one): one for one in fresh}
            visited.update(unique)
            following += unique.values()
        return following

    def _referents(self, plain: list[object]) -> list[object]:
        """What objects refer to, without the references that are cut."""
        cut = self._cut
        if cut is None:
            return gc.get_referents(*plain)
        special = cut.children.keys() | cut.graphs
        inner = gc.get_referents(*(one for one in plain if id(one) not in special))
        for one in plain:
            if id(one) in special:
                # A tensor refers to its node, if Python has an object for that.
                node = NODE if id(one) in cut.graphs else None
                inner += (
                    child
                    for child in gc.get_referents(one)
                    if not cut.has(one, child) and self.kinds[type(child)] != node
                )
        return inner

    def _special(self, one: Any, kind: int, following: list[object]) -> bool:
        """Visit an object that is more than its referents; whether to visit these as well."""
        if kind is TENSOR:
            self._tensor(one, following)
        elif kind is STORAGE:
            self._reach(one._cdata, Kept.STORAGE, one, "", False, one.nbytes)
            if self._addresses:
                self._reach((str(one.device), one.data_ptr()), Kept.STORAGE, one, "", False)
        elif kind is NODE:
            self._graph(one, one, following)
        elif kind in (CLASS, FRAME, STATE):
            return self._is_searched(one, kind)
        elif kind is LOCAL:
            for name, value in list(_vars_of_thread(one).items()):
                self._add(_Edge(one, f".{name}", Kept.TENSOR), value, following)
        elif kind is MODEL:
            self._model(one, following)
        elif kind is ARRAY and one.dtype.hasobject:
            for at, each in enumerate(one.ravel().tolist()):
                self._add(_Edge(one, f".flat[{at}]", Kept.TENSOR), each, following)
        return kind is not ARRAY

    def _is_searched(self, one: Any, kind: int) -> bool:
        """Whether a class, frame or optimizer is: a library's classes are not."""
        if kind is FRAME:
            return id(one) not in self._running
        if kind is STATE:
            return self.targets is not None
        module = sys.modules.get(str(type.__getattribute__(one, "__module__")))
        return module is not None and (
            module is sys.modules.get("__main__") or is_program_module(module)
        )

    def _add(self, edge: _Edge, child: object, following: list[object]) -> None:
        if self._cut is not None and self._cut.has(edge.parent, child):
            return
        if id(child) not in self.visited and self.kinds[type(child)]:
            self.visited.add(id(child))
            self._edges[id(child)] = edge
            following.append(child)

    def _model(self, model: torch.nn.Module, following: list[object]) -> None:
        """The parts of a module by their names, one step away."""
        if "reducer" in vars(model) and "logger" in vars(model):
            self.parallel.append(model)
        for group in ("_modules", "_parameters", "_buffers"):
            own = vars(model).get(group)
            if type(own) is not dict:
                continue
            if self._cut is not None and id(model) in self._cut.children:
                # By its name a part is an attribute of the module: it is in this dict.
                self._cut.children[id(own)] |= self._cut.children[id(model)]
            if self.targets is None and group != "_modules":
                self.visited.add(id(own))
                continue
            for name, part in list(own.items()):
                self._add(_Edge(model, f".{name}", Kept.TENSOR), part, following)

    def _tensor(self, tensor: Any, following: list[object]) -> None:
        leaf = is_leaf(tensor)
        if leaf and requires_grad(tensor):
            self.weights.append((torch._C.TensorBase.numel(tensor), dtype_of(tensor).itemsize))
        kept = Kept.TENSOR
        if (edge := self._edges.get(id(tensor))) is not None and edge.kept is not Kept.SAVED:
            kept = edge.kept
        graph = not leaf
        if self.targets is not None or not is_a(tensor, torch.nn.Parameter):
            for key in storage_keys(tensor, self._addresses):
                self._reach(key, kept, tensor, "", graph, _nbytes(tensor))
        if leaf or retains_grad(tensor):
            grad = gradient(tensor)
            if grad is not None and (self.targets is not None or not leaf):
                self._add(_Edge(tensor, GRADIENT, Kept.GRAD), grad, following)
        if graph and not (self._cut is not None and id(tensor) in self._cut.graphs):
            try:
                node = grad_fn(tensor)
            except RuntimeError:  # a view whose base was changed in a way that autograd refuses
                return
            self._graph(node, tensor, following)

    def _graph(self, first: object, tensor: object, following: list[object]) -> None:
        """What the nodes of a tensor's graph keep, and the objects that they refer to."""
        of_tensor = first is not tensor
        for node in self.graphs.of(first):
            name = type(node).__name__
            label = ".grad_fn" if node is first and of_tensor else f".grad_fn → {name}"
            if not of_tensor:
                label = "" if node is first else f" → {name}"
            for one, kept, packed in self.graphs.kept(node):
                kind = self.kinds[type(one)]
                if kind is TENSOR and not packed and kept is Kept.SAVED:
                    if self.targets is None and is_a(one, torch.nn.Parameter):
                        continue
                    for key in storage_keys(one, self._addresses):
                        self._reach(key, kept, tensor, name, True, _nbytes(one))
                    continue
                if self.targets is None and is_a(one, torch.nn.Parameter):
                    continue
                inner = f"{label} → {'packed' if packed else kept.value}"
                if kept is Kept.VARIABLE:
                    self._weights.append((_Edge(tensor, inner, kept), one))
                else:
                    self._add(_Edge(tensor, inner, kept), one, following)
            if node is not tensor and gc.get_referents(node):
                self._add(_Edge(tensor, label, Kept.TENSOR), node, following)
            if len(self.graphs.nodes) & 0xFFF == 0:
                self.check_limits()

    def _reach(
        self,
        key: Key,
        kept: Kept,
        holder: object,
        node: str,
        graph: bool,
        nbytes: Callable[[], int] | None = None,
    ) -> None:
        if self.targets is None:
            if key not in self.sizes and nbytes is not None:
                self.sizes[key] = nbytes()
        elif key not in self.targets:
            return
        if key in self._holders:
            return
        distance = len(self._levels) + (kept is Kept.SAVED)
        found = self._found.get(key)
        # Of two equally short ones, the tensor itself rather than its graph.
        if found is None or (distance, kept is Kept.SAVED) < (
            found.distance,
            found.kept is Kept.SAVED,
        ):
            self._found[key] = Reached(distance, kept, holder, node, graph)

    # Paths

    def _resolve(self) -> None:
        """Make holders of what this search has reached."""
        found, self._found = self._found, {}
        parents = self._parents({id(one.holder): one.holder for one in found.values()})
        labels = {
            (id(edge.parent), child): edge.label
            for child, edge in self._edges.items()
            if child in parents
        }
        names = Names()
        paths: dict[int, Path] = {}
        counts: dict[int, set[int]] = defaultdict(set)
        links: dict[int, Link] = {}
        for one in found.values():
            if id(one.holder) in paths:
                continue
            chain = [one.holder]
            while (above := parents.get(id(chain[-1]))) is not None:
                chain.append(above)
            chain.reverse()
            start = self._starts[id(chain[0])]
            links[id(one.holder)] = _link(start, chain, labels)
            path = paths[id(one.holder)] = names.path(start, chain, labels)
            for parent, child in itertools.pairwise(path.objects):
                counts[id(parent)].add(id(child))
        for key, one in found.items():
            self._holders[key] = holder(paths[id(one.holder)], one, counts)
            link = links[id(one.holder)]
            if one.kept is Kept.SAVED and not link.graph_of:
                link = Link(graph_of=id(one.holder))
            self._holders.links[key] = link

    def _parents(self, ends: dict[int, object]) -> dict[int, object]:
        """What each object on the paths to these was reached from."""
        parents: dict[int, object] = {}
        requested = set(ends)
        for at in range(len(self._levels) - 1, 0, -1):
            here = [one for one in self._levels[at] if id(one) in requested]
            rest = set()
            for one in here:
                edge = self._edges.get(id(one))
                if edge is None:
                    rest.add(id(one))
                else:
                    parents[id(one)] = edge.parent
                    requested.add(id(edge.parent))
            for above in self._levels[at - 1]:
                if not rest:
                    break
                hits = rest.intersection(map(id, gc.get_referents(above)))
                for hit in hits:
                    parents[hit] = above
                if hits:
                    requested.add(id(above))
                    rest -= hits
        return parents


def _identity(start: Start) -> _Variable:
    return start.root, start.name, start.function, start.module


def _link(start: Start, chain: list[object], labels: Mapping[tuple[int, int], str]) -> Link:
    """The reference on a chain of objects that a remedy removes: to a graph, to an exception, from
    a cache, from the innermost container of the program, or the last one.
    """
    pairs = list(itertools.pairwise(chain))
    for parent, child in pairs:
        if labels.get((id(parent), id(child)), "").startswith(GRAPH):
            return Link(graph_of=id(parent))
    for parent, child in reversed(pairs):
        if is_a(parent, CACHED):
            return Link(id(parent), _ALL)
        if is_a(child, BaseException):
            return Link(id(parent), id(child))
    if start.root is HolderRoot.EXCEPTION:
        return Link(error=start.error)
    if len(chain) == 1:
        return Link(start=_identity(start))
    if labels.get((id(chain[-2]), id(chain[-1]))) == GRADIENT:
        return Link(id(chain[-2]), id(chain[-1]))  # of the tensor, whoever holds that
    owned = {id(child) for parent, child in pairs if attributes(parent) is child}
    for parent, child in reversed(pairs):
        if is_a(child, torch.nn.Module):
            break  # its tensors are removed, and not the module
        if type(parent) in _CONTAINERS and id(parent) not in owned:
            return Link(id(parent), id(child))
    return Link(id(chain[-2]), id(chain[-1]))


_CONTAINERS: Final = (dict, list, tuple, set, deque)


def _nbytes(tensor: Any) -> Callable[[], int]:
    def nbytes() -> int:
        try:
            return int(tensor.untyped_storage().nbytes())
        except (NotImplementedError, RuntimeError):
            return 0

    return nbytes


def _vars_of_thread(local: Any) -> dict[str, Any]:
    """What a ``threading.local`` has in the calling thread."""
    read: Any = LOCAL_DATA.__getattribute__
    found: dict[str, Any] = read(local, "__dict__")
    return found


def _passes_on(error: BaseException) -> bool:
    """Whether an exception is that of the operator at which this search was requested: a function
    of gpuprobe has it, and will raise it again.
    """
    trace = error.__traceback__
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _caller() -> FrameType:
    """The innermost frame that is not this package's."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_function_of_program(frame: FrameType) -> bool:
    code = frame.f_code
    own = is_user_file(code.co_filename) and not code.co_filename.startswith(PACKAGE)
    return own and code.co_name != "<module>"


def is_program_module(module: ModuleType) -> bool:
    """Whether a module is the program's, and not a library's."""
    path = vars(module).get("__file__")
    return type(path) is str and is_user_file(path)


def _names_of(namespace: dict[str, Any], module: str) -> Iterator[tuple[Start, object]]:
    for name, value in list(namespace.items()):
        if type(name) is str and not name.startswith("__"):
            yield Start(HolderRoot.GLOBAL, name, module=module), value


def _infer(found: Holders, search: _Search, storages: Collection[Key]) -> None:
    """What C++ keeps and nothing refers to, by the sizes."""
    if not isinstance(storages, Mapping):
        return
    outside = {key: one for key in storages if (one := found.get(key)) == OUTSIDE}
    casts = {2 * count for count, size in search.weights if size == 4}
    casts.intersection_update(storages[key] for key in outside)
    if casts and not (torch.is_autocast_cache_enabled() and _autocasts()):
        casts = set()
    buckets = {size for one in search.parallel for size in _buckets(one)} if outside else set()
    for key, one in outside.items():
        size = storages[key]
        if size in casts:
            why = "autocast is enabled, and a weight has this size in half precision"
            found[key] = replace(one, root=HolderRoot.AUTOCAST, inferred=why)
        elif size in buckets:
            why = "a bucket has this size"
            found[key] = replace(one, root=HolderRoot.DDP, inferred=why)


def _autocasts() -> bool:
    """Whether autocast is enabled: in this thread, or around the operator that it runs, inside of
    which it is not (``cached_cast`` excludes its key). Then its context is an object.
    """
    kind = torch.amp.autocast_mode.autocast
    return torch._C._is_any_autocast_enabled() or any(
        is_a(one, kind) and one._enabled for one in gc.get_objects()
    )


def _buckets(parallel: Any) -> Iterator[int]:
    """The sizes of a reducer's buckets, as DDP logs them."""
    logged = vars(parallel)["logger"]._get_ddp_logging_data().strs_map
    for name in ("bucket_sizes", "rebuilt_bucket_sizes"):
        yield from (int(size) for size in logged.get(name, "").split(",") if size.strip())
