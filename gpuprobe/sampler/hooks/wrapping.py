"""Functions whose calls run inside a context, unchanged for introspection; and context managers
that warn if they are not entered.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_F = TypeVar("_F", bound=Callable[..., Any])


def in_context(function: _F, context: Callable[[], AbstractContextManager[Any]]) -> _F:
    """``function`` with each call inside a ``context()``. A coroutine or generator function stays
    one, and the context lasts from the beginning of its body to the end. An asynchronous generator
    function is returned unchanged.
    """
    wrapped: Callable[..., Any]
    if inspect.isasyncgenfunction(function):
        return function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context():
                return await function(*args, **kwargs)

    elif inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context():
                return (yield from function(*args, **kwargs))

    else:

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def block(function: Callable[_P, Iterator[None]]) -> Callable[_P, AbstractContextManager[None]]:
    """Like ``contextlib.contextmanager``. A context that is never entered is a warning: it does
    nothing, while ``step()`` of torch's profiler ends a step.
    """
    made = contextmanager(function)

    @functools.wraps(function)
    def opened(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[None]:
        return _Block(made(*args, **kwargs), function.__name__)

    return opened


class _Block(AbstractContextManager[None]):
    def __init__(self, inner: _GeneratorContextManager[None], name: str) -> None:
        self._inner, self._name, self._used = inner, name, False

    def __enter__(self) -> None:
        self._used = True
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)

    def __call__(self, wrapped: _F) -> _F:
        """Use the context as a decorator."""
        self._used = True
        return self._inner(wrapped)

    def __del__(self) -> None:
        if not self._used:
            warnings.warn(
                f"{self._name}() does nothing outside a with statement: it is a context manager",
                RuntimeWarning,
                stacklevel=2,
            )
