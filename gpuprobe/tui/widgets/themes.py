"""What roles look like: dark, light, safe for the colour-blind, and without colour.

The colour-blind palette is that of Okabe and Ito, "Color Universal Design" (2008): its colours
stay apart under every common kind of colour blindness. Without colour, bold, dim and reverse
tell roles apart, and bars use a different character for each part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEFAULT", "PALETTES", "Palette", "default_palette"]

DEFAULT = "dark"

Roles = dict[str, str]


@dataclass(frozen=True, slots=True)
class Palette:
    """``roles`` maps a role to a style in Rich's words. ``plain``: parts of a bar must be told
    apart by their characters.
    """

    name: str
    dark: bool
    background: str
    foreground: str
    panel: str
    accent: str
    roles: Roles
    plain: bool = False


def _roles(
    *,
    dim: str,
    head: str,
    accent: str,
    calm: str,
    warm: str,
    hot: str,
    track: str,
    parts: tuple[str, str, str, str, str, str],
    cursor: str,
    key: str,
    tree: str,
) -> Roles:
    others, mine, context, cached, allocated, unexplained = parts
    return {
        "dim": dim,
        "head": head,
        "sorted": f"bold {accent}",
        "title": f"bold {accent}",
        "accent": accent,
        "bold": "bold",
        "section": "none",
        "calm": calm,
        "warm": warm,
        "hot": hot,
        "good": calm,
        "warning": warm,
        "bad": f"bold {hot}",
        "badge-bad": f"bold reverse {hot}",
        "badge-warning": f"reverse {warm}",
        "badge": f"reverse {dim}",
        "track": track,
        "plot": accent,
        "key": key,
        "tree": tree,
        "pinned": f"bold {accent}",
        "cursor": cursor,
        "match": f"underline {accent}",
        "part-driver_reserved": dim,
        "part-other_users": others,
        "part-own_other_processes": mine,
        "part-this_context": context,
        "part-torch_unused": cached,
        "part-torch_allocated": allocated,
        "part-unexplained": unexplained,
        "part-free": track,
    }


PALETTES: dict[str, Palette] = {
    "dark": Palette(
        "dark",
        dark=True,
        background="#11151c",
        foreground="#d5dbe5",
        panel="#1b2230",
        accent="#6cb6ff",
        roles=_roles(
            dim="#7d8799",
            head="#9aa5b8",
            accent="#6cb6ff",
            calm="#57c78a",
            warm="#e0b050",
            hot="#f0706a",
            track="#323b4d",
            parts=("#c58af9", "#6cb6ff", "#4fb3bf", "#7f9f7f", "#57c78a", "#e0b050"),
            cursor="on #2a3850",
            key="bold #6cb6ff",
            tree="#566176",
        ),
    ),
    "light": Palette(
        "light",
        dark=False,
        background="#fbfbf8",
        foreground="#22262e",
        panel="#ecebe4",
        accent="#0b5cad",
        roles=_roles(
            dim="#6c7280",
            head="#4d5461",
            accent="#0b5cad",
            calm="#1d7f45",
            warm="#9a6200",
            hot="#b3261e",
            track="#c9c9c0",
            parts=("#7a3fb5", "#0b5cad", "#0d7480", "#5f7f5f", "#1d7f45", "#9a6200"),
            cursor="on #d6e4f5",
            key="bold #0b5cad",
            tree="#9a9fa9",
        ),
    ),
    "colour-blind": Palette(
        "colour-blind",
        dark=True,
        background="#101216",
        foreground="#e6e6e6",
        panel="#1d2129",
        accent="#56b4e9",
        roles=_roles(
            dim="#8b919c",
            head="#a9afba",
            accent="#56b4e9",
            calm="#56b4e9",
            warm="#f0e442",
            hot="#e8762c",
            track="#363c47",
            parts=("#cc79a7", "#56b4e9", "#2f8fd0", "#999999", "#009e73", "#e69f00"),
            cursor="on #2c3a4d",
            key="bold #56b4e9",
            tree="#5d6470",
        ),
    ),
    "no colour": Palette(
        "no colour",
        dark=True,
        background="#000000",
        foreground="#ffffff",
        panel="#000000",
        accent="#ffffff",
        plain=True,
        roles=_roles(
            dim="dim",
            head="underline",
            accent="bold",
            calm="none",
            warm="bold",
            hot="bold",
            track="dim",
            parts=("none", "none", "none", "none", "none", "none"),
            cursor="reverse",
            key="bold",
            tree="dim",
        ),
    ),
}


def default_palette(environ: Mapping[str, str] = os.environ) -> str:
    """``no colour`` where ``NO_COLOR`` is set to anything (no-color.org), else `DEFAULT`."""
    return "no colour" if environ.get("NO_COLOR") else DEFAULT
