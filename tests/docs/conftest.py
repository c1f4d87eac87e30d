"""The documentation's own tools, and one runner that all pages share."""

from __future__ import annotations

import blocks
import pytest
import warm_python


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> blocks.Runner:
    """A runner that reuses recordings of ``gpuprobe run`` for the next page that begins with
    one."""
    return blocks.Runner(tmp_path_factory.mktemp("docs"), warm_python.shared().folder)
