"""Whether what the GPUs of this process do takes time."""

from __future__ import annotations

import os
from typing import Final

NATIVE_SETTINGS: Final = "GPUPROBE_NATIVE"
"""The environment variable with the settings of the native engine, which children inherit."""


def takes_time() -> bool:
    """False on the native engine: kernels do nothing there, or the host computes what they would.
    Events are recorded in order, but what lies between two of them is the host's time.
    """
    return NATIVE_SETTINGS not in os.environ
