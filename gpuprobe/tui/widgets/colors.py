"""What categories look like: a colour, and a letter where there is none. Knows nothing of Textual.

The colours are those of the HTML report.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gpuprobe.model.memory import Category

__all__ = ["BLIND", "DARK", "LETTERS", "LIGHT", "PLAIN", "Colors", "shade"]

LETTERS: dict[Category, str] = {
    Category.PARAMETER: "P",
    Category.GRADIENT: "G",
    Category.OPTIMIZER_STATE: "O",
    Category.ACTIVATION: "A",
    Category.TEMPORARY: "T",
    Category.INPUT: "I",
    Category.BUFFER: "B",
    Category.AUTOGRAD_DETAIL: "D",
    Category.WORKSPACE: "W",
    Category.WEIGHT_CAST: "C",
    Category.GRADIENT_BUCKET: "K",
    Category.OTHER: "X",
    Category.UNKNOWN: "?",
}


@dataclass(frozen=True, slots=True)
class Colors:
    """``of`` maps a category to ``#rrggbb``. ``plain``: no colours; letters tell them apart."""

    of: dict[Category, str]
    label: str  # text on a category's colour
    dim: str
    accent: str
    bad: str
    warn: str
    plain: bool = False


def _of(*colors: str) -> dict[Category, str]:
    return dict(zip(_ORDER, colors, strict=True))


_ORDER = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.GRADIENT_BUCKET,
    Category.WEIGHT_CAST,
    Category.WORKSPACE,
    Category.INPUT,
    Category.ACTIVATION,
    Category.AUTOGRAD_DETAIL,
    Category.TEMPORARY,
    Category.OTHER,
    Category.UNKNOWN,
)

# Dark and light: as in reporters/html/assets/page.css.
DARK = Colors(
    _of(
        *("#5b9bdd", "#a195dd", "#3fb497", "#e8b04a", "#cb6a9c", "#9fceef", "#bdb75a"),
        *("#f2e27a", "#dd97bf", "#e2875a", "#a3d6cf", "#8b939b", "#6a727a"),
    ),
    label="#0b0e11",
    dim="#7d8799",
    accent="#79b8ff",
    bad="#ff8a80",
    warn="#f2c063",
)
LIGHT = Colors(
    _of(
        *("#3b7fc4", "#8a7cc8", "#2ba084", "#e3a229", "#b3477f", "#86bfe8", "#a8a23c"),
        *("#f0dc5a", "#d887b4", "#d9713c", "#9ad0c8", "#9aa1a8", "#c3c9cf"),
    ),
    label="#101418",
    dim="#57606a",
    accent="#0550ae",
    bad="#b42318",
    warn="#7a4d00",
)
# From the palette of Okabe and Ito, as in themes.py; what is seldom there has a tint of one of it.
BLIND = Colors(
    _of(
        *("#56b4e9", "#a6d8f5", "#009e73", "#e69f00", "#b37c00", "#d6ecfa", "#999999"),
        *("#f0e442", "#cc79a7", "#d55e00", "#e8e8e8", "#777777", "#555555"),
    ),
    label="#101216",
    dim="#8b919c",
    accent="#56b4e9",
    bad="#e8762c",
    warn="#f0e442",
)
PLAIN = Colors(_of(*("" for _ in _ORDER)), "", "dim", "bold", "bold", "bold", plain=True)


@lru_cache(maxsize=256)
def shade(color: str, step: int) -> str:
    """The colour, or for neighbours of the same category a little darker (1) or lighter (2)."""
    if not color.startswith("#") or step % 3 == 0:
        return color
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    toward = 0 if step % 3 == 1 else 255
    mixed = [round(part + (toward - part) * 0.16) for part in parts]
    return "#" + "".join(f"{part:02x}" for part in mixed)
