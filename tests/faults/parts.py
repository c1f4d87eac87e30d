"""What programs do that a watcher could notice, or be hurt by: functions that `program.py` calls
around the steps of a training loop, alone or several of them.

A part is registered by `part`, and continues; by `ending`, and ends the process. It notes what it
can observe: `Run.note` writes it into a file of the program's.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from os import O_APPEND, O_CREAT, O_WRONLY, getcwd, getpid
from os import close as _close
from os import open as _open
from os import write as _write
from pathlib import Path
from typing import Any, NamedTuple

PLACES = ("start", "model", "forward", "backward", "step", "end")
"""Before torch is imported; after the model; in a hook of its forward pass, between the backward
pass and the optimizer's step, and after that, all in the second step; after the last step."""


class Run:
    """A program that runs. ``folder``: its own, in which it starts. ``device``: of its tensors,
    once torch is imported.
    """

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.folder = Path(getcwd())
        self.device = "cpu"
        self.kept: list[Any] = []
        self.later: list[Callable[[], None]] = []
        self.module: Any = None
        self.process = getpid()
        self._notes = str(self.folder / "notes")

    def note(self, *values: object) -> None:
        """Append a line to the program's notes, as far as its limits allow it to."""
        line = " ".join(str(value) for value in values) + "\n"
        try:
            number = _open(self._notes, O_WRONLY | O_CREAT | O_APPEND, 0o600)
        except OSError:  # the part has left no descriptor, or no file of this size
            return
        try:
            _write(number, line.encode("utf-8", "backslashreplace"))
        except OSError:
            return
        finally:
            _close(number)

    def note_tensors(self, name: str, tensors: Sequence[Any]) -> None:
        """The values of tensors, bit for bit."""
        import torch

        digest = hashlib.sha256()
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            digest.update(bytes(host.view(-1).view(torch.uint8).tolist()))
        self.note(name, digest.hexdigest()[:16])


Action = Callable[[Run], None]


class Part(NamedTuple):
    """``places``: where it may run. ``ends``: the process ends there. ``teardown``: what it does
    happens while the interpreter ends. ``started``: it needs an interpreter: the depth of the stack
    of a forked process is another, and it reports a hook that fails in another way.
    """

    name: str
    act: Action
    places: tuple[str, ...]
    ends: bool
    teardown: bool
    started: bool


PARTS: dict[str, Part] = {}


def _register(places: Sequence[str], **properties: bool) -> Callable[[Action], Action]:
    def register(act: Action) -> Action:
        name = act.__name__
        assert name not in PARTS, name
        PARTS[name] = Part(name, act, tuple(places or PLACES), **properties)
        return act

    return register


def part(*places: str, teardown: bool = False, started: bool = False) -> Callable[[Action], Action]:
    return _register(places, ends=False, teardown=teardown, started=started)


def ending(
    *places: str, teardown: bool = False, started: bool = False
) -> Callable[[Action], Action]:
    return _register(places, ends=True, teardown=teardown, started=started)
