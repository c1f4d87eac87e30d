"""The figures that others published, and the page about them."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from typing import Any

import blind_truth
import blocks
import pytest

FROZEN = "570917fa945c9d0bf1e4af11dce3f38c5118117bb084489d1a0d53794dbcce96"
"""Of the figures and programs of commit 287ead2c, before any of them was run."""


def rows(path: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_figures_and_programs_are_those_that_were_frozen() -> None:
    assert blind_truth.frozen_digest() == FROZEN


def test_the_page_has_the_results() -> None:
    """`test_generated.py` compares all pages."""
    assert blind_truth.page() in (blocks.DOCS / "blind-truth.md").read_text(encoding="utf-8")


def test_every_fix_and_explanation_belongs_to_a_program() -> None:
    names = [
        f"{source['name']}: {program['name']}"
        for source in rows(blind_truth.SOURCES)
        for program in source["programs"]
    ]
    assert set(rows(blind_truth.FIRST)) == set(names)
    assert set(rows(blind_truth.MENDED)) <= set(names)
    for fix in rows(blind_truth.MENDS)["programs"]:
        for pattern in fix["names"]:
            assert any(fnmatch(name, pattern) for name in names), pattern


def test_every_difference_is_explained_or_named_as_unexplained() -> None:
    sources = rows(blind_truth.SOURCES)
    both = {**rows(blind_truth.FIRST), **rows(blind_truth.MENDED)}
    explanations = rows(blind_truth.MENDS)["explanations"]
    for words in blind_truth.words_of(sources, both).values():
        for name, word in words.items():
            if word not in ("equal", "right"):
                assert blind_truth._explained(name[2:], explanations) >= 0, name


@pytest.mark.parametrize(
    ("printed", "format", "found", "word"),
    [
        ("10111", "floor", 10111.9 * 2**20, "equal"),
        ("10111", "floor", 10112 * 2**20, "near"),
        ("7.44", ".2f", 7.4449 * 2**20, "equal"),
        ("7.44", ".2f", 7.6 * 2**20, "off"),
    ],
)
def test_a_figure_is_compared_as_it_is_printed(
    printed: str, format: str, found: float, word: str
) -> None:
    figure = {"key": "k", "what": "peak", "printed": printed, "format": format, "unit": "MiB"}
    assert blind_truth.judged(figure, {"k": found}) == word
    assert blind_truth.judged(figure, {}) == "missing"
