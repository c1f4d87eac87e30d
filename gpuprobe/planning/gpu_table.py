"""Estimates of one run on several GPUs: which hold it, how fast it is there, and at what cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuprobe.catalogue.gpus import alternatives
from gpuprobe.model.plans.estimate import priced
from gpuprobe.model.plans.gpu_table import GpuRow, GpuTable
from gpuprobe.model.plans.request import EstimateRequest, PriceList
from gpuprobe.model.plans.step_time import speed_fields
from gpuprobe.model.values import Unavailable
from gpuprobe.planning.program import ProgramStart
from gpuprobe.planning.trials import EstimateServer
from gpuprobe.reporters.json.plans import ESTIMATE


def estimate_table(request: EstimateRequest, notify: Callable[[str], None]) -> GpuTable:
    """The requested estimates on each of the request's ``gpus``, one after the other.

    Raises ConfigError for an unknown GPU, UsageError for a price of a GPU that is not among them.
    """
    names = list(dict.fromkeys(alternatives(request.gpus)))
    request.prices.check(names)
    # The prices of the other GPUs are no part of an estimate.
    one = replace(request, gpus="", suggest=False, prices=PriceList())
    rows = []
    with EstimateServer(ProgramStart()) as estimate:
        for name in names:
            notify(f"estimating on {name}")
            price = replace(request, gpu=name).price
            rows.append(_row(name, estimate(replace(one, gpu=name)), price, request.prices.date))
    return GpuTable(_sorted(rows))


def _row(name: str, document: Mapping[str, Any], price: float, date: str) -> GpuRow:
    if "error" in document:
        hint = document.get("hint", "")
        return GpuRow(name, failed=f"{document['error']}{hint and f' ({hint})'}")
    estimate = ESTIMATE.read(dict(document))
    time = estimate.step_time
    row = GpuRow(
        name,
        verdict=estimate.verdict,
        total_low=estimate.total_low,
        total_high=estimate.total_high,
        capacity=estimate.capacity,
        no_kernels=estimate.no_kernels,
    )
    if isinstance(time, Unavailable):
        return replace(row, no_time=time.reason)
    cost = priced(estimate, price, date).cost if price else None
    return replace(row, cost=cost, **speed_fields(time))


def _sorted(rows: Sequence[GpuRow]) -> tuple[GpuRow, ...]:
    """Those that fit first; then the cheapest if all of these have a price, else the fastest."""
    by_cost = all(row.cost is not None for row in rows if row.fits and row.expected_ns)

    def key(row: GpuRow) -> tuple[bool, bool, bool, float]:
        amount = row.cost.step_high if by_cost and row.cost is not None else row.expected_ns
        return bool(row.failed), not row.fits, not row.expected_ns, amount

    return tuple(sorted(rows, key=key))
