"""Processes that an estimated program starts, and what they need of its GPUs."""

from typing import Final

ENDED: Final = ".ended"
"""The suffix of the file that a process leaves which was ended after its steps."""
