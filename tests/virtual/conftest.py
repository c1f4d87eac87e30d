from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def no_group_is_left() -> Iterator[None]:
    """Ends the default process group, if the test has not done so."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
