"""What the tests of the virtual GPU share."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
