"""The version of torch that is installed."""

from __future__ import annotations

import torch


def installed() -> tuple[int, int]:
    """The (major, minor) of the torch that this process has imported."""
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int(minor)
