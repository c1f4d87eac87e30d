"""The styles of roles: dark, light, safe for the colour-blind, and without colour.

The colour-blind palette is that of Okabe and Ito, "Color Universal Design" (2008), whose colours
can be distinguished with every common kind of colour blindness; rare categories have a tint of one
of them. Dark and light show categories in the colours of the HTML report. Without colour, bold, dim
and reverse distinguish roles, and bars and maps use a different character for each part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes
from gpuprobe.tui.widgets.styled_text import Line, Span, packed

DEFAULT = "dark"

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
    Category.GATHERED_PARAMETER: "F",
    Category.KV_CACHE: "V",
    Category.OTHER: "X",
    Category.UNKNOWN: "?",
}
"""The letter of each category in a display without colour."""

NEED_LETTERS: dict[Need, str] = {
    Need.IN_USE: "U",
    Need.LATER: "L",
    Need.NOT_YET: "Y",
    Need.NEVER_AGAIN: "A",
    Need.NEVER: "N",
    Need.OPEN: "K",
    Need.UNTRACED: "?",
}
"""The letter of each need in a display without colour."""


def letter(kind: Category | Need) -> str:
    """The letter of a category or a need in a display without colour."""
    return NEED_LETTERS[kind] if isinstance(kind, Need) else LETTERS[kind]


def words(kind: Category | Need) -> str:
    """The name of a category or a need, short enough for a legend."""
    return kind.short if isinstance(kind, Need) else kind.words


_NAMES = ("dark", "light", "colour-blind", "no colour")
_BACKGROUND = ("#11151c", "#fbfbf8", "#101216", "#000000")
_FOREGROUND = ("#d5dbe5", "#22262e", "#e6e6e6", "#ffffff")
_PANEL = ("#1b2230", "#ecebe4", "#1d2129", "#000000")

# Role -> its style in each of `_NAMES`, in Rich's notation.
_STYLES: dict[str, tuple[str, str, str, str]] = {
    "dim": ("#7d8799", "#6c7280", "#8b919c", "dim"),
    "head": ("#9aa5b8", "#4d5461", "#a9afba", "underline"),
    "accent": ("#6cb6ff", "#0b5cad", "#56b4e9", "bold"),
    "calm": ("#57c78a", "#1d7f45", "#56b4e9", "none"),
    "warm": ("#e0b050", "#9a6200", "#f0e442", "bold"),
    "hot": ("#f0706a", "#b3261e", "#e8762c", "bold"),
    "track": ("#323b4d", "#c9c9c0", "#363c47", "dim"),
    "cursor": ("on #2a3850", "on #d6e4f5", "on #2c3a4d", "reverse"),
    "idle-cursor": ("on #1f2938", "on #e6edf4", "on #22282f", "bold"),
    "key": ("bold #6cb6ff", "bold #0b5cad", "bold #56b4e9", "bold"),
    "tree": ("#566176", "#9a9fa9", "#5d6470", "dim"),
    # parts of a GPU's memory
    "part-other_users": ("#c58af9", "#7a3fb5", "#cc79a7", "none"),
    "part-own_other_processes": ("#6cb6ff", "#0b5cad", "#56b4e9", "none"),
    "part-this_context": ("#4fb3bf", "#0d7480", "#2f8fd0", "none"),
    "part-torch_unused": ("#7f9f7f", "#5f7f5f", "#999999", "none"),
    "part-torch_allocated": ("#57c78a", "#1d7f45", "#009e73", "none"),
    "part-unexplained": ("#e0b050", "#9a6200", "#e69f00", "none"),
    # categories of memory, and text on their colours
    "label": ("#0b0e11", "#101418", "#101216", "none"),
    "parameter": ("#5b9bdd", "#3b7fc4", "#56b4e9", "none"),
    "buffer": ("#a195dd", "#8a7cc8", "#a6d8f5", "none"),
    "optimizer_state": ("#3fb497", "#2ba084", "#009e73", "none"),
    "gradient": ("#e8b04a", "#e3a229", "#e69f00", "none"),
    "gradient_bucket": ("#cb6a9c", "#b3477f", "#b37c00", "none"),
    "gathered_parameter": ("#7f8cf0", "#2f3fa8", "#0072b2", "none"),
    "kv_cache": ("#58bfd0", "#1f8ea3", "#4aa3a3", "none"),
    "weight_cast": ("#9fceef", "#86bfe8", "#d6ecfa", "none"),
    "workspace": ("#bdb75a", "#a8a23c", "#999999", "none"),
    "input": ("#f2e27a", "#f0dc5a", "#f0e442", "none"),
    "activation": ("#dd97bf", "#d887b4", "#cc79a7", "none"),
    "autograd_detail": ("#e2875a", "#d9713c", "#d55e00", "none"),
    "temporary": ("#a3d6cf", "#9ad0c8", "#e8e8e8", "none"),
    "other": ("#8b939b", "#9aa1a8", "#777777", "none"),
    "unknown": ("#6a727a", "#c3c9cf", "#555555", "none"),
    # needs
    "in_use": ("#4da3ff", "#1f6fd0", "#0072b2", "none"),
    "needed_later": ("#57b98a", "#3aa377", "#56b4e9", "none"),
    "not_used_yet": ("#e8c14a", "#e0ad1f", "#f0e442", "none"),
    "never_used_again": ("#f0706a", "#d6473d", "#d55e00", "none"),
    "never_used": ("#cf6bc2", "#a5409a", "#cc79a7", "none"),
    "open": ("#a195dd", "#8a7cc8", "#009e73", "none"),
    "not_traced": ("#6a727a", "#c3c9cf", "#777777", "none"),
}


@record(frozen=True, slots=True)
class Palette:
    """The colours of a theme. ``roles``: role -> style in Rich's notation. ``plain``: without
    colour, so that the parts of a bar need different characters.
    """

    name: str
    dark: bool
    background: str
    foreground: str
    panel: str
    roles: Mapping[str, str]
    plain: bool = False

    def style(self, role: str) -> str:
        """The style of a role in Rich's notation. Some roles have parameters: ``A on B`` is
        category A on the colour of category B, ``tile N A`` the N-th rectangle of category A
        (neighbours differ slightly), and ``chosen N A`` the same rectangle under the cursor.
        """
        if " on " in role:
            front, _, back = role.partition(" on ")
            return "none" if self.plain else f"{self.roles[front]} on {self.roles[back]}"
        kind, _, rest = role.partition(" ")
        if not rest:
            return self.roles[role]
        if self.plain:
            return "reverse" if kind == "chosen" else "none"
        number, _, category = rest.partition(" ")
        bold = "bold " if kind == "chosen" else ""
        return f"{bold}{self.roles['label']} on {_shade(self.roles[category], int(number))}"


def _shade(color: str, step: int) -> str:
    """The colour, slightly darker (1) or lighter (2) for neighbours of the same category."""
    if step % 3 == 0:
        return color
    toward = 0 if step % 3 == 1 else 255
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (toward - part) * 0.16):02x}" for part in parts)


def _palette(at: int) -> Palette:
    roles = {role: styles[at] for role, styles in _STYLES.items()}
    accent, calm, warm, hot, dim = (roles[r] for r in ("accent", "calm", "warm", "hot", "dim"))
    roles |= {
        "bold": "bold",
        "section": "none",
        "sorted": f"bold {accent}",
        "title": f"bold {accent}",
        "pinned": f"bold {accent}",
        "match": f"underline {accent}",
        "tab": f"bold reverse {accent}",
        "plot": accent,
        "good": calm,
        "warning": warm,
        "bad": f"bold {hot}",
        "badge": f"reverse {dim}",
        "badge-warning": f"reverse {warm}",
        "badge-bad": f"bold reverse {hot}",
        "part-driver_reserved": dim,
        "part-free": roles["track"],
    }
    name = _NAMES[at]
    return Palette(
        name,
        name != "light",
        _BACKGROUND[at],
        _FOREGROUND[at],
        _PANEL[at],
        roles,
        plain=name == "no colour",
    )


PALETTES: dict[str, Palette] = {name: _palette(at) for at, name in enumerate(_NAMES)}


def default_palette(environ: Mapping[str, str] = os.environ) -> str:
    """``no colour`` if ``NO_COLOR`` is set to anything (no-color.org), else `DEFAULT`."""
    return "no colour" if environ.get("NO_COLOR") else DEFAULT


def chip(kind: Category | Need, plain: bool) -> Span:
    """A mark in the colour of a category or a need, or its letter."""
    return (letter(kind), "") if plain else ("■", kind.value)


def legend(sizes: Iterable[tuple[Category | Need, int]], plain: bool, columns: int) -> list[Line]:
    """``■ parameter 1.2 GiB   ■ activation …`` in lines of ``columns`` columns."""
    parts: list[Line] = [
        (chip(kind, plain), (f" {words(kind)} ", ""), (human_bytes(size), "dim"))
        for kind, size in sizes
        if size
    ]
    return packed(parts, columns, gap="   ")
