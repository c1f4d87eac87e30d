"""All cases of the frozen set, by name."""

from __future__ import annotations

from benchmarks.gate_cases.frozen import harmless
from benchmarks.gate_cases.frozen.case import Case
from benchmarks.gate_cases.frozen.images import IMAGES
from benchmarks.gate_cases.frozen.language import LANGUAGE
from benchmarks.gate_cases.frozen.later import LATER, LATER_HARMLESS
from benchmarks.gate_cases.frozen.newer import NEWER, NEWER_HARMLESS
from benchmarks.gate_cases.frozen.others import OTHERS

COSTLY: dict[str, Case] = {**LANGUAGE, **IMAGES, **OTHERS, **LATER, **NEWER}
HARMLESS: dict[str, Case] = {**harmless.HARMLESS, **LATER_HARMLESS, **NEWER_HARMLESS}

__all__ = ["COSTLY", "HARMLESS"]
