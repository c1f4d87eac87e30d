"""Functions that run inside a context, and are what they were to whoever asks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def in_context(function: _F, context: Callable[[], AbstractContextManager[Any]]) -> _F:
    """``function``, each call of it inside a ``context()``. Of a coroutine function or a generator
    function, which it stays, that is from where its body begins to where it ends. An asynchronous
    generator stays as it is.
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
