"""What a pretended rank sends, against closed forms and torch's own count of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpuprobe
from gpuprobe.analysis.communication import communication_of, summed, transfers
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.run.communication import CollectiveRecord, Transfer, wire_bytes
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Bytes
from gpuprobe.planning.estimates import estimate_program
from gpuprobe.reporters.sections.parts import Table
from gpuprobe.reporters.sections.plans import estimate_sections

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, LAYERS, BATCH, RANKS = 64, 3, 8, 4
PARAMETERS = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


def estimated(prepare: Callable[[Any], nn.Module], counts: Counter[str] | None = None) -> Estimate:
    """``counts`` gets what torch's own mode counts in the last step."""

    def build() -> Callable[[], None]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.debug import CommDebugMode

        net = prepare(init_device_mesh("cuda", (RANKS,), mesh_dim_names=("axis",)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            mode = CommDebugMode()
            with mode:
                net(torch.randn(BATCH, WIDTH, device="cuda", requires_grad=True)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if counts is not None:
                counts.clear()
                for name, count in mode.get_comm_counts().items():
                    counts[str(name).rpartition(".")[2]] += count

        return step

    return gpuprobe.estimate(build, ranks=RANKS, steps=3)


def blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(LAYERS)]).cuda()


def sent(found: Estimate) -> dict[str, tuple[int, int, int]]:
    return {
        name.partition(",")[0].removesuffix(" axis"): (count, payload, wire)
        for name, count, payload, wire in summed(found.communication, "operation")
    }


@pytest.mark.simulated
def test_data_parallel_reduces_every_gradient_once() -> None:
    found = estimated(lambda mesh: nn.parallel.DistributedDataParallel(blocks()))
    (row,) = found.communication
    assert (row.op, row.dtype, row.ranks) == ("all_reduce", "float32", RANKS)
    assert row.payload == 4 * PARAMETERS
    assert row.wire == 4 * PARAMETERS * 2 * (RANKS - 1) // RANKS
    title = f"Communication in the last step: {human_bytes(row.wire)} sent by this rank"
    (section,) = [part for part in estimate_sections(found) if part.title == title]
    assert [part.caption for part in section.parts if isinstance(part, Table)] == [
        "communication by operation", "communication by line", "communication by module"
    ]  # fmt: skip


@pytest.mark.simulated
def test_sharded_data_parallel_gathers_twice_and_scatters_four_bytes_for_each_parameter() -> None:
    from torch.distributed.fsdp import fully_shard

    def prepare(mesh: Any) -> nn.Module:
        net = blocks()
        for block in net:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    counts: Counter[str] = Counter()
    found = estimated(prepare, counts)
    totals = sent(found)
    gathers, scatters = totals["all_gather"], totals["reduce_scatter"]
    assert gathers[1] == 2 * 4 * PARAMETERS
    assert scatters[1] == 4 * PARAMETERS
    assert gathers[2] == gathers[1] * (RANKS - 1) // RANKS
    assert counts == {"_allgather_base_": gathers[0], "_reduce_scatter_base_": scatters[0]}
    by_module = summed(found.communication, "module")
    assert [name for name, *_ in by_module] == ["0", "1", "2"]
    assert all(payload == 3 * 4 * PARAMETERS // LAYERS for _, _, payload, _ in by_module)


@pytest.mark.simulated
def test_tensor_parallel_reduces_twice_in_each_sublayer() -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def prepare(mesh: Any) -> nn.Module:
        net = blocks()
        for block in net:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return net

    counts: Counter[str] = Counter()
    found = estimated(prepare, counts)
    (total,) = sent(found).values()
    assert total[0] == 2 * LAYERS == sum(counts.values())
    assert total[1] == 2 * LAYERS * 4 * BATCH * WIDTH


def record(op: str, payload: int, **more: Any) -> CollectiveRecord:
    given = {"group": "0", "axis": "", "ranks": 4, "sequence": 1, "dtype": "float32", **more}
    wire = wire_bytes(op, payload, given["ranks"])
    return CollectiveRecord(op=op, payload=Bytes(payload), wire=wire, **given)


def test_every_table_sums_to_the_same() -> None:
    records = [record("all_reduce", 400, module="a"), record("all_gather", 800, axis="tp")]
    rows = transfers([*records, records[0]])
    assert [row.count for row in rows] == [2, 1]
    for by in ("operation", "line", "module"):
        table = summed(rows, by)
        assert sum(payload for _, _, payload, _ in table) == 1600
        assert sum(wire for *_, wire in table) == 2 * 600 + 600


@pytest.mark.parametrize(
    ("op", "wire"),
    [("all_reduce", 150), ("all_gather", 75), ("reduce_scatter", 75), ("broadcast", 100),
     ("send", 100), ("recv", 0), ("barrier", 0)],
)  # fmt: skip
def test_bytes_on_the_wire(op: str, wire: int) -> None:
    assert wire_bytes(op, 100, 4) == wire
    assert wire_bytes(op, 100, 1) == 0


@pytest.mark.simulated
@pytest.mark.parametrize("name", ["ddp_bf16_hook", "hsdp", "tp"])
def test_a_recording_has_what_the_estimate_has(name: str, tmp_path: Path) -> None:
    """Calls of torch.distributed, recorded, are those that the simulated rank counts."""
    script = Path(__file__).parents[1] / "support" / "rank_programs.py"
    kept = tmp_path / "kept.gpuprobe"
    request = EstimateRequest(
        str(script), (name, str(tmp_path)), gpu="t4", ranks=4, rank=1, output=str(kept)
    )
    found = estimate_program(request)
    (rank,) = gpuprobe.load(kept).ranks
    assert rank.session.rank == 1
    recorded = communication_of(rank)
    assert recorded is not None

    def amounts(rows: Iterable[Transfer]) -> list[tuple[Any, ...]]:
        sums = Counter[tuple[Any, ...]]()
        for row in rows:
            sums[row.op, row.axis, row.ranks, row.dtype, row.payload // row.count] += row.count
        return sorted(sums.items())

    assert amounts(recorded.rows) == amounts(found.communication)
    with pytest.raises(UsageError, match="exists already"):
        estimate_program(request)


@pytest.mark.simulated
def test_a_barrier_over_gloo_takes_nothing_of_the_gpu(tmp_path: Path) -> None:
    with gpuprobe.virtual_gpu("t4"):
        dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
        try:
            dist.barrier()
            assert torch.cuda.max_memory_allocated() == 0
        finally:
            dist.destroy_process_group()
