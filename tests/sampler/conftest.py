"""Each sampler test starts without what earlier ones left behind: models in reference cycles,
which a recorder would rightly find, and frames compiled by dynamo.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine, OpenMP's second thread costs these tiny models most of their time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_leftovers() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
        dynamo.utils.counters.clear()
    gc.collect()
    # What there is by now (torch, dynamo: 290,000 objects) is none of the test's: without it,
    # looking through all objects, as a recorder does at its start, takes no time.
    gc.freeze()
