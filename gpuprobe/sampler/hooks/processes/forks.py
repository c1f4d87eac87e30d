"""What a forked process is to forget of its parent's recorder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def in_children(method: Callable[[], None]) -> None:
    """Call a bound method in each process that is forked off, as long as its object is alive."""
    ref = weakref.WeakMethod(method)

    def call() -> None:
        found = ref()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)
