"""The engine's log of its calls, and changes of it that stand for a fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gpuprobe.hazards.accesses import Race

ADDED: Final = "added by a fix"
"""The operator of accesses that an `Edit` adds."""

LogEntry = tuple[Any, ...]
"""A call of one of the engine's methods: its name, and its arguments."""
Edit = Callable[[Any, int, LogEntry], bool]
"""A fix as a change of the log: called before each entry with the engine that does the log again
and the entry's index. It may call that engine itself; False leaves the entry out."""


def identity(race: Race) -> tuple[Any, ...]:
    """What tells a race that was found again from another one."""
    return (race.rule.id, race.first.actor, race.first.time, race.block, race.second.site)
