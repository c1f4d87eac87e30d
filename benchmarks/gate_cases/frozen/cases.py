"""All cases of the frozen set, by name."""

from __future__ import annotations

from benchmarks.gate_cases.frozen.case import Case
from benchmarks.gate_cases.frozen.harmless import HARMLESS
from benchmarks.gate_cases.frozen.images import IMAGES
from benchmarks.gate_cases.frozen.language import LANGUAGE
from benchmarks.gate_cases.frozen.others import OTHERS

COSTLY: dict[str, Case] = {**LANGUAGE, **IMAGES, **OTHERS}

__all__ = ["COSTLY", "HARMLESS"]
