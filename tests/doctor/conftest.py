"""A healthy machine, to be broken one thing at a time."""

from __future__ import annotations

import pytest
from doctor_machine import Machine, healthy

from gpuprobe.api.devices import inventory
from gpuprobe.model.machine.devices import Inventory


@pytest.fixture(scope="session")
def fleet() -> Inventory:
    return inventory(("nvml",), "8xh100", environ={})


@pytest.fixture
def machine(fleet: Inventory) -> Machine:
    return healthy(fleet)
