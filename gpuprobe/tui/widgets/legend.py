"""Categories of memory in a line of text. Knows nothing of Textual."""

from __future__ import annotations

from collections.abc import Iterable

from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes
from gpuprobe.tui.widgets.palette import LETTERS
from gpuprobe.tui.widgets.styled_text import Line, Span


def words(category: Category) -> str:
    """A category's name as words."""
    return category.words


def chip(category: Category, plain: bool) -> Span:
    """A mark of the category's colour, or its letter."""
    return (LETTERS[category], "") if plain else ("■", category.value)


def legend(sizes: Iterable[tuple[Category, int]], plain: bool) -> Line:
    """``■ parameter 1.2 GiB  ■ activation …`` in one line."""
    line: Line = ()
    for category, size in sizes:
        if size:
            named = (f" {words(category)} ", "")
            line += (chip(category, plain), named, (f"{human_bytes(size)}   ", "dim"))
    return line
