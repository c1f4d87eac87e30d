"""Which of a machine's GPUs ``CUDA_VISIBLE_DEVICES`` selects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

NAME: Final = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")


def visible(setting: str | None, gpus: Sequence[T]) -> list[T]:
    """The GPUs that a setting selects, in its order: numbers, up to the first one that no GPU has
    (CUDA C++ Programming Guide, "CUDA Environment Variables"). Without a setting all of them.
    """
    if setting is None:
        return list(gpus)
    found: list[int] = []
    for part in setting.split(","):
        text = part.strip()
        if not text.isdecimal() or int(text) >= len(gpus):
            break
        if int(text) in found:  # CUDA has none at all then
            return []
        found.append(int(text))
    return [gpus[index] for index in found]
