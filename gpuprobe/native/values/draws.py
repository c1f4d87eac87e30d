"""Random numbers of operators on the device, drawn on the CPU.

The device's generator decides: its seed and the offset that the operator starts at seed a CPU
generator for this one operator. So they are reproducible, differ from operator to operator, and
the program's own CPU generator is not advanced. They are not the numbers of CUDA's kernels.
"""

from __future__ import annotations

from typing import Any, Final

import torch

Key = tuple[int, int]
"""Seed and offset (in numbers per thread) of the device's generator when an operator starts."""

_MIX: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD: Final = (1 << 64) - 1


def seed_of(key: Key) -> int:
    """One 64-bit seed for a key: splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of both numbers."""
    mixed = 0
    for number in key:
        mixed = (mixed + number + _MIX[0]) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * _MIX[1]) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * _MIX[2]) & _WORD
        mixed ^= mixed >> 31
    return mixed


def generator_of(key: Key) -> Any:
    """A CPU generator for one operator."""
    made = torch.Generator(device="cpu")
    made.manual_seed(seed_of(key))
    return made


def key_of(generator: Any, device: Any) -> Key:
    """The key of the generator that an operator on ``device`` was given, or of the device's own.

    Call it outside of captures, in which generators have no offset.
    """
    if generator is None:
        torch.cuda._lazy_init()
        index = device.index if device is not None and device.index is not None else -1
        index = torch.cuda.current_device() if index < 0 else index
        generator = torch.cuda.default_generators[index]
    return int(generator.initial_seed()), int(generator.get_offset())


class Apart:
    """While it is entered, operators without a generator draw from the key's numbers, and the
    program's CPU generator comes back as it was.
    """

    __slots__ = ("_seed", "_state")

    def __init__(self, key: Key) -> None:
        self._seed = seed_of(key)
        self._state: Any = None

    def __enter__(self) -> None:
        default = torch.default_generator
        self._state = default.get_state()
        default.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._state)
