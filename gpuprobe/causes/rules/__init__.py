"""The rules, in the order in which they are called; the first that knows a group names its cause.

A rule is a function from a `HeldGroup` to a `Answer`, or None. To add one: a file here, and a line
in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.causes.rules import (
    autocast,
    cycles,
    early,
    exceptions,
    files,
    gradients,
    graphs,
    holders,
    optimizer_state,
    replays,
    replicas,
)

RULES: Final[tuple[Callable[[HeldGroup], Answer | None], ...]] = (
    replays.diagnose,
    early.diagnose,
    gradients.diagnose,
    cycles.diagnose,
    exceptions.diagnose,
    autocast.diagnose,
    replicas.diagnose,
    files.diagnose,
    optimizer_state.diagnose,
    graphs.diagnose,
    holders.diagnose,
)
