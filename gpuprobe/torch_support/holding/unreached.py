"""What holds the tensors that no search from a name has reached: searched backwards.

From each such tensor to the objects that refer to it, and to those that refer to them, as far as
there are any. If a library's module or class is among them, the path from there is the holder. If
they only refer to one another, they are a cycle, which the collector has not freed yet. Otherwise
C++ code, or a value that an expression computes, holds the outermost object.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import re
import sys
import threading
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, Final

import torch

from gpuprobe.model.run.holders import NODE_HOOKS, CycleObject, Holder, HolderRoot, Kept
from gpuprobe.torch_support.holding.names import (
    SUSPENDED,
    Names,
    Start,
    attributes,
    is_a,
    variable_of,
)
from gpuprobe.torch_support.holding.objects import (
    NODE,
    OUTSIDE,
    STORAGE,
    TENSOR,
    Graphs,
    Key,
    Kinds,
    Reached,
    grad_fn,
    gradient,
    holder,
    is_leaf,
    kind_of,
    retains_grad,
    storage_keys,
)  # fmt: skip

_FEW: Final = 24
"""Objects up to which `gc.get_referrers` is faster than comparing in Python."""
_MOST: Final = 100_000
"""The objects that lead to the tensors, of which all are kept meanwhile."""


class Backwards:
    """The search. ``visited``: the objects that names lead to; ``modules``: the names of modules by
    the identity of their dict; ``check``: raises if a limit is reached.
    """

    def __init__(
        self, kinds: Kinds, visited: set[int], modules: dict[int, str], check: Callable[[], None]
    ) -> None:
        self._kinds = kinds
        self._visited = visited
        self._modules = modules
        self._check = check
        self._missing: set[Key] = set()
        self._addresses = False
        self.incomplete = ""
        self._graphs = Graphs()
        # Steps that no referent is, by the object that they lead to: of autograd.
        self._steps: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._labels: dict[tuple[int, int], str] = {}
        self._sources: dict[Key, list[tuple[int, Kept, str]]] = defaultdict(list)
        # Each object once, and nowhere else: references to them are counted.
        self._objects: dict[int, Any] = {}
        self._above: dict[int, list[int]] = defaultdict(list)
        self._tops: dict[int, Start] = {}
        self._held: set[int] = set()  # components that something else refers to
        self._running: set[int] = set()  # frames, which have not ended

    def run(self, missing: set[Key]) -> dict[Key, Holder]:
        """The holders of these storages: what the references lead to backwards, with its name."""
        self._missing = missing
        self._running = _running_frames()
        self._addresses = any(type(key) is tuple for key in missing)
        every = gc.get_objects()
        known = set(map(id, every))
        leading = {
            kind for kind in set(map(type, every)) if self._kinds[kind] in (TENSOR, STORAGE, NODE)
        }
        sources = [one for one in every if type(one) in leading]
        del every  # or it would refer to each of them
        for one in sources:
            self._source(one)
        del sources
        self._climb(known)
        return self._named()

    def _source(self, one: Any) -> None:
        """Note a tensor, storage or node if it leads to a missing storage."""
        kind = self._kinds[type(one)]
        if kind == TENSOR and id(one) not in self._visited:
            for key in storage_keys(one, self._addresses):
                self._add(key, one, Kept.TENSOR, "")
            leaf = is_leaf(one)
            if leaf or retains_grad(one):
                grad = gradient(one)
                if grad is not None:
                    self._link(one, grad, ".grad")
                    for key in storage_keys(grad, self._addresses):
                        self._add(key, grad, Kept.GRAD, "")
            if not leaf:
                try:
                    node = grad_fn(one)
                except RuntimeError:
                    return
                self._link(one, node, ".grad_fn")
                self._nodes(node)
        elif kind == STORAGE:
            self._add(one._cdata, one, Kept.STORAGE, "")
        elif kind == NODE:
            self._nodes(one)

    def _nodes(self, first: Any) -> None:
        for node in self._graphs.of(first):
            name = type(node).__name__
            for following, _ in node.next_functions:
                if following is not None:
                    self._link(node, following, f" → {type(following).__name__}")
            for one, kept, packed in self._graphs.kept(node):
                if self._kinds[type(one)] == TENSOR and not packed:
                    for key in storage_keys(one, self._addresses):
                        self._add(key, node, kept, name)
                elif self._kinds[type(one)]:
                    self._link(node, one, " → packed")
            if len(self._graphs.nodes) & 0xFFF == 0:
                self._check()

    def _add(self, key: Key, one: object, kept: Kept, node: str) -> None:
        if key in self._missing:
            self._objects[id(one)] = one
            self._sources[key].append((id(one), kept, node))

    def _link(self, parent: object, child: object, label: str) -> None:
        self._graphs.nodes.setdefault(id(parent), parent)
        self._steps[id(child)].append((id(parent), label))

    # Upwards

    def _climb(self, known: set[int]) -> None:
        """Collect all that leads to the sources."""
        level = list(self._objects)
        while level and len(self._objects) < _MOST:
            self._check()
            following: list[int] = []
            for child in level:
                for parent, label in self._steps.get(child, ()):
                    self._labels[parent, child] = label
                    self._parent(self._graphs.nodes[parent], child, following)
            level_ids = {one for one in level if one not in self._tops}
            for parent in self._referrers(level_ids):
                if id(parent) not in known or is_a(parent, ModuleType):
                    continue
                if is_a(parent, FrameType) and id(parent) in self._running:
                    continue  # a search from its variables has found what they hold
                for child in dict.fromkeys(map(id, gc.get_referents(parent))):
                    if child in level_ids and not self._is_weak(parent, self._objects[child]):
                        self._parent(parent, child, following)
            level = following
        self.incomplete = f"stopped after {_MOST:,} objects that lead to tensors" if level else ""

    def _is_weak(self, parent: object, child: object) -> bool:
        """Whether a class refers to it as its own part, or an instance to its class."""
        return is_a(child, type)

    def _referrers(self, ids: set[int]) -> Iterator[Any]:
        if len(ids) <= _FEW:
            return iter(gc.get_referrers(*[self._objects[one] for one in ids]))
        return (
            one for one in gc.get_objects() if not ids.isdisjoint(map(id, gc.get_referents(one)))
        )

    def _parent(self, parent: Any, child: int, following: list[int]) -> None:
        self._above[child].append(id(parent))
        if id(parent) in self._objects:
            return
        self._objects[id(parent)] = parent
        following.append(id(parent))
        start = self._top(parent)
        if start is not None:
            self._tops[id(parent)] = start

    def _top(self, one: Any) -> Start | None:
        """What a path begins with here, if it is a name that stays."""
        if (module := self._modules.get(id(one))) is not None:
            return Start(HolderRoot.GLOBAL, "", module=module)
        if is_a(one, type):
            name = type.__getattribute__(one, "__name__")
            module = str(type.__getattribute__(one, "__module__"))
            return Start(HolderRoot.CLASS, f"{module}.{name}")
        if is_a(one, threading.Thread):
            return Start(HolderRoot.THREAD, str(attributes(one).get("_name", "")))
        return None

    # Names

    def _named(self) -> dict[Key, Holder]:
        below = self._from_tops()
        components = self._components()
        members: dict[int, list[int]] = defaultdict(list)
        for one, number in components.items():
            members[number].append(one)
        # Before names are read, which may make the dict of an instance's attributes.
        self._held = {number for number, ones in members.items() if self._held_elsewhere(ones)}
        names = Names()
        found = {}
        for key in self._missing:
            sources = self._sources.get(key, [])
            held = next((one for one in sources if one[0] in below), None)
            if held is not None:
                chain = [held[0]]
                while (parent := below[chain[-1]]) is not None:
                    chain.append(parent)
                found[key] = self._holder(names, chain[::-1], held)
                continue
            in_cycles = (self._in_cycle(names, source, components) for source in sources)
            cycle = next((one for one in in_cycles if one is not None), None)
            found[key] = cycle or self._outside(names, sources)
        return found

    def _from_tops(self) -> dict[int, int | None]:
        """For each object that a top leads to, the one before it on a shortest path."""
        inner: dict[int, list[int]] = defaultdict(list)
        for child, parents in self._above.items():
            for parent in parents:
                inner[parent].append(child)
        before: dict[int, int | None] = dict.fromkeys(self._tops)
        waiting = deque(self._tops)
        while waiting:
            one = waiting.popleft()
            for child in inner.get(one, ()):
                if child not in before:
                    before[child] = one
                    waiting.append(child)
        return before

    def _holder(
        self,
        names: Names,
        chain: list[int],
        source: tuple[int, Kept, str],
        start: Start | None = None,
        cycle: tuple[CycleObject, ...] = (),
    ) -> Holder:
        objects = [self._objects[one] for one in chain]
        if start is None:
            start = self._tops[chain[0]]
        if start.root is HolderRoot.GLOBAL and len(objects) > 1:  # a module's dict
            name = names.label(objects[0], objects[1]).removeprefix("['").removesuffix("']")
            start = Start(HolderRoot.GLOBAL, name, module=start.module)
            objects = objects[1:]
        path = names.path(start, objects, self._labels)
        if start.root is HolderRoot.CYCLE:
            path.start.root = HolderRoot.CYCLE
        one = Reached(0, source[1], objects[-1], source[2], source[1] is Kept.SAVED)
        record = holder(path, one, {})
        if source[1] is Kept.SAVED and len(record.path) > 1:
            # The path leads to the node itself.
            steps = record.path[:-1]
            name = "".join(step.label for step in steps)
            record = replace(record, path=steps, name=name, kind=kind_of(steps))
        return replace(record, cycle=cycle)

    def _in_cycle(
        self, names: Names, source: tuple[int, Kept, str], components: dict[int, int]
    ) -> Holder | None:
        """The shortest path from a cycle, if only a cycle keeps the source."""
        before: dict[int, int] = {}
        waiting = deque([source[0]])
        reached = {source[0]}
        while waiting:
            one = waiting.popleft()
            if one in components:
                chain = [one]
                while chain[-1] != source[0]:
                    chain.append(before[chain[-1]])
                objects = self._cycle(one, components)
                if objects is None:
                    return None
                owner = self._owner(one)
                if owner is not None:
                    chain.insert(0, owner)
                first = self._objects[chain[0]]
                start = Start(HolderRoot.CYCLE, type(first).__name__)
                return self._holder(names, chain, source, start, self._drawn(names, objects))
            for parent in self._above.get(one, ()):
                if parent not in reached:
                    reached.add(parent)
                    before[parent] = one
                    waiting.append(parent)
        return None

    def _owner(self, one: int) -> int | None:
        """The instance whose attributes a dict has."""
        value = self._objects[one]
        parents = self._above.get(one, ()) if type(value) is dict else ()
        return next((at for at in parents if attributes(self._objects[at]) is value), None)

    def _cycle(self, first: int, components: dict[int, int]) -> list[int] | None:
        """The shortest cycle through an object; None if something else refers to its component."""
        if components[first] in self._held:
            return None
        after: dict[int, int] = {}
        waiting = deque([first])
        while waiting:  # against the references: from each object to those that refer to it
            one = waiting.popleft()
            for parent in self._above.get(one, ()):
                if parent == first:
                    cycle = [first, one]
                    while cycle[-1] != first:
                        cycle.append(after[cycle[-1]])
                    return cycle[:-1]
                if components.get(parent) == components[first] and parent not in after:
                    after[parent] = one
                    waiting.append(parent)
        return None

    def _held_elsewhere(self, members: list[int]) -> bool:
        """Whether more refers to these objects than they, and others that were found, do."""
        plain = {
            one
            for one in members
            if not is_a(self._objects[one], torch.Tensor) and one not in self._graphs.nodes
        }
        internal: Counter[int] = Counter()
        for parent in {above for one in plain for above in self._above[one]}:
            internal.update(
                one for one in map(id, gc.get_referents(self._objects[parent])) if one in plain
            )
        # The dict of objects, and the argument of the call.
        return any(sys.getrefcount(self._objects[one]) - 2 > internal[one] for one in plain)

    def _components(self) -> dict[int, int]:
        """The number of the strongly connected component of each object on a cycle (Tarjan)."""
        order: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        result: dict[int, int] = {}
        numbers = itertools.count()
        for root in list(self._objects):
            if root in order:
                continue
            work = [(root, iter(self._above.get(root, ())))]
            order[root] = low[root] = next(numbers)
            stack.append(root)
            on_stack.add(root)
            while work:
                one, inner = work[-1]
                for following in inner:
                    if following not in order:
                        order[following] = low[following] = next(numbers)
                        stack.append(following)
                        on_stack.add(following)
                        work.append((following, iter(self._above.get(following, ()))))
                        break
                    if following in on_stack:
                        low[one] = min(low[one], order[following])
                else:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[one])
                    if low[one] == order[one]:
                        component = []
                        while True:
                            member = stack.pop()
                            on_stack.discard(member)
                            component.append(member)
                            if member == one:
                                break
                        if len(component) > 1 or one in self._above.get(one, ()):
                            result.update(dict.fromkeys(component, order[one]))
        return result

    def _drawn(self, names: Names, cycle: list[int]) -> tuple[CycleObject, ...]:
        """The objects of a cycle without the dicts of their attributes; of a traceback, only the
        frame that refers to another object.
        """
        drawn = []
        objects = [self._objects[one] for one in cycle]
        count = len(objects)
        for at, one in enumerate(objects):
            following = objects[(at + 1) % count]
            if type(one) is dict and at and attributes(objects[at - 1]) is one:
                continue
            if is_a(one, TracebackType):
                continue
            if is_a(one, FrameType):
                if not is_a(following, (FrameType, TracebackType)):
                    code = one.f_code
                    drawn.append(
                        CycleObject(
                            f"frame of {code.co_name}",
                            f".{variable_of(one, following) or '…'}",
                            code.co_filename,
                            one.f_lineno or code.co_firstlineno,
                            allocated=False,
                        )
                    )
                continue
            label = self._labels.get((id(one), id(following))) or names.label(one, following)
            if label == ".__dict__":
                after = objects[(at + 2) % count]
                label = "." + names.label(following, after).removeprefix("['").removesuffix("']")
            file, line, allocated = _origin(one)
            kind = type(one).__name__
            if is_a(one, FunctionType):
                kind = f"{kind} {one.__name__}"
            drawn.append(CycleObject(kind, label, file, line, allocated))
        return tuple(drawn)

    def _outside(self, names: Names, sources: list[tuple[int, Kept, str]]) -> Holder:
        """The path from the outermost object, to which nothing of Python refers; from the hooks of
        a node of autograd, if there are any: they keep what they refer to.
        """
        chains = [(source, self._up_to_hooks(source[0])) for source in sources]
        hooked = next(((source, chain) for source, chain in chains if chain), None)
        if hooked is not None:
            start = Start(HolderRoot.HOOK, NODE_HOOKS)
            return self._holder(names, hooked[1], hooked[0], start)
        for source in sources:
            chain = [source[0]]
            known = set(chain)
            while parents := [one for one in self._above.get(chain[-1], ()) if one not in known]:
                chain.append(parents[0])
                known.add(parents[0])
            if len(chain) > 1 or source[1] is not Kept.TENSOR:
                first = self._objects[chain[-1]]
                start = Start(HolderRoot.OUTSIDE, type(first).__name__)
                return self._holder(names, chain[::-1], source, start)
        return OUTSIDE

    def _up_to_hooks(self, source: int) -> list[int]:
        """The shortest path to the source from a dict of hooks that C++ has; empty without one."""
        inner: dict[int, int | None] = {source: None}
        waiting = deque([source])
        while waiting:
            one = waiting.popleft()
            if self._is_hooks(one):
                chain = []
                at: int | None = one
                while at is not None:
                    chain.append(at)
                    at = inner[at]
                return chain
            for parent in self._above.get(one, ()):
                if parent not in inner:
                    inner[parent] = one
                    waiting.append(parent)
        return []

    def _is_hooks(self, one: int) -> bool:
        """Whether it is a dict of hooks that only autograd's C++ and tensors refer to, and not a
        module.
        """
        value = self._objects[one]
        return (
            type(value) is OrderedDict
            and bool(value)
            and all(type(key) is int and callable(hook) for key, hook in value.items())
            and all(is_a(self._objects[each], torch.Tensor) for each in self._above.get(one, ()))
        )


def _running_frames() -> set[int]:
    """The frames of all threads. One that has ended exists as long as a traceback refers to it."""
    running = set()
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:  # no variable refers to this function's own frame at its end
            running.add(id(frame))
            frame = frame.f_back
    return running


def _origin(one: Any) -> tuple[str, int, bool]:
    """Where an object was allocated, if `tracemalloc` runs; otherwise its code or class."""
    if tracemalloc.is_tracing() and (trace := tracemalloc.get_object_traceback(one)) is not None:
        return trace[-1].filename, trace[-1].lineno, True
    if is_a(one, FunctionType):
        return one.__code__.co_filename, one.__code__.co_firstlineno, False
    if type(one) in SUSPENDED:
        code = getattr(one, SUSPENDED[type(one)][1])
        return code.co_filename, code.co_firstlineno, False
    return (*_line_of_class(type(one)), False)


def _line_of_class(kind: type) -> tuple[str, int]:
    """The definition of a class, by its first method."""
    own = type.__getattribute__(kind, "__dict__")
    codes = [each.__code__ for each in own.values() if type(each) is FunctionType]
    module = str(type.__getattribute__(kind, "__module__"))
    codes = (
        [code for code in codes if code.co_qualname.startswith(kind.__qualname__)]
        if (sys.version_info >= (3, 11))
        else codes
    )
    if not codes or module == "builtins":
        return "", 0
    file = codes[0].co_filename
    first = min(code.co_firstlineno for code in codes if code.co_filename == file)
    head = re.compile(rf"\s*class\s+{re.escape(type.__getattribute__(kind, '__name__'))}\b")
    for line in range(first, 0, -1):
        if head.match(linecache.getline(file, line)):
            return file, line
    return file, first
