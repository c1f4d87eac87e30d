"""The figures that others published."""

from __future__ import annotations

from fnmatch import fnmatch

import blind_truth
import pytest

FROZEN = "32ffc684374734c8f6cf8ae93bb2d49af33c8ca2cf187bf89324b47c703a609e"
"""Of the figures and programs of commit 15847e21, before any of them was run."""


def test_figures_and_programs_are_those_that_were_frozen() -> None:
    assert blind_truth.frozen_digest() == FROZEN


def test_every_fix_and_explanation_belongs_to_a_program() -> None:
    names = [
        f"{source['name']}: {program['name']}"
        for source in blind_truth.read("sources")
        for program in source["programs"]
    ]
    assert sorted(blind_truth.read("first")) == sorted(names)
    assert set(blind_truth.read("mended")) <= set(names)
    for fix in blind_truth.read("mends")["programs"]:
        for pattern in fix["names"]:
            assert any(fnmatch(name, pattern) for name in names), pattern


def test_every_difference_is_explained_or_named_as_unexplained() -> None:
    both = {**blind_truth.read("first"), **blind_truth.read("mended")}
    explanations = blind_truth.read("mends")["explanations"]
    for words in blind_truth.words_of(blind_truth.read("sources"), both).values():
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
