"""How results look in a notebook: the classes ask, and `gpuprobe.api` says who draws them."""

from __future__ import annotations

from collections.abc import Callable

_draw: Callable[[object], str] | None = None


def draw_with(draw: Callable[[object], str]) -> None:
    """Have ``draw`` make the HTML of every `Displayed` object."""
    global _draw
    _draw = draw


class Displayed:
    """What IPython shows as HTML. Without a drawing function it shows the ``repr``."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return None if _draw is None else _draw(self)
