"""What torch's compiler did in this process: its graphs, graph breaks and recompilations.

`compile_watch` notes them; a recording ends with those that were made while it ran.
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


def counts_since(before: Mapping[str, int]) -> dict[str, int]:
    """How many of each came after ``before``, which `counts` gave."""
    return {text: more for text, count in counts().items() if (more := count - before.get(text, 0))}


def since(before: Mapping[str, int]) -> tuple[str, ...]:
    """`counts_since` in words."""
    return worded(counts_since(before))


def worded(counted: Mapping[str, int]) -> tuple[str, ...]:
    """Texts, with the number of times where that is not one."""
    return tuple(
        text if count == 1 else f"{text} ({count} times)" for text, count in counted.items()
    )
