"""Sizes of the language model."""

from dataclasses import dataclass

BATCH = 8
LENGTH = 64
STEPS = 6


@dataclass
class Config:
    vocabulary: int = 2048
    width: int = 128
    heads: int = 4
    depth: int = 3
    positions: int = 256
