"""Whose code a frame runs: torch's, gpuprobe's, or the program's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

__all__ = ["OURS", "TORCH"]

# With the separator at the end: torchvision and torchao lie next to torch and are not torch.
OURS: Final = str(Path(__file__).resolve().parent.parent) + os.sep
"""Prefix of the files of this package."""
TORCH: Final = str(Path(torch.__file__).resolve().parent) + os.sep
"""Prefix of torch's files."""
