"""The documentation's own tools, and one runner that all pages share."""

from __future__ import annotations

import re
from importlib.metadata import version

import blocks
import pytest
import warm_python

_PINNED = re.compile(r'^dev = \["torch==([\d.]+)', re.MULTILINE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what shows figures with another torch than the one that printed them."""
    found = _PINNED.search((blocks.ROOT / "pyproject.toml").read_text("utf-8"))
    assert found is not None
    if version("torch").partition("+")[0] != found[1]:
        reason = f"what is shown was printed with torch {found[1]}"
        for item in items:
            if item.get_closest_marker("pinned_torch"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> blocks.Runner:
    """A runner that reuses recordings and estimates for the next page that has the command."""
    base = tmp_path_factory.mktemp("docs")
    ranks = warm_python.ranks()
    del ranks["PATH"]  # the runner puts the folder of its commands first
    return blocks.Runner(base, warm_python.shared().folder, {**warm_python.NESTED, **ranks})
