"""How far the figures of a simulated run may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Margin:
    """By how many bytes a peak may be lower (``below``) or higher (``above``) than in a simulation.
    ``why``: a phrase that names what the simulation differs in; "" if nothing in the run does, and
    both are 0.
    """

    below: int = 0
    above: int = 0
    why: str = ""


NO_MARGIN: Final = Margin()
