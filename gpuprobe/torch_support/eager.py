"""Eager programs without the import of torch's compiler.

An optimizer imports ``torch._dynamo`` when it is made, to run its methods with compilation off, and
again in ``step``, where a compiled program breaks its graph. In an eager program nothing compiles,
and the import is more than a third of a small program's time. Two functions of torch cause it:

* ``torch._disable_dynamo``. A function that it makes keeps what it calls in ``__dynamo_disable``
  (``torch/_compile.py``): that is the function itself here.
* ``_use_grad_for_differentiable`` in ``torch/optim/optimizer.py``. A function that it makes gets
  the same code without the import and the breaks of the graph.

Both are undone as soon as something else imports the compiler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from gpuprobe.patching import patch, when_imported

if TYPE_CHECKING:
    import torch

_CALLED: Final = "__dynamo_disable"
_COMPILER: Final = "torch._dynamo"
_USED: Final = {
    "torch", "torch._dynamo", "_dynamo", "graph_break", "is_grad_enabled", "set_grad_enabled",
    "defaults", "cast", "Optimizer",
}  # fmt: skip
"""The names in the code of ``_use_grad`` whose effect is known."""


def defer_compiler() -> None:
    """Import the compiler only if the program itself uses it. Without effect in a process that has
    imported torch; the import may have begun.
    """
    if "torch._compile" in sys.modules:
        return
    undo: list[Callable[[], object]] = []

    def follow(module: str, name: str, change: Callable[[Any, Any], Callable[[], object]]) -> None:
        """Change what a decorator of torch's makes."""
        owner: Any = sys.modules[module]
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def decorate(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = original(fn, *args, **kwargs)
            if fn is not None and _COMPILER not in sys.modules:
                undo.append(change(fn, made))
            return made

        patch(owner, name, decorate)

    def when(module: str, name: str, change: Callable[[Any, Any], Callable[[], object]]) -> None:
        when_imported(module, lambda: follow(module, name, change))

    def imported() -> None:
        while undo:
            undo.pop()()

    when("torch._compile", "_disable_dynamo", _call_itself)
    when("torch.optim.optimizer", "_use_grad_for_differentiable", _without_breaks)
    when_imported(_COMPILER, imported)


def _call_itself(fn: Any, made: object) -> Callable[[], object]:
    setattr(fn, _CALLED, fn)
    return lambda: vars(fn).pop(_CALLED, None)


def _without_breaks(fn: object, made: FunctionType) -> Callable[[], object]:
    code = made.__code__
    plain = _with_grad_of_defaults.__code__
    if code.co_freevars != ("func",) or not _USED.issuperset(code.co_names):
        return lambda: None  # another version of torch: it imports the compiler

    made.__code__ = plain.replace(
        co_filename=code.co_filename, co_firstlineno=code.co_firstlineno, co_name=code.co_name
    )

    def restore() -> None:
        made.__code__ = code

    return restore


def _with_func(func: Callable[..., Any]) -> Any:
    """The code for `_without_breaks`; its globals are those of ``torch/optim/optimizer.py``."""

    def with_grad_of_defaults(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    return with_grad_of_defaults


_with_grad_of_defaults: Final = _with_func(print)
