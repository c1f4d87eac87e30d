"""How objects are searched: what a tensor, a node of autograd and each type of object keep."""

from __future__ import annotations

import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from gpuprobe.clocks import thread_time
from gpuprobe.model.record import record
from gpuprobe.model.run.holders import HeldBy, Holder, HolderRoot, Kept
from gpuprobe.model.values import Bytes
from gpuprobe.torch_support.holding.names import Path
from gpuprobe.torch_support.tensors import parts

Key: TypeAlias = int | tuple[str, int]
"""A storage: its identity (`torch_support.tensors.storage_key`), or its device and address."""


@record(frozen=True, slots=True)
class SearchLimits:
    """How many objects of Python and nodes of autograd are visited, and for how many seconds of the
    thread: on a busy machine as much is found.
    """

    objects: int = 3_000_000
    seconds: float = 15.0


class Stopped(Exception):
    """A limit is reached."""


class Allowance:
    """What is left of the limits."""

    def __init__(self, limits: SearchLimits) -> None:
        self._limits = limits
        self._until = thread_time() + limits.seconds

    def check(self, visited: int) -> None:
        """Raise `Stopped` if a limit is reached."""
        if visited > self._limits.objects:
            raise Stopped(f"stopped after {self._limits.objects:,} objects")
        if thread_time() > self._until:
            raise Stopped(f"stopped after {self._limits.seconds:g} s")


class Reached(NamedTuple):
    """A storage that was reached: from this object, at this distance."""

    distance: int
    kept: Kept
    holder: object
    node: str
    graph: bool


SKIPPED, PLAIN, TENSOR, STORAGE, NODE, CLASS, FRAME, LOCAL, MODEL, ARRAY, STATE = range(11)
_LEAVES: Final = (
    str, bytes, bytearray, int, float, complex, type(None), type(...), range, slice, ModuleType,
    types.CodeType, types.BuiltinFunctionType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, torch.dtype, torch.device, torch.Size, torch.layout,
)  # fmt: skip
LOCAL_DATA: Final[type] = threading.local


class Kinds(dict[type, int]):
    """How the objects of a type are searched."""

    def __missing__(self, kind: type) -> int:
        self[kind] = found = self._of(kind)
        return found

    def _of(self, kind: type) -> int:
        if str(type.__getattribute__(kind, "__module__")).startswith("gpuprobe."):
            return SKIPPED  # what this recording notes, by way of a hook
        for base, result in (
            (types.BuiltinFunctionType, PLAIN),  # a method of a list refers to it
            (_LEAVES, SKIPPED),
            (torch.Tensor, TENSOR),
            (torch.UntypedStorage, STORAGE),
            (type, CLASS),
            (FrameType, FRAME),
            (LOCAL_DATA, LOCAL),
            (torch.nn.Module, MODEL),
            (torch.optim.Optimizer, STATE),
        ):
            if issubclass(kind, base):
                return result
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, numpy.ndarray):
            return ARRAY
        mro = type.__getattribute__(kind, "__mro__")
        if any("next_functions" in type.__getattribute__(base, "__dict__") for base in mro):
            return NODE
        return PLAIN


EXACT_DATA: Final = hasattr(torch._C._autograd.SavedTensor, "data")
"""Whether a saved tensor can be read without its hooks, which are the program's (torch 2.7)."""


def storage_keys(tensor: torch.Tensor, addresses: bool) -> Iterator[Key]:
    """The keys of a tensor's storage, or of its parts'."""
    try:
        yield torch._C._storage_address(tensor)
        if addresses:
            yield str(device_of(tensor)), torch._C._data_address(tensor)
    except (NotImplementedError, RuntimeError):  # without a storage
        for part in parts(tensor):
            yield from storage_keys(part, addresses)


def _getter(name: str) -> Callable[[Any], Any]:
    """Reads an attribute as torch defines it: a subclass of tensors may have a property."""
    read: Callable[[Any], Any] = torch._C.TensorBase.__dict__[name].__get__
    return read


is_leaf, gradient, grad_fn, requires_grad, retains_grad, dtype_of, device_of = map(
    _getter, ("is_leaf", "grad", "grad_fn", "requires_grad", "retains_grad", "dtype", "device")
)


class Graphs:
    """What the nodes of autograd keep, each node once."""

    def __init__(self) -> None:
        self._saved_names: dict[type, list[str]] = {}
        self.nodes: dict[int, object] = {}  # by identity, which holds as long as they are kept

    def of(self, node: Any) -> Iterator[Any]:
        """The nodes of a graph that were not visited, the nearest first."""
        waiting = deque([node])
        while waiting:
            one = waiting.popleft()
            if one is None or id(one) in self.nodes:
                continue
            self.nodes[id(one)] = one
            yield one
            waiting.extend(following for following, _ in one.next_functions)

    def kept(self, node: Any) -> Iterator[tuple[object, Kept, bool]]:
        """The objects that a node keeps: saved tensors, what a hook made of them and the hook
        (True), and the variable that it accumulates into.
        """
        kind = type(node)
        if kind not in self._saved_names:
            names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
            self._saved_names[kind] = names
            if kind.__name__ == "AccumulateGrad":
                names.append("variable")
        for name in self._saved_names[kind]:
            try:
                value = getattr(node, name)
            except (RuntimeError, ValueError):  # freed after the backward pass
                continue
            if name == "variable":
                yield value, Kept.VARIABLE, False
                continue
            for saved in value if type(value) in (tuple, list) else (value,):
                if saved is None or not EXACT_DATA:
                    continue
                hook = saved.unpack_hook
                data = saved.data
                if hook is not None:
                    yield hook, Kept.SAVED, True
                if data is not None:
                    yield data, Kept.SAVED, hook is not None


def holder(path: Path, found: Reached, counts: Mapping[int, set[int]]) -> Holder:
    """The record of a path."""
    steps = [
        step
        if step.size is None
        else HeldBy(step.label, step.kind, step.size, len(counts.get(id(one), ())) or 1)
        for step, one in zip(path.steps, path.objects, strict=True)
    ]
    if found.kept is Kept.SAVED:
        steps.append(HeldBy(".grad_fn", found.node))
    start = path.start
    text = "".join(step.label for step in steps)
    return Holder(
        name=f"{start.module}.{text}" if start.module else text,
        kind=kind_of(steps),
        function=start.function,
        tensors=1,
        graphs=int(found.graph),
        bytes=Bytes(0),
        root=start.root,
        path=tuple(steps),
        kept=found.kept,
        node=found.node,
        file=start.file,
        line=start.line,
        error=start.error,
        via=start.via,
    )


def kind_of(steps: Sequence[HeldBy]) -> str:
    """The type of the innermost container of a path; without any, of its last object."""
    containers = [step.kind for step in steps if step.size is not None]
    if containers:
        return containers[-1]
    return next(step.kind for step in reversed(steps) if not step.label.startswith(GRAPH))


GRAPH: Final = ".grad_fn"
GRADIENT: Final = ".grad"

OUTSIDE: Final = Holder("", "", "", 1, 0, Bytes(0), HolderRoot.OUTSIDE)
"""What keeps a storage that no object of Python leads to."""
