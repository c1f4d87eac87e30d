"""A price: how long the kernels of one call take on a GPU, as a range with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class PriceSource(Enum):
    """Where a price is from, the most exact first."""

    MEASURED = "measured kernels of this GPU"
    MODEL = "constants fitted or published for this GPU"
    GENERIC = "data sheet of this GPU"
    """Peak and bandwidth, with the share of them that kernels reach on other GPUs."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds on the GPU, without the host's launch: 8 of 10 calls are between ``low`` and
    ``high``.
    """

    low: float
    expected: float
    high: float
    source: PriceSource

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.expected <= self.high:
            raise ValueError(f"no range: {self.low}, {self.expected}, {self.high}")


@dataclass(frozen=True, slots=True)
class Factors:
    """A range as factors of the expected time, ``low`` <= 1 <= ``high``."""

    low: float
    high: float

    def price(self, seconds: float, source: PriceSource) -> Price:
        return Price(seconds * self.low, seconds, seconds * self.high, source)

    def wider(self, other: Factors) -> Factors:
        """Both uncertainties at once, which are independent."""
        low = math.hypot(math.log(self.low), math.log(other.low))
        high = math.hypot(math.log(self.high), math.log(other.high))
        return Factors(math.exp(-low), math.exp(high))


@dataclass(frozen=True, slots=True)
class Priced:
    """A price and one line on where its figures are from."""

    price: Price
    provenance: str
