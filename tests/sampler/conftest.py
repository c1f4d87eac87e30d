"""Each sampler test starts without what earlier ones left behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_leftovers(no_leftovers: None) -> None:
    pass
