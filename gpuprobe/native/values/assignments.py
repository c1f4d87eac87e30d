"""Assignments of least cost with unknown costs: the matching of DETR and similar models.

The number of pairs follows from the shape of the costs; which pairs are chosen affects values only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from gpuprobe.patching import Patches, when_imported
from gpuprobe.torch_support.callers import place_now

_MODULE: Final = "scipy.optimize"
_NAME: Final = "linear_sum_assignment"


def install(patches: Patches, unknown: Callable[[], bool], assume: Callable[[str], None]) -> None:
    """Replace scipy's function, now or when the program imports it. ``unknown``: whether NaN may be
    a cost that was not computed; ``assume`` notes what the result assumes.
    """
    patches.add(when_imported(_MODULE, functools.partial(_replace, patches, unknown, assume)))


def _replace(patches: Patches, unknown: Callable[[], bool], assume: Callable[[str], None]) -> None:
    original = vars(sys.modules[_MODULE])[_NAME]

    @functools.wraps(original)
    def assign(cost_matrix: Any, maximize: bool = False) -> Any:
        import numpy

        costs = numpy.asarray(cost_matrix)
        if costs.dtype.kind == "f" and unknown():
            missing = numpy.isnan(costs)
            if missing.any():
                assume(
                    f"{place_now()}: of unknown costs, the assignment of least cost "
                    "is any assignment"
                )
                costs = numpy.where(missing, 0, costs)
        return original(costs, maximize)

    patches.set_all(sys.modules[_MODULE], {_NAME: assign}, within="")
