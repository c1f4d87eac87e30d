"""Putting a function in the place of another, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["patch"]

_ABSENT = object()


def patch(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Set ``owner.name``; return what puts the old value back.

    An attribute that the owner only inherited is deleted again. Where somebody else has put
    theirs over ours since, theirs stays: what it calls inside it only passes calls on, once the
    recorder is switched off.
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)

    def restore() -> None:
        if vars(owner).get(name, _ABSENT) is not replacement:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore
