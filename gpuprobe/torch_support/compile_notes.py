"""What torch's compiler did in this process: its graphs, graph breaks and recompilations.

A virtual GPU notes them; a recording ends with those that were made while it ran.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def note(text: str) -> None:
    """Count one more of these."""
    with _lock:
        _counts[text] += 1


def counts() -> Mapping[str, int]:
    """How many there were of each so far, in the order of the first."""
    with _lock:
        return dict(_counts)


def since(before: Mapping[str, int]) -> tuple[str, ...]:
    """What came after ``before``, which `counts` gave, in words."""
    return worded(
        {text: more for text, count in counts().items() if (more := count - before.get(text, 0))}
    )


def worded(counted: Mapping[str, int]) -> tuple[str, ...]:
    """Texts, with the number of times where that is not one."""
    return tuple(
        text if count == 1 else f"{text} ({count} times)" for text, count in counted.items()
    )
