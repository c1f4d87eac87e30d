"""Each sampler test starts without what earlier ones left behind: models in reference cycles,
which a recorder would rightly find, and frames compiled by dynamo.
"""

from __future__ import annotations

import gc
import sys

import pytest


@pytest.fixture(autouse=True)
def _no_leftovers() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
    gc.collect()
