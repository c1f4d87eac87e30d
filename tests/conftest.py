"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Properties are judged by what they find, never by how long a busy machine takes to find it. The
# same examples in each run: a change fails by its own doing. `make properties` draws new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default-seed", settings.get_profile("explore"), derandomize=True)
settings.load_profile("default-seed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    try:
        import torch

        reason = "" if torch.cuda.is_available() else "torch sees no CUDA device on this machine"
    except ImportError:
        reason = "torch is not installed"
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
