"""What the data sheets of GPUs state: peaks, bandwidths, links. `speeds.json` has the figures and
the source of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from gpuprobe.model.values import Unavailable

GB: Final = 1e9
TERA: Final = 1e12
_DTYPES: Final = {"float8_e4m3fn": "float8", "float8_e5m2": "float8"}
_KEPT: Final = (0.85, 1.0)
"""Of GPUs without measured kernels of their chip."""
_WIDE_PROCESSORS: Final = frozenset(
    (
        "ampere-consumer",
        "ampere-professional",
        "ada",
        "ada-consumer",
        "hopper",
        "blackwell",
        "blackwell-consumer",
        "blackwell-professional",
    )
)
_SIZES: Final = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8": 1,
}
"""Bytes of an element of what is multiplied."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one GPU.

    ``peak``: multiplications and additions a second by dtype, dense, with sums in float32.
    ``bandwidth``: of its memory, bytes a second; ``l2``: bytes. ``pcie`` and ``nvlink``: bytes a
    second in one direction, 0 if it has none. ``table``: the GPU with measured kernels that has the
    same chip or architecture, ``own`` if it is this very GPU, ``chip`` if it is the same chip.
    ``steps``: of training on it, by which ``sustained`` was set; empty where there were none.
    ``sustained``: low and high; with a table of the same chip, the share of the measured speed that
    is kept under load; without, the share of the peak that large products reach. ``plain``: share
    of the peak that products without tensor cores reach, low, expected and high; empty where it is
    that of the architecture.
    """

    name: str
    title: str
    architecture: str
    processors: int
    peak: Mapping[str, float]
    bandwidth: float
    l2: int
    pcie: float
    nvlink: float
    table: str
    own: bool
    chip: bool
    steps: str
    sustained: tuple[float, float]
    plain: tuple[float, ...]
    source: str

    @property
    def processor_rate(self) -> float:
        """Cycles a second of all processors, from the float32 peak: 2 for each lane and cycle, with
        64 lanes up to A100, 128 later, of which elementwise kernels keep half busy.
        """
        lanes = 128 if self.architecture in _WIDE_PROCESSORS else 64
        return self.peak["float32"] / (2 * lanes)

    @property
    def clock(self) -> float:
        """Of the multiprocessors, MHz, at which the data sheet's peaks are."""
        return self.processor_rate / self.processors / 1e6

    @property
    def kept(self) -> tuple[float, float]:
        """The share of a short run's speed that is kept under load, low and high."""
        return self.sustained if self.chip else _KEPT

    def rate(self, dtype: str) -> float | Unavailable:
        """The peak for products of that type, multiplications and additions a second."""
        peak = self.peak.get(sheet_dtype(dtype))
        if peak is not None:
            return peak
        if dtype == "bfloat16":
            return Unavailable(
                f"{self.title} has no tensor cores for bfloat16: torch computes such products in "
                "another way there, whose speed is not published"
            )
        return Unavailable(
            f"no speed is known of products of {dtype or 'unknown type'} on {self.title}"
        )


def clock_of(gpu: str) -> tuple[float, tuple[float, float] | None] | None:
    """The clock of the data sheet of the GPU that the catalogue has under this name, MHz, and which
    shares, low and high, the prices of its products assume under load: None where these are
    no share of a clock. None for a GPU without speeds.
    """
    speeds = all_speeds().get(gpu)
    if speeds is None:
        return None
    return speeds.clock, speeds.sustained if speeds.chip else None


def sheet_dtype(dtype: str) -> str:
    """The name that data sheets have for a type that torch names."""
    return _DTYPES.get(dtype, dtype)


def element_bytes(dtype: str) -> int:
    """Bytes of an element. Raises KeyError for a type that no GPU multiplies here."""
    return _SIZES[sheet_dtype(dtype)]


@lru_cache(maxsize=1)
def all_speeds() -> Mapping[str, Speeds]:
    """By the name that the catalogue has for the GPU."""
    text = Path(__file__).with_name("speeds.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    sources: dict[str, str] = document["sources"]
    return {
        name: Speeds(
            name=name,
            title=entry["title"],
            architecture=entry["architecture"],
            processors=entry["processors"],
            peak={dtype: rate * TERA for dtype, rate in entry["peak"].items()},
            bandwidth=entry["bandwidth"] * GB,
            l2=entry["l2_mib"] << 20,
            pcie=entry["pcie"] * GB,
            nvlink=entry["nvlink"] * GB,
            table=entry["table"],
            own=entry["kernels"] == "own",
            chip=entry["kernels"] in ("own", "same chip"),
            steps=sources[entry["steps"]] if "steps" in entry else "",
            sustained=(entry["sustained"][0], entry["sustained"][1]),
            plain=tuple(entry.get("plain", ())),
            source=sources[entry["source"]],
        )
        for name, entry in document["gpus"].items()
    }
