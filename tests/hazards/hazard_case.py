"""A case of the corpus: a small program, and what has to be found in it.

Every text runs with ``torch``, ``cuda`` (``torch.cuda``), ``nn`` and ``F`` at hand, on simulated
GPUs with a side stream ``s`` and the default stream current. ``kinds``: what has to be found;
empty for the safe ones, which must give no race at all. In a safe one, lines with a ``#needed``
mark are synchronisations without which it would race: the mutation test leaves out one at a time.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HOST", "RAW", "UAF", "WAR", "WAW", "Case", "case"]


class Case(NamedTuple):
    name: str
    source: str
    kinds: tuple[str, ...]
    text: str
    gpus: int = 1


RAW, WAR, WAW = ("read-after-write",), ("write-after-read",), ("write-after-write",)
UAF, HOST = ("use-after-free",), ("host-race",)


def case(name: str, source: str, kinds: tuple[str, ...], text: str, gpus: int = 1) -> Case:
    return Case(name, source, kinds, text.strip("\n") + "\n", gpus)
