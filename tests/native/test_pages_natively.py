"""Blocks of the documentation that need torch's build with CUDA print what the pages show."""

from __future__ import annotations

from pathlib import Path

import blocks
import pytest

pytestmark = [pytest.mark.native, pytest.mark.slow]


def natively(page: Path) -> list[blocks.Block]:
    return [b for b in blocks.blocks(page) if b.directives.get("needs") in blocks.NATIVE]


PAGES = [page for page in blocks.pages() if natively(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(blocks.ROOT)))
def test_page(page: Path, tmp_path: Path) -> None:
    lacking = {blocks.lacks(block.directives["needs"]) for block in natively(page)} - {""}
    if lacking:
        pytest.skip("; ".join(sorted(lacking)))
    found = list(blocks.run_page(page, blocks.Runner(tmp_path), blocks.NATIVE))
    problems = [outcome.problem for outcome in found if outcome.problem]
    assert not problems, "\n\n".join(problems)
    assert {outcome.block.start for outcome in found} == {b.start for b in natively(page)}
