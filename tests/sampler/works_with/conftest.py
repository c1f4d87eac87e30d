"""Helpers of the folder above are imported by their plain names, as everywhere in the tests."""

from __future__ import annotations

import sys
from pathlib import Path

ABOVE = str(Path(__file__).resolve().parent.parent)
if ABOVE not in sys.path:
    sys.path.insert(0, ABOVE)
