"""The figures that others published, and the page about them."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from typing import Any

import blind_truth
import blocks
import pytest

FROZEN = {
    "first": "570917fa945c9d0bf1e4af11dce3f38c5118117bb084489d1a0d53794dbcce96",
    "second": "32ffc684374734c8f6cf8ae93bb2d49af33c8ca2cf187bf89324b47c703a609e",
}
"""Of the figures and programs of commits 287ead2c and 15847e21, before any of them was run."""
EACH = pytest.mark.parametrize("files", blind_truth.SETS.values(), ids=blind_truth.SETS)


def rows(path: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", blind_truth.SETS)
def test_figures_and_programs_are_those_that_were_frozen(name: str) -> None:
    assert blind_truth.frozen_digest(blind_truth.SETS[name]) == FROZEN[name]


@pytest.mark.parametrize("name", blind_truth.SETS)
def test_the_page_has_the_results(name: str) -> None:
    """`test_generated.py` compares all pages."""
    assert blind_truth.page(name) in (blocks.DOCS / "blind-truth.md").read_text(encoding="utf-8")


@EACH
def test_every_fix_and_explanation_belongs_to_a_program(files: blind_truth.Files) -> None:
    names = [
        f"{source['name']}: {program['name']}"
        for source in rows(files.sources)
        for program in source["programs"]
    ]
    waiting = files.read_mends().get("waiting", [])
    assert sorted([*rows(files.first), *waiting]) == sorted(names)
    assert set(rows(files.mended)) <= set(names)
    for fix in rows(files.mends)["programs"]:
        for pattern in fix["names"]:
            assert any(fnmatch(name, pattern) for name in names), pattern


@EACH
def test_every_difference_is_explained_or_named_as_unexplained(files: blind_truth.Files) -> None:
    sources = rows(files.sources)
    both = {**blind_truth.results_of(files.first), **blind_truth.results_of(files.mended)}
    explanations = rows(files.mends)["explanations"]
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
