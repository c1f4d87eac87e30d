"""Assignments of least cost where no cost is known: the matching of DETR and of its kin.

How many pairs there are follows from the shape of the costs; which ones decides about values only.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from gpuprobe.patching import Patches, when_imported
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.machine import Machine

_MODULE: Final = "scipy.optimize"
_NAME: Final = "linear_sum_assignment"


def install(machine: Machine, patches: Patches) -> None:
    """Replace scipy's function, now or when the program imports it."""
    if machine.shapes:
        patches.add(when_imported(_MODULE, functools.partial(_replace, machine, patches)))


def _replace(machine: Machine, patches: Patches) -> None:
    original = vars(sys.modules[_MODULE])[_NAME]

    @functools.wraps(original)
    def assign(cost_matrix: Any, maximize: bool = False) -> Any:
        import numpy

        costs = numpy.asarray(cost_matrix)
        if machine.given_nan and costs.dtype.kind == "f" and not machine.closed:
            unknown = numpy.isnan(costs)
            if unknown.any():
                machine.assume(
                    f"{where()}: of unknown costs, the assignment of least cost is any assignment"
                )
                costs = numpy.where(unknown, 0, costs)
        return original(costs, maximize)

    patches.set_all(sys.modules[_MODULE], {_NAME: assign}, within="")
