"""Objects that Python's garbage collector need not visit.

A check keeps a dozen objects for each block of memory and each access to one: while they are alive,
the collector walks through all that there is more often, in the time of the program. They can be in
no cycle, so their counts of references free them.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

untrack: Final[Any] = ctypes.PYFUNCTYPE(None, ctypes.py_object)(
    ("PyObject_GC_UnTrack", ctypes.pythonapi)
)
"""Hides an object from the collector, until it is freed: only for one that no cycle can contain."""
