"""What NCCL takes on the GPU: a range from the sizes of its buffers, and a line of the estimate."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

import gpuprobe
from gpuprobe.reporters.json.plans import ESTIMATE
from gpuprobe.reporters.sections.parts import Table
from gpuprobe.reporters.sections.plans import estimate_sections
from gpuprobe.torch_support.nccl import Communicator, buffers

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 2**20
CONNECTION = 14 * MIB


def used(ranks: int, *ops: tuple[str, int | None]) -> Communicator:
    found = Communicator(ranks)
    for op, peer in ops:
        found.used(op, peer)
    return found


def test_the_range_includes_what_was_measured() -> None:
    """Bytes of NCCL alone, by how 8 H100 and 4 A100 were used: github.com/NVIDIA/nccl/issues
    1685 and 964.
    """
    exchange = used(8, ("all_to_all", None))
    assert exchange.connections == 7
    low, high = buffers([exchange], {})
    assert high == 7 * 32 * CONNECTION == pytest.approx(3.28e9, rel=0.005)  # 4.34 GB - 1.06 GB
    for ranks, measured in ((2, 544 * MIB), (4, 688 * MIB)):
        low, high = buffers([used(ranks, ("all_reduce", None))], {})
        assert low <= measured <= high


def test_connections() -> None:
    assert used(1, ("all_reduce", None)).connections == 0
    assert used(64, ("all_gather", None), ("reduce_scatter", None)).connections == 4
    assert used(64, ("send", 1), ("recv", 1), ("send", 3)).connections == 2
    assert used(64, ("all_to_all", None), ("all_reduce", None)).connections == 4 + 7


def test_the_environment_of_nccl() -> None:
    one = [used(8, ("all_reduce", None))]
    assert buffers(one, {"NCCL_MAX_NCHANNELS": "4"})[1] == 4 * 4 * CONNECTION
    assert buffers(one, {"NCCL_BUFFSIZE": str(16 * MIB)})[1] == 4 * 32 * 26 * MIB
    assert buffers(one, {"NCCL_MAX_NCHANNELS": "many"}) == buffers(one, {})


def program() -> None:
    """One communicator of NCCL's that is used, one that is not, and one of gloo's."""
    dist.init_process_group("nccl")
    dist.new_group([0, 1])
    host = dist.new_group(backend="gloo")
    tensor = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    dist.all_reduce(torch.ones(4), group=host)


@pytest.mark.simulated
def test_it_is_a_line_of_the_estimate() -> None:
    found = gpuprobe.estimate(program, "t4", ranks=4, steps=1)
    assert (found.nccl_low, found.nccl_high) == (0, 4 * 32 * CONNECTION)
    assert found.total_high == found.reserved_high + found.context_high + found.nccl_high
    assert found.total_low == found.reserved_low + found.context_low
    assert found.reserved_low <= 0.98 * found.peak_reserved
    assert found.reserved_high >= 1.02 * found.peak_reserved - 1
    assert any("reserved memory is within 2%" in text for text in found.assumed)
    table = estimate_sections(found)[0].parts[0]
    assert isinstance(table, Table)
    assert table.rows[-1].cells[:2] == ("NCCL's buffers", "0 B to 1.8 GiB")
    assert ESTIMATE.read(json.loads(json.dumps(ESTIMATE.plain(found)))) == found


def full() -> None:
    device = torch.cuda.get_device_properties(0)
    torch.empty(device.total_memory - 2**31, dtype=torch.uint8, device="cuda")


@pytest.mark.simulated
@pytest.mark.parametrize(("ranks", "verdict"), [(4, "within the margin"), (1, "fits")])
def test_what_fits_alone_is_within_the_margin_with_nccl(ranks: int, verdict: str) -> None:
    def step() -> None:
        if ranks > 1:
            program()
        full()

    assert gpuprobe.estimate(step, "t4", ranks=ranks, steps=1).verdict == verdict
