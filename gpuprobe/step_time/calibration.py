"""Kernels that were measured on the user's own card, which correct the prices of its GPU.

``benchmarks/gpu/calibrate.py`` writes the file, the environment variable ``GPUPROBE_STEP_TIMES``
names it. Calls of one class (`_place`) form a grid of sizes; between its points the logarithm of
measured time over built-in price is interpolated in the logarithms of the sizes, outside it stays
as at the edge. Classes without measured calls keep the built-in prices.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Final

from gpuprobe.errors import ConfigError
from gpuprobe.model.io.codec import closed, from_plain
from gpuprobe.model.io.files import read_text
from gpuprobe.model.record import record
from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.text import visible
from gpuprobe.model.values import AtMost, Bounds, Count, Unavailable
from gpuprobe.step_time import traffic
from gpuprobe.step_time.price import Factors, Price, Priced, PriceSource

ENVIRONMENT: Final = "GPUPROBE_STEP_TIMES"
SCHEMA_VERSION: Final = 1
"""1: first. A file of another version is refused."""
_SAME: Final = math.log(1.04)
"""Tables of the same GPU and shape from different days and machines differ by 2 to 4%
(aiconfigurator-core 0.12.0, several frameworks)."""
_FEWEST: Final = 3
"""Residuals that make a range; with fewer the built-in one stays."""

_Seconds = Annotated[float, Bounds(1e-9, 1e4)]


@record(frozen=True, slots=True)
class MeasuredCall:
    """The median time on the GPU of a call that launches so many kernels."""

    work: Work
    seconds: _Seconds
    kernels: Count = 1


@closed
@record(frozen=True)
class Calibration:
    """A file of measured calls. ``gpu``: the catalogue's name; ``date``: when they were measured.
    ``host_call``: the host's seconds for one operator in eager mode: low, expected, high.
    """

    schema_version: Count
    gpu: str
    title: str
    date: str
    torch: str
    calls: Annotated[tuple[MeasuredCall, ...], AtMost(10_000)]
    host_call: Annotated[tuple[_Seconds, ...], AtMost(3)] = ()

    @property
    def provenance(self) -> str:
        return f"measured on this card on {self.date}: {self.title}, torch {self.torch}"

    @property
    def host(self) -> Price | None:
        """The host's time for one operator, if it was measured."""
        if not self.host_call:
            return None
        low, expected, high = self.host_call
        return Price(low, expected, high, PriceSource.MEASURED)


def own_calibration() -> Calibration | None:
    """The file that `ENVIRONMENT` names; None where it names none. Raises ConfigError, in one line
    with the file's name, for a file that is not one.
    """
    path = os.environ.get(ENVIRONMENT, "")
    return read(path) if path else None


def read(path: str | os.PathLike[str]) -> Calibration:
    """The calibration in a file. Raises ConfigError as `own_calibration`."""
    where = visible(os.fspath(path))
    hint = f"measure again: benchmarks/gpu/calibrate.py; or unset {ENVIRONMENT}"
    try:
        document = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        reason = visible(getattr(error, "strerror", None) or str(error))
        message = f"the measured step times in {where} cannot be read: {reason}"
        raise ConfigError(message, hint=hint) from error
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        message = f'{where}: expected an object with "schema_version": {SCHEMA_VERSION}'
        raise ConfigError(message, hint=hint)
    calibration = from_plain(Calibration, document, where, ConfigError, hint)
    host = calibration.host_call
    if host and (len(host) != 3 or sorted(host) != list(host)):
        raise ConfigError(f"{where}.host_call: expected low, expected and high", hint=hint)
    try:
        list(_grids(calibration, lambda work, kernels: 1.0))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", hint=hint) from error
    return calibration


def signature() -> str:
    """What distinguishes the measured calls in use from others; "" without any. Raises ConfigError
    as `own_calibration`.
    """
    path = os.environ.get(ENVIRONMENT, "")
    if not path:
        return ""
    read(path)
    return hashlib.sha256(read_text(path).encode()).hexdigest()[:8]


_Class = tuple[str, ...]
_BuiltIn = Callable[[Work, int], float]
"""The built-in price of a call and its kernels: seconds, 0 if there is none."""


def _place(work: Work) -> tuple[_Class, tuple[int, ...]] | None:
    """The class of a call, and where it is in the class's grid; None if calls of its kind are not
    measured. float16 is as fast as bfloat16.
    """
    kind, dtype = work.kind, "half" if work.dtype in ("float16", "bfloat16") else work.dtype
    moved = (work.read + work.written,)
    if kind is WorkKind.MATMUL and len(work.sizes) == 4:
        batch, *sizes = work.sizes
        if batch == 1:
            return (kind.value, dtype, work.variant), tuple(sizes)
        return (kind.value, dtype, "batched"), (batch * math.prod(sizes),)
    if kind in (WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD) and len(work.sizes) == 7:
        return (kind.value, dtype, work.variant, str(work.sizes[5])), (work.sizes[4],)
    if kind is WorkKind.ELEMENTS:
        return (kind.value, dtype, traffic.family(work)), moved
    if kind is WorkKind.INDEXED:
        return (kind.value, work.operator), moved
    if kind is WorkKind.COPY:
        return (kind.value, work.variant.removesuffix(" sync")), (max(work.read, work.written),)
    if kind is WorkKind.COLLECTIVE and work.sizes:
        return (kind.value, work.variant, *map(str, work.sizes[:2])), (work.read,)
    return None


@dataclass(frozen=True, slots=True)
class _Grid:
    """``logarithms``: of measured time over built-in price, by the point's index in each axis.
    ``factors``: within which 8 of 10 calls are, where enough were measured.
    """

    axes: tuple[tuple[int, ...], ...]
    logarithms: dict[tuple[int, ...], float]
    factors: Factors | None

    def at(self, sizes: Sequence[int]) -> float:
        """Measured time over built-in price."""
        weighted: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for axis, size in zip(self.axes, sizes, strict=True):
            low, share = _between(axis, size)
            weighted = [
                ((*index, low + step), weight * part)
                for index, weight in weighted
                for step, part in ((0, 1 - share), (1, share))
                if part
            ]
        return math.exp(sum(weight * self.logarithms[index] for index, weight in weighted))


def _between(axis: Sequence[int], size: int) -> tuple[int, float]:
    """The point of an axis before a size, and how far the size is on the way to the next one."""
    size = min(max(size, axis[0]), axis[-1])
    low = min(bisect_right(axis, size) - 1, max(len(axis) - 2, 0))
    if axis[low] == size:
        return low, 0.0
    return low, math.log(size / axis[low]) / math.log(axis[low + 1] / axis[low])


def _grids(calibration: Calibration, built_in: _BuiltIn) -> Iterator[tuple[_Class, _Grid]]:
    """Raises ValueError if the calls of a class are no grid."""
    classes: dict[_Class, dict[tuple[int, ...], list[float]]] = {}
    for call in calibration.calls:
        place = _place(call.work)
        if place is None or not all(place[1]):
            raise ValueError(f"{call.work.operator}: calls of its kind and size are not measured")
        known = built_in(call.work, call.kernels)
        if known:
            points = classes.setdefault(place[0], {})
            points.setdefault(place[1], []).append(math.log(call.seconds / known))
    for key, points in classes.items():
        axes = tuple(tuple(sorted(set(sizes))) for sizes in zip(*points, strict=True))
        if len(points) != math.prod(map(len, axes)):
            raise ValueError(f"the sizes of {', '.join(filter(None, key))} are no whole grid")
        indices = list(product(*(range(len(axis)) for axis in axes)))
        at = [points[tuple(a[i] for a, i in zip(axes, index, strict=True))] for index in indices]
        means = {index: sum(each) / len(each) for index, each in zip(indices, at, strict=True)}
        residuals = [
            one - means[index]
            for index, each in zip(indices, at, strict=True)
            if len(each) > 1
            for one in each
        ]
        residuals += _left_out(axes, means)
        yield key, _Grid(axes, means, _factors(residuals))


def _left_out(
    axes: Sequence[Sequence[int]], means: dict[tuple[int, ...], float]
) -> Iterator[float]:
    """How far each point is from what its two neighbours on an axis would have for it."""
    for number, axis in enumerate(axes):
        for index, value in means.items():
            at = index[number]
            if 0 < at < len(axis) - 1:
                before, after = (
                    means[(*index[:number], at + step, *index[number + 1 :])] for step in (-1, 1)
                )
                share = math.log(axis[at] / axis[at - 1]) / math.log(axis[at + 1] / axis[at - 1])
                yield value - (before + share * (after - before))


def _factors(residuals: Sequence[float]) -> Factors | None:
    """Within which 8 of 10 residuals are, and what two days differ by."""
    if len(residuals) < _FEWEST:
        return None
    sizes = sorted(map(abs, residuals))
    most = math.hypot(sizes[math.ceil(0.8 * len(sizes)) - 1], _SAME)
    return Factors(math.exp(-most), math.exp(most))


class Corrections:
    """What measured calls make of built-in prices."""

    def __init__(self, calibration: Calibration, built_in: _BuiltIn) -> None:
        self._grids = dict(_grids(calibration, built_in))
        self._provenance = calibration.provenance

    def of(self, work: Work, priced: Priced | Unavailable) -> Priced | Unavailable:
        """The price of a call, given the built-in one, which stays if its class has no calls."""
        place = None if isinstance(priced, Unavailable) else _place(work)
        grid = None if place is None else self._grids.get(place[0])
        if isinstance(priced, Unavailable) or place is None or grid is None:
            return priced
        price, times = priced.price, grid.at(place[1])
        factors = grid.factors or Factors(price.low / price.expected, price.high / price.expected)
        corrected = factors.price(price.expected * times, PriceSource.MEASURED)
        return Priced(corrected, self._provenance)
