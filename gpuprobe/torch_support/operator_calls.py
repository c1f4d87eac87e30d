"""Every operator that torch runs, below autograd, and without a dispatch mode.

While a ``TorchDispatchMode`` is active, torch's own C++ code treats any tensor as an instance of a
subclass (``isTensorSubclassLike``): it sums gradients, adds a bias and computes many derivatives
out of place, and so allocates what it does not allocate otherwise. A kernel in Python has no such
effect. `watch` registers one for a dispatch key that nothing in torch uses: ``Fake``, below the
keys of Python, autograd and autocasting and above those of the backends
(``c10/core/DispatchKey.h``). The key is included thread by thread. torch copies what a thread
includes to the threads of its backward pass.

Subclasses of tensors and the program's own modes come first: handlers get plain tensors. Gradients
that the autograd engine adds up are added in place here as well, as they are without a handler
(`EngineSums`).
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._subclasses.schema_check_mode  # by the next one's first call: a file may not open then
from torch.utils._python_dispatch import _disable_current_modes

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.patching import original_of, patch, when_imported
from gpuprobe.torch_support.callers import passed_on
from gpuprobe.torch_support.compile_watch import skip_own_frames
from gpuprobe.torch_support.compiled_code import TORCH
from gpuprobe.torch_support.tensors import is_without_gaps
from gpuprobe.user_frames import PACKAGE, outside

if TYPE_CHECKING:
    from torch._C import DispatchKey
    from torch._ops import HigherOrderOperator, OpOverload
    from torch.autograd.graph import Node

Below = Callable[["OpOverload", Any, Any], Any]
"""Calls an operator with its arguments and keywords, without handlers."""

Handler = Callable[..., Any]
"""Called with an operator, its arguments and keywords, and ``below=``, a `Below`. Operators that
the handler itself calls are not handled."""

_NAME: Final = "Fake"
_RULES: Final = "torch._dynamo.trace_rules"
_COMPILED_CALLS: Final = "torch._dynamo.eval_frame"
_INDUCTOR: Final = "torch._inductor.compile_fx"
_REPRO: Final = "torch._dynamo.repro.after_aot"
_STRICT: Final = frozenset({"fail_on_recompile", "eager_on_recompile"})
"""Stances of torch.compile that do not let Dynamo compile a function again."""
_compiler_patches: list[Callable[[], None]] = []
"""Functions that undo `_skip_own_frames`, `_respect_stances`, `_exclude_inductor` and
`_include_constants`."""


def _key() -> DispatchKey:
    try:
        return torch._C._dispatch_key_parse(_NAME)
    except RuntimeError:
        raise EnvironmentUnavailable(
            f"torch {torch.__version__} has no dispatch key {_NAME}, which gpuprobe needs",
            hint="use a version of torch that this version of gpuprobe supports",
        ) from None


_KEY: Final = _key()
_IMPLICIT: Final = torch._C.DispatchKey.CompositeImplicitAutograd
HANDLED: Final = torch._C.DispatchKeySet(_KEY)
"""The keys that a thread excludes to call operators without handlers."""
_Exclude = torch._C._ExcludeDispatchKeyGuard
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_current_node = torch._C._current_autograd_node
_Tensor: Final = torch.Tensor


class _Local(threading.local):
    chain: Callable[..., Any] | None = None
    """The chain that a thread calls instead of all handlers."""
    hidden = False
    """Whether the thread excludes the key for a compiled function (`_respect_stances`)."""
    compiled: bool | None = None
    """Whether the thread is about to call a compiled function, or one that must not be compiled."""


class LeftOut:
    """Calls of compiled functions in which only graphs are handled (`_respect_stances`)."""

    calls = 0

    def since(self, calls: int) -> str:
        """The blind spot of the calls after the first ``calls``; "" if there were none."""
        more = self.calls - calls
        if not more:
            return ""
        return (
            f"operators between the graphs of compiled functions, in {more} calls: the program "
            "forbids recompiling"
        )


_local = _Local()
left_out = LeftOut()
_handlers: list[Handler] = []
_kept: list[object] = []
"""The library that keeps the fallback registered."""
_libraries: dict[str, Any] = {}
"""By namespace, the libraries that keep the kernels registered."""
_later: dict[str, Any] = {}
"""By name, the libraries that keep the kernels of operators which Python code defined later."""
_implemented: dict[str, _Named] = {}
"""By name, the operators that have a kernel."""


def _plain(op: OpOverload, args: Any, kwargs: Any) -> Any:
    try:
        return op(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - raised again
        args = kwargs = None
        raise passed_on(error)  # noqa: B904 - the same one


_chain: Callable[..., Any] = _plain


@cache
def _is_composite(op: OpOverload) -> bool:
    """Whether an operator only calls others, on GPUs too. Autograd decomposes these; in inference
    mode, without its keys, the kernel here is called before that.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = op.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, "CUDA") and not has(name, "CPU")


_kinds: dict[type, bool] = {}
"""Types of arguments other than lists, by whether torch calls their ``__torch_dispatch__``."""


def _is_subclass(kind: type) -> bool:
    if not issubclass(kind, _Tensor) or kind in (_Tensor, torch.nn.Parameter):
        return False
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not torch._C._disabled_torch_dispatch_impl


def _has_subclasses(args: Iterable[Any]) -> bool:
    for value in args:
        kind = type(value)
        if kind is list or kind is tuple:
            if _has_subclasses(value):
                return True
            continue
        found = _kinds.get(kind)
        if found is None:
            found = _kinds[kind] = _is_subclass(kind)
        if found:
            return True
    return False


class _Named:
    """An operator that is resolved at its first call: there are thousands."""

    __slots__ = ("composite", "name", "op")

    def __init__(self, name: str) -> None:
        self.name = name
        self.op: OpOverload | None = None
        self.composite = False

    def find(self) -> None:
        space, _, rest = self.name.partition("::")
        name, _, overload = rest.partition(".")
        self.op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        self.composite = _is_composite(self.op)


def _operator(op: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        if type(op) is _Named:
            if op.op is None:
                op.find()
            composite, op = op.composite, op.op
        else:
            composite = _is_composite(op)
        if composite:
            # Not `decompose`: that prefers decompositions of torch's in Python, which are for
            # tracing, and need other memory.
            return op._op_dk(_IMPLICIT, *args, **kwargs)
        _exclude(_KEY, True)
        try:
            if _has_subclasses(args):  # in torch's own code for subclasses
                return op(*args, **kwargs)
            chain = _local.chain or _chain
            if _current_node() is None:
                return chain(op, args, kwargs)
            if op is ADD and not kwargs and _sums.in_place(*args):
                op = ADD_TO
            result = chain(op, args, kwargs)
            _sums.note_result(op, result)
            return result
        finally:
            _exclude(_KEY, False)
    except BaseException as error:  # noqa: BLE001 - raised again
        args = kwargs = None  # type: ignore[assignment]
        raise passed_on(error)  # noqa: B904 - the same one


def _register() -> None:
    """Register a kernel for each operator, and a fallback for those that C++ code defines later. A
    fallback alone would not work: if torch itself calls an operator with a subclass's tensors and
    without the key of Python, it asserts that Python has registered a kernel for that very operator
    (``python_op_registration_trampoline_impl`` in ``torch/csrc/utils/python_dispatch.cpp``).
    """
    for name in torch._C._dispatch_get_all_op_names():
        if name not in _implemented:
            _implement(name)
    if not _kept:
        # Not torch.library.Library: its finalizer may fail when the interpreter ends.
        others = torch._C._dispatch_library("IMPL", "_", "", __file__, 0)
        others.fallback(_NAME, _operator, False)
        _kept.append(others)


def _implement(name: str) -> None:
    space, _, rest = name.partition("::")
    library = _libraries.get(space)
    if library is None:
        library = torch._C._dispatch_library("IMPL", space, "", __file__, 0)
        _libraries[space] = library
    _implement_in(library, rest, name)


def _implement_in(library: Any, rest: str, name: str) -> None:
    named = _implemented[name] = _Named(name)
    library.impl(rest, _NAME, partial(_operator, named), False)


def _include_later_operators() -> Callable[[], None]:
    """Register kernels also of the operators that Python code defines later. If a name is defined
    again, its previous kernel ends first: it would keep the previous operator's object.
    """
    define = torch.library.Library.define

    def implement(space: str, rest: str) -> None:
        name = f"{space}::{rest}"
        _later[name] = torch._C._dispatch_library("IMPL", space, "", __file__, 0)
        _implement_in(_later[name], rest, name)

    def defined(self: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        rest = schema.split("(")[0].strip()
        before = _later.pop(f"{self.ns}::{rest}", None)
        if before is not None:
            before.reset()
        try:
            found = define(self, schema, *args, **kwargs)
        except BaseException:
            if before is not None:  # the previous operator is still there
                implement(self.ns, rest)
            raise
        implement(self.ns, rest)
        return found

    return patch(torch.library.Library, "define", defined)


def _rebuild() -> None:
    global _chain
    _chain = _plain
    for handler in _handlers:
        _chain = partial(handler, below=_chain)  # no frame that holds arguments


def _include(included: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)


@contextmanager
def unhandled() -> Iterator[None]:
    """In this context, operators that this thread calls are not handled."""
    with _Exclude(HANDLED):
        yield


@contextmanager
def recording() -> Iterator[None]:
    """As `unhandled`, inside a handler; autograd records what is called, as it does above the
    handler.
    """
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, HANDLED):
        yield


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """For use inside a handler: the operators that this thread calls go to ``handler`` alone."""
    before = _local.chain
    _local.chain = partial(handler, below=_plain)
    try:
        with torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set() | HANDLED,
            torch._C._dispatch_tls_local_exclude_set() - HANDLED,
        ):
            yield
    finally:
        _local.chain = before


def watch(handler: Handler, *, innermost: bool = False) -> Callable[[], None]:
    """Pass each operator to ``handler``, in this thread and in those that are started from now on.
    The latest handler is called first; an ``innermost`` one, which calls operators itself, after
    all others. Returns a function that ends this.
    """
    if not _handlers:
        _register()
    return _begin(handler, innermost=innermost)


def _begin(handler: Handler, *, innermost: bool) -> Callable[[], None]:
    undo = [] if _handlers else list(_prepared())
    _handlers.insert(0 if innermost else len(_handlers), handler)
    _rebuild()
    _include(True)

    def end() -> None:
        _handlers.remove(handler)
        _rebuild()
        if not _handlers:
            _include(False)
        for each in reversed(undo):
            each()

    return end


def _prepared() -> Iterator[Callable[[], None]]:
    yield _include_later_operators()
    yield _pass_higher_order()
    yield from _exclude_subclasses()
    yield _join_threads()
    yield when_imported(_RULES, _skip_own_frames)
    yield when_imported(_COMPILED_CALLS, _respect_stances)
    yield when_imported(_INDUCTOR, _exclude_inductor)
    yield when_imported(_REPRO, _include_constants)
    yield _undo_compiler_patches


def _skip_own_frames() -> None:
    """Exclude our kernels from compilation: they are called while a compiled function runs code
    that was not compiled.
    """
    _compiler_patches.append(skip_own_frames(sys.modules[_RULES]))


def _respect_stances() -> None:
    """Exclude the key in compiled functions while the program forbids recompiling.

    Dynamo's guards compare dispatch keys: with the key, a function that was compiled earlier would
    be compiled again, which is an error in such a program, or would run eagerly. torch calls the
    graphs of a compiled function as functions that must not be compiled, and these have the key;
    only Python code between them does not.
    """
    module: Any = sys.modules[_COMPILED_CALLS]
    entering = module._is_skip_guard_eval_unsafe_stance
    chosen = module._callback_from_stance
    original = module._maybe_set_eval_frame

    def hide(excluded: bool) -> bool:
        """Exclude the key or not. True if it was not excluded before."""
        if excluded and not torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY):
            _local.hidden = True
            _exclude(_KEY, True)
            return True
        if not excluded and _local.hidden:
            _local.hidden = False
            _exclude(_KEY, False)
        return False

    def skip_guards() -> object:  # called first, before torch reads the thread's keys
        if hide(_is_strict(module)):
            left_out.calls += 1
        return entering()

    def from_stance(callback: object) -> object:
        selected = chosen(callback)
        if callback is not None:
            _local.compiled = True
        else:  # a function that must not be compiled
            hide(False)
            _local.compiled = None if selected is None else False  # since 2.15, None is not set
        return selected

    def set_eval_frame(callback: object) -> object:
        compiled, _local.compiled = _local.compiled, None
        if compiled is None:  # torch restores the previous state
            compiled = callback is not None
        found = original(callback)
        hide(compiled and _is_strict(module))
        return found

    _compiler_patches.append(patch(module, "_is_skip_guard_eval_unsafe_stance", skip_guards))
    _compiler_patches.append(patch(module, "_callback_from_stance", from_stance))
    _compiler_patches.append(patch(module, "_maybe_set_eval_frame", set_eval_frame))


def _is_strict(module: Any) -> bool:
    return module._stance.stance in _STRICT or module.config.error_on_recompile


def _undo_compiler_patches() -> None:
    while _compiler_patches:
        _compiler_patches.pop()()


def _join_threads() -> Callable[[], None]:
    original: Callable[[Any], None] = vars(threading.Thread)["_bootstrap_inner"]

    def bootstrap(thread: threading.Thread) -> None:
        _include(bool(_handlers))
        original(thread)

    return patch(threading.Thread, "_bootstrap_inner", bootstrap)


def _pass_higher_order() -> Callable[[], None]:
    """Let higher-order operators pass through: they have their own kernels in Python, and none for
    the key.
    """
    from torch._ops import HigherOrderOperator, _higher_order_ops

    def passes(op: HigherOrderOperator) -> None:
        op.non_fallthrough_keys = op.non_fallthrough_keys.remove(_KEY)

    for op in _higher_order_ops.values():
        passes(op)
    original = HigherOrderOperator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        passes(self)

    return patch(HigherOrderOperator, "__init__", init)


def _exclude_inductor() -> None:
    """Exclude the key in Inductor: it calls operators with fake tensors, also operators that were
    registered after the kernels here (torch 2.8: ``prims.prepare_softmax_online``). Dynamo's
    guards, which compare dispatch keys, are made elsewhere.
    """
    module = sys.modules[_INDUCTOR]
    _compiler_patches.append(
        patch(module, "_compile_fx_inner", _without_handlers(module._compile_fx_inner))
    )


def _include_constants() -> None:
    """Include the key where Inductor, for its logs, prints the constants of a graph: those are
    tensors of the device (``torch.tensor([1.0], device="cuda")`` in a compiled function).
    """
    module: Any = sys.modules[_REPRO]
    original = module.save_graph_repro

    @wraps(original)
    def save_graph_repro(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set() | HANDLED,
            torch._C._dispatch_tls_local_exclude_set() - HANDLED,
        ):
            return original(*args, **kwargs)

    _compiler_patches.append(patch(module, "save_graph_repro", save_graph_repro))


def _without_handlers(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        with _Exclude(HANDLED):
            return original(*args, **kwargs)

    return function


def _exclude_subclasses() -> Iterator[Callable[[], None]]:
    """Exclude the key in functions of torch that work on tensors which must not have an ordinary
    Python object: those that make an instance of a subclass of a new tensor, and fake tensors.
    Modes do not receive what these call, either.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("_make_subclass", "_make_wrapper_subclass"):
        yield patch(
            torch.Tensor, name, staticmethod(_without_handlers(getattr(torch.Tensor, name)))
        )
    yield patch(torch.Tensor, "as_subclass", _without_handlers(torch.Tensor.as_subclass))
    # Fake tensors, with which torch computes shapes.
    fake = FakeTensorMode.__torch_dispatch__
    yield patch(FakeTensorMode, "__torch_dispatch__", _without_handlers(fake))


ADD: Final = torch.ops.aten.add.Tensor
ADD_TO: Final = torch.ops.aten.add_.Tensor
_run_backward: Final = original_of(torch.autograd.graph._engine_run_backward)
_RUN: Final = _run_backward.__code__
"""The last Python code before the engine's, if the engine has no separate thread."""
_BETWEEN: Final = (PACKAGE, f"{TORCH}_ops.py")
"""Files whose functions call operators on behalf of the engine."""


def called_by_engine() -> bool:
    """Whether C++ code of a backward pass called the current operator, and no Python code: a hook
    or a function of the program could hold the tensors. On a GPU that is in a thread of the engine.
    """
    if torch._C._current_autograd_node() is None:
        return False
    frame = outside(sys._getframe(1), _BETWEEN)
    return frame is None or frame.f_code is _RUN


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    """The number of owners of the tensor, and of its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def owners_below_modes() -> tuple[int, int]:
    """The result of `_owners` inside a handler, for a gradient that only the engine holds and whose
    storage Python knows: the engine counts that as an owner.

    It runs a backward pass, so it is called only within one of the program: the first in a process
    starts the engine's threads, which initialises CUDA and makes autograd unusable in forked
    processes.
    """
    found: list[tuple[int, int]] = []
    known: list[weakref.ref[torch.UntypedStorage]] = []

    def note(op: OpOverload, args: Any, kwargs: Any, below: Below) -> Any:
        if op is ADD and not torch.is_grad_enabled():  # not the sum in the forward pass
            found.append(_owners(args[0]))
        result = below(op, args, kwargs)
        if isinstance(result, torch.Tensor):
            known.append(weakref.ref(result.untyped_storage()))
        return result

    with (
        handled_by(note),
        torch.inference_mode(False),
        torch.enable_grad(),
        _disable_current_modes(),
    ):
        leaf = torch.zeros(2, requires_grad=True, device="cpu")
        total = (leaf * 2 + leaf * 3).sum()
        # As `torch.autograd.grad` calls it: no hook may take it for a pass of the program.
        _run_backward(
            (total,), (torch.ones_like(total),), False, False, (leaf,), False, accumulate_grad=False
        )
    return found[0] if found else (0, 0)


@functools.cache
def _makes_new(op: OpOverload) -> bool:
    """Whether an operator returns one tensor that is neither a view nor one of its arguments."""
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None


class EngineSums(threading.local):
    """Distinguishes the engine's sums of gradients from those of a node's formula, below modes.

    The older gradient of a sum was made by another node, or the node passes two gradients to one
    consumer.
    """

    _alone: tuple[int, int] | None = None

    def __init__(self) -> None:
        self._node: tuple[int, int] | None = None
        self._made: set[int] = set()  # addresses of the tensors that the node has made
        self._measuring = False

    def note_result(self, op: OpOverload, result: Any) -> None:
        """An operator has run for a node of the backward pass."""
        if not _makes_new(op) or type(result) is not torch.Tensor:
            return
        identity = _identity(torch._C._current_autograd_node())
        if identity != self._node:
            self._node = identity
            self._made.clear()
        if result.layout is torch.strided:
            self._made.add(result.data_ptr())

    def in_place(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether the engine adds ``second``, the younger of two gradients of one node, to
        ``first`` in place if operators are not handled (``torch/csrc/autograd/input_buffer.cpp``:
        ``accumulate``): if nothing else holds ``first``. False if it makes a new tensor, and for
        every sum that is not the engine's. Only for use in a call of `ADD`.
        """
        if not called_by_engine() or torch.is_grad_enabled():
            return False
        if type(first) is not torch.Tensor or type(second) is not torch.Tensor:
            return False
        if first.dtype is not second.dtype or first.shape != second.shape:
            return False
        if first.layout is not torch.strided or second.layout is not torch.strided:
            return False
        if _owners(first) != self._owners_alone() or not is_without_gaps(first):
            return False
        node = torch._C._current_autograd_node()
        if _identity(node) != self._node or first.data_ptr() not in self._made:
            return True
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(edges)) < len(edges)

    def _owners_alone(self) -> tuple[int, int]:
        """The owners of a gradient that only the engine holds; (0, 0) while that is being
        measured.
        """
        if EngineSums._alone is None:
            if self._measuring:
                return 0, 0
            kept = self._node, self._made
            self._node, self._made, self._measuring = None, set(), True
            try:
                EngineSums._alone = owners_below_modes()
            finally:
                (self._node, self._made), self._measuring = kept, False
        return EngineSums._alone


def _identity(node: Node) -> tuple[int, int]:
    return id(node), node._sequence_nr()


_sums = EngineSums()
