"""What torch's compiler did in this process: its graphs, graph breaks and recompilations.

`compile_watch` notes them; a recording ends with those of its duration. Does not import torch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

AGAIN: Final = " compiled again: "
"""Between a function and the reason for its recompilation."""
_SHOWN: Final = 2
"""The number of reasons that are quoted."""

_counts: Counter[str] = Counter()
_graphs = 0
_lock = threading.Lock()


def note(text: str) -> None:
    """Count one more note with this text."""
    with _lock:
        _counts[text] += 1


def note_graph(text: str) -> None:
    """Note a graph that was compiled, and not found in a cache."""
    global _graphs
    note(text)
    with _lock:
        _graphs += 1


def graphs() -> int:
    """The number of graphs that were noted so far."""
    return _graphs


def counts() -> Mapping[str, int]:
    """The number of notes with each text so far, in the order of the first."""
    with _lock:
        return dict(_counts)


def since(before: Mapping[str, int]) -> tuple[str, ...]:
    """The notes since ``before``, an earlier result of `counts`, as sentences."""
    counted = {text: more for text, n in counts().items() if (more := n - before.get(text, 0))}
    return _worded(counted)


def _worded(counted: Mapping[str, int]) -> tuple[str, ...]:
    """The texts with their counts, if larger than one; a function that was compiled again for
    several reasons is one text, with the first of them.
    """
    reasons: dict[str, list[str]] = {}
    for text in counted:
        function, again, reason = text.partition(AGAIN)
        if again:
            reasons.setdefault(function, []).append(reason)
    texts: dict[str, int] = {}
    for text, count in counted.items():
        function, _, reason = text.partition(AGAIN)
        several = reasons.get(function, ())
        if len(several) < 2:
            texts[text] = count
        elif reason == several[0]:
            times = sum(counted[function + AGAIN + each] for each in several)
            shown = "; ".join(several[:_SHOWN])
            more = len(several) - _SHOWN
            rest = f"; {more} more reasons" if more > 1 else f"; {several[-1]}" if more else ""
            texts[f"{function} compiled again {times} times: {shown}{rest}"] = 1
    return tuple(text if count == 1 else f"{text} ({count} times)" for text, count in texts.items())
