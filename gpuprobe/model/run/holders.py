"""What keeps a tensor's memory: the path from a name of the program to it."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import PurePath

from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Bytes, Count, LineNumber


class HolderRoot(str, Enum):
    """Where the path to a tensor begins."""

    LOCAL = "local"  # a variable of a function that runs
    GLOBAL = "global"  # of the script, or of a module, whose name is in the expression
    CLASS = "class"  # an attribute of a class
    CLOSURE = "closure"  # a variable that an inner function uses
    DEFAULT = "default"  # of a parameter
    HOOK = "hook"  # the path passes the hooks of a module, tensor or optimizer
    EXCEPTION = "exception"  # a variable of a function that an exception ended, which is kept
    CACHE = "cache"  # a result that functools.cache or lru_cache keeps
    GENERATOR = "generator"  # a variable of a suspended generator or coroutine
    THREAD = "thread"  # what a thread was started with
    CYCLE = "cycle"  # objects that only refer to one another, until the collector runs
    AUTOCAST = "autocast"  # autocast's cache of converted weights
    DDP = "ddp"  # the buckets of DistributedDataParallel's reducer
    OUTSIDE = "outside"  # C++, or a value that an expression computes: no name refers to it


_PART = re.compile(r"\.\w+|\['\w+'\]")
_TENSORS = ("Tensor", "Parameter")

NODE_HOOKS = "hooks"
"""How a path begins with the hooks of a node of autograd, to which no object of Python refers."""


def with_article(kind: str) -> str:
    """The name of a type with its article: ``a list``, ``an OrderedDict``."""
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


class Kept(str, Enum):
    """How the end of the path keeps the memory."""

    TENSOR = "tensor"  # it is the tensor
    GRAD = "grad"  # it is the tensor's gradient
    SAVED = "saved"  # a node of its autograd graph saved the tensor for the backward pass
    VARIABLE = "variable"  # its autograd graph accumulates into the tensor
    STORAGE = "storage"  # it is the tensor's storage


@record(frozen=True, slots=True)
class HeldBy:
    """A step of a path: ``label`` continues the expression (``['val']``, ``[3]``, ``.out``), and
    leads to an object of type ``kind``. Of a container: its ``size``, and how many of its elements
    the requested memory was found through (``holding``).
    """

    label: str
    kind: str
    size: Count | None = None
    holding: Count | None = None


@record(frozen=True, slots=True)
class CycleObject:
    """An object of a reference cycle, and the attribute or element by which it refers to the next.

    The line is where the object was allocated if ``tracemalloc`` runs (``allocated``), otherwise
    where its class or function is defined; 0 if unknown.
    """

    kind: str
    label: str
    file: str = ""
    line: LineNumber = 0
    allocated: bool = False


@record(frozen=True, slots=True)
class Holder:
    """What keeps memory of ``tensors`` storages, ``graphs`` of them with an autograd graph.

    ``name`` is the expression for it in ``function`` (empty: a global), such as
    ``tracker.history``, ``kind`` the type of its innermost container, or the tensor's.
    ``path`` has its steps, and begins with a name; without one, the root is not an object of
    Python. ``file`` and ``line`` are those of the frame that runs (a local, an exception, a
    generator), or of the function's definition (a closure, a default, a cache).

    ``via``: the function, exception or generator by its own path. ``node``: of the autograd node
    that saved the tensor. ``error``: the exception's type. ``inferred``: the evidence, if the
    holder cannot be read from Python. ``saved_tensors``: what autograd saved for the backward pass
    of these tensors, in addition. ``also``: another expression for the same, and its function.
    """

    name: str
    kind: str
    function: str
    tensors: Count
    graphs: Count
    bytes: Bytes
    root: HolderRoot = HolderRoot.GLOBAL
    path: tuple[HeldBy, ...] = ()
    kept: Kept = Kept.TENSOR
    node: str = ""
    file: str = ""
    line: LineNumber = 0
    error: str = ""
    via: str = ""
    cycle: tuple[CycleObject, ...] = ()
    inferred: str = ""
    saved_tensors: Count = 0
    saved_bytes: Bytes = Bytes(0)
    also: str = ""

    @property
    def place(self) -> str:
        """The expression and where its first name is: ``history[3] (a list in train)``."""
        if not self.name:
            return _NAMELESS[self.root]
        where = _WHERE[self.root].format(function=self.function, error=self.error)
        if self.root is HolderRoot.HOOK and self.function:
            where += f" in {self.function}"
        if self.root in _OF_FUNCTIONS and self.via:
            where += f", kept by {self.via}"
        line = f", {PurePath(self.file).name}:{self.line}" if self.file and self.line else ""
        also = f"; also {self.also}" if self.also else ""
        return f"{self.name} ({with_article(self.kind)}{where}{line}{also})"

    @property
    def of_node_hooks(self) -> bool:
        """Whether hooks of a node of autograd keep it, and no name leads to them."""
        return self.root is HolderRoot.HOOK and bool(self.path) and self.path[0].label == NODE_HOOKS

    @property
    def owner(self) -> tuple[object, ...]:
        """What all memory has in common that one variable of the program keeps."""
        first = self.path[0].label if self.path else ""
        return self.root, self.function, first, self.error, self.kept is Kept.GRAD

    @property
    def container(self) -> HeldBy | None:
        """The outermost container on the path that the requested memory was found through several
        elements of.
        """
        return next((step for step in self.path if (step.holding or 0) > 1), None)

    @property
    def part(self) -> str:
        """The element of a variable's container, or the attribute of its object, that is the
        tensor: ``out['logits']``, ``out.logits``; empty if the path is another one.
        """
        if self.kept is not Kept.TENSOR or len(self.path) != 2:
            return ""
        of, tensor = self.path
        if of.size is None and (of.kind in _TENSORS or tensor.kind != "Tensor"):
            return ""  # a view's base, or a parameter of a module
        return of.label + tensor.label if _PART.fullmatch(tensor.label) else ""

    @property
    def of_object(self) -> bool:
        """Whether `part` is an attribute of an object, which methods know as ``self``."""
        return bool(self.part) and self.path[0].size is None

    @property
    def of_named_tuple(self) -> bool:
        """Whether `part` is a field of a named tuple: elements of other containers have keys."""
        return bool(self.part) and self.path[0].size is not None and self.path[1].label[:1] == "."

    @property
    def of_graph(self) -> bool:
        """Whether it is the graph of one tensor that keeps the memory, and no container."""
        return bool(self.path) and self.path[-1].label == ".grad_fn"

    @property
    def contents(self) -> str:
        """What it keeps: ``21 tensors, 1.2 GiB, with autograd graphs``."""
        graphs = ", with autograd graphs" if self.graphs else ""
        if self.saved_tensors:
            graphs = f", with autograd graphs that keep {human_bytes(self.saved_bytes)}"
        several = "" if self.tensors == 1 else "s"
        return f"{self.tensors:,} tensor{several}, {human_bytes(self.bytes)}{graphs}"

    @property
    def text(self) -> str:
        """The holder as a sentence without a verb: ``saved for the backward pass of MulBackward0,
        kept by total.grad_fn (a Tensor in train, train.py:9)``.
        """
        kept = {
            Kept.SAVED: f"saved for the backward pass of {self.node}, kept by ",
            Kept.VARIABLE: "a variable of the autograd graph of ",
        }
        text = kept.get(self.kept, "") + self.place
        if (many := self.container) is not None and many.size is not None:
            text += f"; {many.holding:,} of {many.size:,} elements hold such memory"
        if self.cycle:
            text += "; the cycle: " + " → ".join(f"{one.kind}{one.label}" for one in self.cycle)
        return f"{text} (inferred: {self.inferred})" if self.inferred else text


_WHERE = {
    HolderRoot.LOCAL: " in {function}",
    HolderRoot.GLOBAL: "",
    HolderRoot.CLASS: "",
    HolderRoot.CLOSURE: " in {function}",
    HolderRoot.DEFAULT: " in {function}",
    HolderRoot.HOOK: ", by a hook",
    HolderRoot.EXCEPTION: " in {function}, kept by {error}",
    HolderRoot.CACHE: "",
    HolderRoot.GENERATOR: " in {function}, which is suspended",
    HolderRoot.THREAD: ", by a thread",
    HolderRoot.CYCLE: " in a reference cycle",
    HolderRoot.AUTOCAST: "",
    HolderRoot.DDP: "",
    HolderRoot.OUTSIDE: " that no name refers to",
}
_OF_FUNCTIONS = (HolderRoot.CLOSURE, HolderRoot.DEFAULT, HolderRoot.GENERATOR)
_NAMELESS = {
    **dict.fromkeys(HolderRoot, "held outside Python"),
    HolderRoot.AUTOCAST: "autocast's cache of converted weights",
    HolderRoot.DDP: "the buckets of DistributedDataParallel's reducer",
}
