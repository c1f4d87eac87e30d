"""The documentation's own tools, and one runner that all pages share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import blocks


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> blocks.Runner:
    """Remembers what ``gpuprobe run`` recorded, for the next page that begins with it."""
    return blocks.Runner(tmp_path_factory.mktemp("docs"))
