"""The picture at the top of the README shows what torch's own CUDA code gives now."""

from __future__ import annotations

from pathlib import Path

import blocks
import pictures
import pytest

pytestmark = [pytest.mark.native, pytest.mark.slow]


def test_the_estimate_is_the_one_that_the_picture_shows(tmp_path: Path) -> None:
    if reason := blocks.not_installed(pictures.QUESTION_NEEDS):
        pytest.skip(reason)
    made = pictures.question_text(pictures.answer(blocks.Runner(tmp_path)))
    shown = pictures.ESTIMATE_TEXT.read_text(encoding="utf-8")
    assert "engine: native" in made
    assert shown == made, "run: make docs-images"
