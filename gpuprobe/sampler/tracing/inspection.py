"""A run that ends at the peak of an earlier one, to look for what holds memory there.

A program on a simulated GPU makes the same operators and the same tensors each time, at other
addresses. So the run that is recorded pays nothing for the search: a second one stops right after
the operator of the peak, finds the blocks by the operators that made them, and searches.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpuprobe.model.actions import ALLOC, FREE_COMPLETED, FREE_REQUESTED
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.run.holders import Holder, HolderRoot
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.sampler.processes.notes import remove_notes

REQUEST: Final = "GPUPROBE_INSPECT"
"""In the environment: the file with the request, JSON. ``operator``: its number (see
`gpuprobe.sampler.tracing.uses`); ``device``; ``blocks``: for each the operator that made it, and
its size in bytes; ``result``: the file to write, JSON with ``holders`` by the position in
``blocks``, ``others`` that hold a block in addition, why the two are ``incomplete`` and
``others_incomplete``, the bytes of the blocks that ``exist`` in this run, and ``visited``.
``collects``: whether Python's garbage collector is on. When it runs depends on all objects
that were made, so that cycles which an earlier run had at its peak may be gone in this one."""


class Inspection:
    """A requested search. ``operator``: the number of the operator after which it happens."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.operator: int = request["operator"]
        self._device: str = request["device"]
        self._blocks: list[tuple[int, int]] = [(made, size) for made, size in request["blocks"]]
        self._result = Path(request["result"])
        if not request["collects"]:
            gc.disable()

    def search_and_exit(self, traces: Callable[[], list[MemoryTrace]]) -> None:
        """Write what holds the blocks, and end the process without Python's shutdown; not in a rank
        of a job that does not use the device. ``traces`` returns those of the step so far.
        """
        from gpuprobe.torch_support.holding.objects import Key
        from gpuprobe.torch_support.holding.search import (
            held_elsewhere,
            holders_of,
            lasting_holders_of,
            other_names_of,
        )

        gc.disable()  # it would free what is searched for, as the search makes many objects
        trace = next((one for one in traces() if one.device == self._device), None)
        if trace is None:
            return
        places = self._addresses(trace)
        sizes: dict[Key, int] = {
            (self._device, at): self._blocks[number][1] for at, number in places.items()
        }
        found = holders_of(sizes)
        others = held_elsewhere(found, sizes)
        inner = {key: size for key, size in sizes.items() if _is_inner(found.get(key))}
        lasting = lasting_holders_of(inner)
        for key, one in lasting.items():
            named = _with_other_name(one, found[key])
            if named is not found[key]:
                found[key] = named
                others.pop(key, None)  # the variable of the inner function ends with it
        for key, one in other_names_of(found, sizes).items():
            if not found[key].also and one.name:
                where = f" in {one.function}" if one.function else ""
                found[key] = replace(found[key], also=f"{one.name}{where}")
        document: dict[str, object] = {
            name: {
                str(places[key[1]]): to_plain(one)
                for key, one in holders.items()
                if isinstance(key, tuple)
            }
            for name, holders in (("holders", found), ("others", others))
        }
        document["incomplete"] = found.incomplete or lasting.incomplete
        document["others_incomplete"] = others.incomplete
        document["exist"] = sum(self._blocks[number][1] for number in places.values())
        document["visited"] = found.visited + others.visited
        self._result.write_text(json.dumps(document), encoding="utf-8")
        remove_notes()
        os._exit(0)

    def _addresses(self, trace: MemoryTrace) -> dict[int, int]:
        """By address, the position of the requested block that is there. Of blocks that one
        operator made with one size, those in the same order are the same.
        """
        freed = {FREE_REQUESTED, FREE_COMPLETED}
        alive: dict[int, tuple[int, int]] = {}
        for columns in (trace.baseline, trace.events):
            rows = zip(columns.action, columns.address, columns.made, columns.size, strict=True)
            for action, address, made, size in rows:
                if action == ALLOC:
                    alive[address] = made, size
                elif action in freed:
                    alive.pop(address, None)
        there: dict[tuple[int, int], list[int]] = {}
        for address, key in alive.items():
            there.setdefault(key, []).append(address)
        found = {}
        for number, key in enumerate(self._blocks):
            if there.get(key):
                found[there[key].pop(0)] = number
        return found


def _is_inner(found: Holder | None) -> bool:
    """Whether it is a variable of a function that runs, or waits."""
    return found is not None and found.root in (HolderRoot.LOCAL, HolderRoot.GENERATOR)


def _with_other_name(lasting: Holder, inner: Holder) -> Holder:
    """The name that lasts, with that in the function that runs if it is another."""
    if (lasting.name, lasting.function) == (inner.name, inner.function):
        return inner
    if lasting.name == inner.name:  # an argument of the same name
        return lasting
    where = f" in {inner.function}" if inner.function else ""
    return replace(lasting, also=f"{inner.name}{where}")


def requested() -> Inspection | None:
    """The search that the environment requests. Processes that the program starts get no request:
    the operators of this one are counted.
    """
    path = os.environ.pop(REQUEST, "")
    return Inspection(json.loads(Path(path).read_text(encoding="utf-8"))) if path else None
