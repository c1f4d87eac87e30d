"""The documentation's own tools, and one runner that all pages share."""

from __future__ import annotations

import blocks
import pytest
import warm_python


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> blocks.Runner:
    """A runner that reuses recordings and estimates for the next page that has the command."""
    base = tmp_path_factory.mktemp("docs")
    ranks = warm_python.ranks()
    del ranks["PATH"]  # the runner puts the folder of its commands first
    return blocks.Runner(base, warm_python.shared().folder, {**warm_python.NESTED, **ranks})
