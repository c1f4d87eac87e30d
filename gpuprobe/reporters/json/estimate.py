"""An estimate as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.place import parse_place
from gpuprobe.model.plans.estimate import DeviceEstimate, Estimate, EstimateShare, RankEstimate
from gpuprobe.model.plans.links import LinkTime
from gpuprobe.model.run.communication import Transfer
from gpuprobe.model.values import Bytes
from gpuprobe.reporters.json import fields_of

SCHEMA: Final = "gpuprobe.estimate"
VERSION: Final = (2, 7)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 2.0: with all documents; nothing changed in this one. ``schemas/estimate-2.json``.
* 2.1: ``compute`` and ``compute_why``.
* 2.2: ``compiled``.
* 2.3: ``communication``, ``rank`` and ``by_rank``.
* 2.4: ``alike`` of each rank; ``nccl``, which ``total`` includes; ``link``, ``per_node`` and
  ``communication_time``; ``verdict_why``, and a verdict for runs that have to release cached
  memory; ``by_device``.
* 2.5: ``torch``; ``allocated``, a range.
* 2.6: ``simulated_torch``; ``processes``, which ``total`` includes.
* 2.7: ``engine``.
"""


_OF_LINK: Final = "op axis ranks nodes count overlaps low_ns high_ns"
_OF_DEVICE: Final = "device gpu verdict peak_allocated peak_reserved total_low total_high capacity"
_OF_RANK: Final = "rank verdict peak_allocated peak_reserved total_low total_high alike"


def document(estimate: Estimate) -> dict[str, Any]:
    """The estimate as plain data. Sizes are bytes."""
    return {
        **header(SCHEMA, VERSION),
        **fields_of(estimate, "gpu devices ranks rank steps settings compute compute_why"),
        **fields_of(estimate, "engine torch simulated_torch"),
        **fields_of(estimate, "verdict verdict_why fits capacity peak_allocated peak_reserved"),
        "allocated": {"at_least": estimate.allocated_low, "at_most": estimate.allocated_high},
        "reserved": {"at_least": estimate.reserved_low, "at_most": estimate.reserved_high},
        "context": {"at_least": estimate.context_low, "at_most": estimate.context_high},
        "nccl": {"at_least": estimate.nccl_low, "at_most": estimate.nccl_high},
        "processes": {
            "count": estimate.processes,
            "at_least": estimate.processes_low,
            "at_most": estimate.processes_high,
        },
        "total": {"at_least": estimate.total_low, "at_most": estimate.total_high},
        "attributed": estimate.attributed,
        "by_category": _rows(estimate.by_category),
        "by_module": _rows(estimate.by_module),
        "by_line": _rows(estimate.by_line),
        "assumed": list(estimate.assumed),
        "not_modelled": list(estimate.not_modelled),
        "compiled": list(estimate.compiled),
        "communication": [
            {
                **fields_of(row, "op axis ranks dtype count payload wire module"),
                "place": str(row.place),
            }
            for row in estimate.communication
        ],
        "link": estimate.link,
        "per_node": estimate.per_node,
        "communication_time": [fields_of(row, _OF_LINK) for row in estimate.communication_time],
        "by_device": [
            {**fields_of(row, _OF_DEVICE), "by_category": _rows(row.by_category)}
            for row in estimate.by_device
        ],
        "by_rank": [fields_of(row, _OF_RANK) for row in estimate.by_rank],
    }


def estimate_of(document: Mapping[str, Any]) -> Estimate:
    """The estimate that a document of this version was made of."""
    reserved, context = document["reserved"], document["context"]
    return Estimate(
        gpu=document["gpu"],
        devices=document["devices"],
        steps=document["steps"],
        peak_allocated=Bytes(document["peak_allocated"]),
        allocated_low=Bytes(document["allocated"]["at_least"]),
        allocated_high=Bytes(document["allocated"]["at_most"]),
        peak_reserved=Bytes(document["peak_reserved"]),
        reserved_low=Bytes(reserved["at_least"]),
        reserved_high=Bytes(reserved["at_most"]),
        context_low=Bytes(context["at_least"]),
        context_high=Bytes(context["at_most"]),
        nccl_low=Bytes(document["nccl"]["at_least"]),
        nccl_high=Bytes(document["nccl"]["at_most"]),
        processes=document["processes"]["count"],
        processes_low=Bytes(document["processes"]["at_least"]),
        processes_high=Bytes(document["processes"]["at_most"]),
        capacity=Bytes(document["capacity"]),
        verdict=document["verdict"],
        verdict_why=document["verdict_why"],
        attributed=Bytes(document["attributed"]),
        by_category=_shares(document["by_category"]),
        by_module=_shares(document["by_module"]),
        by_line=_shares(document["by_line"]),
        assumed=tuple(document["assumed"]),
        not_modelled=tuple(document["not_modelled"]),
        settings=document["settings"],
        ranks=document["ranks"],
        compute=document["compute"],
        compute_why=document["compute_why"],
        torch=document["torch"],
        simulated_torch=document["simulated_torch"],
        engine=document["engine"],
        compiled=tuple(document["compiled"]),
        communication=tuple(
            Transfer(
                row["op"],
                row["axis"],
                row["ranks"],
                row["dtype"],
                row["count"],
                Bytes(row["payload"]),
                Bytes(row["wire"]),
                parse_place(row["place"]),
                row["module"],
            )
            for row in document["communication"]
        ),
        rank=document["rank"],
        link=document["link"],
        per_node=document["per_node"],
        communication_time=tuple(
            LinkTime(*(row[name] for name in _OF_LINK.split()))
            for row in document["communication_time"]
        ),
        by_device=tuple(
            DeviceEstimate(
                **{name: row[name] for name in _OF_DEVICE.split()},
                by_category=_shares(row["by_category"]),
            )
            for row in document["by_device"]
        ),
        by_rank=tuple(
            RankEstimate(*(row[name] for name in _OF_RANK.split())) for row in document["by_rank"]
        ),
    )


def _shares(rows: Sequence[Mapping[str, Any]]) -> tuple[EstimateShare, ...]:
    return tuple(EstimateShare(row["name"], Bytes(row["bytes"])) for row in rows)


def _rows(shares: Sequence[EstimateShare]) -> list[dict[str, Any]]:
    return [{"name": share.name, "bytes": share.bytes} for share in shares]


def write(estimate: Estimate, stream: TextIO) -> None:
    """Write one JSON document, ASCII only."""
    write_document(document(estimate), stream)
