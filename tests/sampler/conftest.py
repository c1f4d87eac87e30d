"""Each sampler test starts without what earlier ones left behind."""

from __future__ import annotations

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
def _no_leftovers(no_leftovers: None) -> None:
    pass
