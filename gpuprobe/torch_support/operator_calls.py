"""Every operator that torch runs, below autograd, and without a dispatch mode.

While a ``TorchDispatchMode`` is on, torch's own C++ code takes any tensor for an instance of a
subclass (``isTensorSubclassLike``): it sums gradients, adds a bias and computes many derivatives
out of place, and so allocates what it does not allocate otherwise. A kernel in Python has no such
effect. `watch` registers one, as a fallback, for a dispatch key that nothing in torch uses:
``Fake``, below the keys of Python, autograd and autocasting and above those of the backends
(``c10/core/DispatchKey.h``). The key is included thread by thread. torch takes what a thread
includes to the threads of its backward pass.

Subclasses of tensors and the program's own modes come first: here are plain tensors only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, Final

import torch

from gpuprobe.patching import patch
from gpuprobe.torch_support.callers import passed_on

Handler = Callable[..., Any]
"""Is given an operator, its arguments and keywords, and as ``below`` what to call in its place,
with the same three."""

_KEY: Final = torch._C._dispatch_key_parse("Fake")
_KEYS: Final = torch._C.DispatchKeySet(_KEY)
_Exclude = torch._C._ExcludeDispatchKeyGuard


def _plain(op: Any, args: Any, kwargs: Any) -> Any:
    try:
        return op(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - raised again
        args = kwargs = None
        raise passed_on(error)  # noqa: B904 - the same one


@cache
def _is_composite(op: Any) -> bool:
    """Whether an operator only calls others, on GPUs too. Autograd takes these apart; in inference
    mode, without its keys, the fallback is called before that.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = op.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, "CUDA") and not has(name, "CPU")


_handlers: list[Handler] = []
_chain: Callable[..., Any] = _plain
_library: Any = None
"""What keeps the fallback registered."""


def _fallback(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        if _is_composite(op):
            return op.decompose(*args, **kwargs)
        with _Exclude(_KEYS):
            return _chain(op, args, kwargs)
    except BaseException as error:  # noqa: BLE001 - raised again
        args = kwargs = None  # type: ignore[assignment]
        raise passed_on(error)  # noqa: B904 - the same one


def _rebuild() -> None:
    global _chain
    _chain = _plain
    for handler in _handlers:
        _chain = partial(handler, below=_chain)  # no frame that holds arguments


def _include(included: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, included)


@contextmanager
def unwatched() -> Iterator[None]:
    """Operators that this thread calls are not reported."""
    with _Exclude(_KEYS):
        yield


@contextmanager
def recording() -> Iterator[None]:
    """The same within a handler; autograd records what is called, as it does above it."""
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, _KEYS):
        yield


def watch(handler: Handler) -> Callable[[], None]:
    """Give each operator to ``handler``, in this thread and in those that are started from now on.
    The latest handler is called first. Returns what ends that.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("_", "IMPL")
        _library.fallback(_fallback, dispatch_key="Fake", with_keyset=True)
    undo = [] if _handlers else [_pass_higher_order(), *_keep_subclasses_apart()]
    _handlers.append(handler)
    _rebuild()
    if len(_handlers) == 1:
        _include(True)
        undo.append(_in_new_threads())

    def end() -> None:
        _handlers.remove(handler)
        _rebuild()
        if not _handlers:
            _include(False)
        for each in undo:
            each()

    return end


def _in_new_threads() -> Callable[[], None]:
    original = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        _include(bool(_handlers))
        original(thread)

    return patch(threading.Thread, "run", run)


def _pass_higher_order() -> Callable[[], None]:
    """Operators that take functions have kernels of their own in Python, and none for the key."""
    from torch._ops import HigherOrderOperator, _higher_order_ops

    def passes(op: Any) -> None:
        op.non_fallthrough_keys = op.non_fallthrough_keys.remove(_KEY)

    for op in _higher_order_ops.values():
        passes(op)
    original = HigherOrderOperator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        passes(self)

    return patch(HigherOrderOperator, "__init__", init)


def _keep_subclasses_apart() -> Iterator[Callable[[], None]]:
    """What works on tensors that must not have an ordinary Python object: functions of torch's that
    make an instance of a subclass of a new tensor, and fake tensors. Modes do not see what these
    call, either.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def apart(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            with _Exclude(_KEYS):
                return original(*args, **kwargs)

        return function

    for name in ("_make_subclass", "_make_wrapper_subclass"):
        yield patch(torch.Tensor, name, staticmethod(apart(getattr(torch.Tensor, name))))
    yield patch(torch.Tensor, "as_subclass", apart(torch.Tensor.as_subclass))
    # Shapes that torch works out, on tensors without memory.
    fake = FakeTensorMode.__torch_dispatch__
    yield patch(FakeTensorMode, "__torch_dispatch__", apart(fake))
