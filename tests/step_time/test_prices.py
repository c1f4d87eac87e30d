"""Prices of kernels: ranges, refusals, and the errors that the documentation states."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.catalogue.file import all_models
from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time import matmul, traffic
from gpuprobe.step_time.price import Factors, Price, PriceSource
from gpuprobe.step_time.prices import Prices, prices
from gpuprobe.step_time.speeds import all_speeds

DOCS = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "step-time.md"
GPUS = sorted(all_speeds())
WITH_TABLES = [gpu for gpu in GPUS if all_speeds()[gpu].own]
sizes = st.integers(1, 1 << 16)
gpus = st.sampled_from(GPUS)
halves = st.sampled_from(["float16", "float32"])


def of(gpu: str, work: Work, kernels: int = 1) -> Price | Unavailable:
    one = prices(gpu)
    assert isinstance(one, Prices)
    return one.of(work, kernels)


def price(gpu: str, work: Work, kernels: int = 1) -> Price:
    result = of(gpu, work, kernels)
    assert isinstance(result, Price), result
    return result


def product(dtype: str, *shape: int, variant: str = "NT") -> Work:
    return Work("aten::mm", WorkKind.MATMUL, dtype, shape, variant)


def fused(variant: str, *shape: int, dtype: str = "float16", backward: bool = False) -> Work:
    kind = WorkKind.ATTENTION_BACKWARD if backward else WorkKind.ATTENTION
    return Work("attention", kind, dtype, shape, variant)


def moved(kind: WorkKind, size: int, variant: str = "", operator: str = "aten::add") -> Work:
    return Work(operator, kind, "float32", (), variant, 0, size, size)


def test_all_gpus_are_named_as_in_the_catalogue() -> None:
    known = {model.name for model in all_models()}
    assert set(GPUS) <= known
    assert known - set(GPUS) == {"rtx4060-laptop"}  # its power, and so its speed, differ by maker


def test_a_gpu_has_the_processors_of_the_catalogue() -> None:
    for model in all_models():
        speeds = all_speeds().get(model.name)
        if speeds is not None:
            assert speeds.processors == model.multi_processor_count, model.name


def test_an_unknown_gpu_has_no_prices() -> None:
    result = prices("rtx1")
    assert isinstance(result, Unavailable)
    assert result.reason == "no speeds are known of rtx1"


@given(gpus, halves, st.integers(1, 64), sizes, sizes, sizes, st.sampled_from(["NT", "NN", "TN"]))
def test_products_cost_at_least_their_multiplications(
    gpu: str, dtype: str, batch: int, m: int, n: int, k: int, variant: str
) -> None:
    result = of(gpu, product(dtype, batch, m, n, k, variant=variant))
    if isinstance(result, Unavailable):
        assert dtype == "float16"
        return
    assert 0 < result.low <= result.expected <= result.high
    peak = all_speeds()[gpu].peak[dtype]
    assert result.expected >= 2 * batch * m * n * k / peak


@given(
    gpus, st.sampled_from(list(traffic._REACH)), st.integers(0, 1 << 36), st.integers(0, 1 << 34)
)
def test_more_bytes_cost_no_less(gpu: str, kind: WorkKind, size: int, more: int) -> None:
    less, larger = price(gpu, moved(kind, size)), price(gpu, moved(kind, size + more))
    assert less.low <= larger.low + 1e-12
    assert less.expected <= larger.expected + 1e-12
    assert less.high <= larger.high + 1e-12


@given(
    gpus, st.integers(0, 1 << 36), st.integers(0, 1 << 34), st.sampled_from(["h2d", "d2h", "d2d"])
)
def test_longer_copies_cost_no_less(gpu: str, size: int, more: int, variant: str) -> None:
    less = price(gpu, moved(WorkKind.COPY, size, variant))
    larger = price(gpu, moved(WorkKind.COPY, size + more, variant))
    assert less.expected <= larger.expected + 1e-12


@given(gpus, st.integers(1, 200))
def test_each_kernel_costs_its_start(gpu: str, kernels: int) -> None:
    for kind in (WorkKind.ELEMENTS, WorkKind.INDEXED, WorkKind.COMPILED):
        assert price(gpu, moved(kind, 64), kernels).low >= kernels * 1e-6
    one, more = product("float32", 1, 64, 64, 64), 5
    assert price(gpu, one, more).expected > price(gpu, one, 1).expected


@pytest.mark.parametrize("gpu", ["v100-16gb", "t4", "rtx2080ti"])
def test_bfloat16_is_refused_without_tensor_cores_for_it(gpu: str) -> None:
    result = of(gpu, product("bfloat16", 1, 4096, 4096, 4096))
    assert isinstance(result, Unavailable)
    assert "no tensor cores for bfloat16" in result.reason
    price(gpu, moved(WorkKind.ELEMENTS, 1 << 20))  # reading it is as on any other GPU


@pytest.mark.parametrize(
    "work",
    [
        product("float4_e2m1fn_x2", 1, 4096, 4096, 4096),
        product("int8", 1, 4096, 4096, 4096),
        product("", 1, 4096, 4096, 4096),
        product("bfloat16", 4096, 4096, 4096),
        product("bfloat16", 1, 0, 4096, 4096),
        fused("flash", 1, 8, 8, 4096, 4096, 128, 128, dtype="float8_e4m3fn"),
        fused("math", 1, 8, 8, 4096, 4096, 128, 128),
        fused("flash", 1, 8),
        Work("conv", WorkKind.CONVOLUTION, "float16", (1, 2)),
        moved(WorkKind.COPY, 1 << 20, "sideways"),
        Work("nccl", WorkKind.COLLECTIVE, "float16", (8, 1), "Gossip", 0, 1 << 20),
        Work("lib::solve", WorkKind.OTHER, "float32"),
    ],
    ids=lambda work: f"{work.kind.name} {work.dtype} {work.variant} {len(work.sizes)}",
)
def test_what_has_no_price_is_refused_with_its_reason(work: Work) -> None:
    result = of("h100-80gb", work)
    assert isinstance(result, Unavailable)
    assert len(result.reason) > 20


def test_fp8_is_refused_on_gpus_before_it() -> None:
    work = product("float8_e4m3fn", 1, 4096, 4096, 4096)
    assert isinstance(of("a100-80gb", work), Unavailable)
    assert (
        price("h100-80gb", work).expected
        < price("h100-80gb", product("bfloat16", *work.sizes)).expected
    )


def test_tf32_is_float32_on_gpus_before_it() -> None:
    shape = (1, 4096, 4096, 4096)
    assert price("v100-16gb", product("tf32", *shape)) == price(
        "v100-16gb", product("float32", *shape)
    )
    assert (
        price("a100-80gb", product("tf32", *shape)).high
        < price("a100-80gb", product("float32", *shape)).low
    )


def test_flash_attention_is_refused_on_gpus_that_it_does_not_run_on() -> None:
    shape = (4, 16, 16, 2048, 2048, 64, 64)
    assert isinstance(of("v100-16gb", fused("flash causal", *shape)), Unavailable)
    assert price("v100-16gb", fused("efficient causal", *shape)).source is PriceSource.GENERIC


def test_a_causal_mask_halves_attention_and_its_backward_pass_takes_longer() -> None:
    shape = (4, 16, 16, 8192, 8192, 128, 128)
    whole = price("h100-80gb", fused("flash", *shape)).expected
    causal = price("h100-80gb", fused("flash causal", *shape)).expected
    assert 0.48 < causal / whole < 0.65
    backward = price("h100-80gb", fused("flash causal", *shape, backward=True)).expected
    assert 2.2 < backward / causal < 3.5


@pytest.mark.parametrize(
    ("size", "backward", "causal", "published"),
    [
        (64, False, False, 324e12), (64, False, True, 299e12), (64, True, False, 291e12),
        (128, False, False, 370e12), (128, False, True, 335e12), (128, True, False, 322e12),
        (256, False, False, 326e12), (256, False, True, 298e12),
    ],
)  # fmt: skip
def test_attention_on_h100_is_as_published(
    size: int, backward: bool, causal: bool, published: float
) -> None:
    """FlashAttention-2 at 16k: figures 5 and 6 of arXiv 2407.08608, of short runs."""
    heads = 2048 // size
    work = fused("flash causal" if causal else "flash", 1, heads, heads, 16384, 16384, size, size,
                 backward=backward)  # fmt: skip
    flops = 4 * 16384**2 * size * heads * (2.5 if backward else 1) / (2 if causal else 1)
    result = price("h100-80gb", work)
    under_load = flops / published / 0.98
    assert result.low <= under_load <= result.high


def test_attention_with_a_window_costs_its_recorded_multiplications() -> None:
    shape = (1, 32, 8, 16384, 16384, 128, 128)
    whole = price("h100-80gb", fused("flash causal", *shape))
    flops = 4 * 32 * 16384 * 1024 * 128
    window = Work("attention", WorkKind.ATTENTION, "float16", shape, "flash causal", flops)
    assert price("h100-80gb", window).expected < whole.expected / 7


def test_convolutions_with_channels_last_are_not_converted() -> None:
    sizes = (64, 256, 256, 3136, 9, 1)
    flops, moved = 2 * 64 * 256 * 256 * 3136 * 9, 2 * 64 * 256 * 3136
    plain, last = (
        Work("conv", WorkKind.CONVOLUTION, "float16", sizes, variant, flops, moved, moved)
        for variant in ("", "channels last")
    )
    assert price("a100-80gb", last).expected < price("a100-80gb", plain).expected
    both = Work("conv", WorkKind.CONVOLUTION_BACKWARD, "float16", sizes, "", 2 * flops,
                2 * moved, 2 * moved)  # fmt: skip
    assert price("a100-80gb", both).expected > 1.9 * price("a100-80gb", plain).expected


@pytest.mark.parametrize("variant", ["h2d", "pageable d2h", "d2d"])
def test_a_copy_that_the_host_waits_for_takes_as_long(variant: str) -> None:
    copy = moved(WorkKind.COPY, 1 << 26, variant)
    assert price("t4", copy) == price("t4", moved(WorkKind.COPY, 1 << 26, f"{variant} sync"))


def test_collectives_of_several_nodes_need_a_network() -> None:
    work = Work("nccl", WorkKind.COLLECTIVE, "bfloat16", (16, 2), "AllReduce", 0, 1 << 28)
    result = of("h100-80gb", work)
    assert isinstance(result, Unavailable)
    assert "2 nodes" in result.reason
    known = prices("h100-80gb", network=45.0)
    assert isinstance(known, Prices)
    assert isinstance(known.of(work, 1), Price)


@pytest.mark.parametrize(
    ("gpu", "ranks", "name", "size", "microseconds"),
    [
        ("a100-80gb", 4, "AllGather", 32 << 20, 176),
        ("a100-80gb", 4, "ReduceScatter", 512 << 20, 1982),
        ("h100-80gb", 4, "AllReduce", 512 << 20, 2300),
        ("h100-80gb", 4, "AllGather", 2 << 20, 19),
        ("b200-180gb", 4, "ReduceScatter", 256 << 20, 381),
        ("b200-180gb", 4, "AllReduce", 512 << 20, 1271),
    ],
)
def test_collectives_of_a_node_are_as_in_tables_that_were_left_out(
    gpu: str, ranks: int, name: str, size: int, microseconds: float
) -> None:
    """nccl tables of aiconfigurator-core 0.12.0, 4 GPUs, 2 bytes an element."""
    result = price(gpu, Work("nccl", WorkKind.COLLECTIVE, "float16", (ranks, 1), name, 0, size))
    assert result.source is PriceSource.MEASURED
    assert result.low * 0.9 <= microseconds * 1e-6 <= result.high * 1.1


def test_collectives_take_longer_without_nvlink() -> None:
    work = Work("nccl", WorkKind.COLLECTIVE, "bfloat16", (8, 1), "AllGather", 0, 1 << 28)
    assert price("h100-pcie-80gb", work).expected > 5 * price("h100-80gb", work).expected


def test_rows_that_are_not_aligned_cost_more_than_longer_ones() -> None:
    sizes = (50257, 50258, 50260, 50304)  # 2, 4, 8 and 16 bytes divide a row
    for gpu in ("a100-80gb", "h100-80gb"):
        seconds = [price(gpu, product("float16", 1, 8192, n, 768)).expected for n in sizes]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[0] > 1.9 * seconds[-1]
        if gpu == "h100-80gb":  # its fast instructions need 16 aligned bytes
            assert seconds[0] > 2.9 * seconds[-1]


def test_of_steps_that_were_measured_products_are_more_certain() -> None:
    """V100 and A40 have no table, but published steps; T4 and A10 have neither."""
    for steps, none, dtype in (("v100-32gb", "t4", "float16"), ("a40", "a10", "bfloat16")):
        work = product(dtype, 1, 8192, 4096, 1024)
        fitted, generic = price(steps, work), price(none, work)
        assert (fitted.source, generic.source) == (PriceSource.MODEL, PriceSource.GENERIC)
        assert fitted.high / fitted.low < 0.9 * generic.high / generic.low


def test_a_board_may_be_faster_than_its_data_sheet() -> None:
    """RTX 5090: 2,667 ms for a step of GPT-2 small whose products alone take 1,900 at the peak."""
    work = product("bfloat16", 1, 32768, 8192, 8192)
    flops = 2 * 32768 * 8192 * 8192
    ideal = flops / all_speeds()["rtx5090"].peak["bfloat16"]
    assert price("rtx5090", work).expected < 0.97 * ideal
    ideal = flops / all_speeds()["a100-80gb"].peak["bfloat16"]
    assert price("a100-80gb", work).expected > ideal


def test_the_steps_that_set_a_share_are_named() -> None:
    for gpu in ("b200-180gb", "rtx-a6000", "v100-16gb"):
        one = prices(gpu)
        assert isinstance(one, Prices)
        one.of(product("float16", 1, 8192, 4096, 1024), 1)
        assert any("steps of" in line for line in one.provenance)


def test_provenance_has_a_line_for_each_source_used() -> None:
    one = prices("a100-80gb")
    assert isinstance(one, Prices)
    before = len(one.provenance)
    assert isinstance(one.of(product("bfloat16", 1, 512, 512, 512), 1), Price)
    assert isinstance(one.of(product("bfloat16", 1, 1024, 512, 512), 1), Price)
    assert len(one.provenance) == before + 1
    assert "aiconfigurator-core" in one.provenance[-1]
    assert isinstance(one.of(moved(WorkKind.ELEMENTS, 1 << 20), 1), Price)
    assert len(one.provenance) == before + 2


def test_what_a_source_is_called() -> None:
    work = product("bfloat16", 1, 4096, 4096, 4096)
    sources = {gpu: price(gpu, work).source for gpu in ("h100-80gb", "h100-pcie-80gb", "rtx4090")}
    assert list(sources.values()) == [PriceSource.MEASURED, PriceSource.MODEL, PriceSource.GENERIC]
    widths = [price(gpu, work).high / price(gpu, work).low for gpu in sources]
    assert widths == sorted(widths)


@pytest.mark.parametrize("gpu", WITH_TABLES)
def test_large_products_of_measured_gpus_have_narrow_ranges(gpu: str) -> None:
    """Of Blackwell, whose published measurements differ by a third, wider ones."""
    result = price(gpu, product("bfloat16", 1, 8192, 4096, 4096))
    assert result.source is PriceSource.MEASURED
    limit = 0.55 if all_speeds()[gpu].architecture == "blackwell" else 0.35
    assert (result.high - result.low) / result.expected < limit


def test_a_range_has_its_order() -> None:
    with pytest.raises(ValueError, match="no range"):
        Price(2.0, 1.0, 3.0, PriceSource.MODEL)
    both = Factors(0.8, 1.2).wider(Factors(1.0, 1.5))
    assert both.low == pytest.approx(0.8)
    assert 1.5 < both.high < 1.8


@given(sizes, sizes, sizes)
def test_the_shares_of_the_grids_corners_are_one(m: int, n: int, k: int) -> None:
    corners = matmul.corners(m, n, k)
    assert math.isclose(sum(share for _, share in corners), 1)
    assert len({index for index, _ in corners}) == 8
    last = len(matmul.ROWS) * len(matmul.COLUMNS) ** 2
    assert all(0 <= index < last and -1e-9 <= share <= 1 + 1e-9 for index, share in corners)


def test_a_corner_of_the_grid_is_itself() -> None:
    for m, n, k in ((1, 32, 32), (1024, 256, 65536), (32768, 65536, 16384)):
        place = matmul.ROWS.index(m) * 11 + matmul.COLUMNS.index(n)
        place = place * 11 + matmul.COLUMNS.index(k)
        share = dict(matmul.corners(m, n, k))[place]
        assert share == pytest.approx(1)


def stated() -> dict[tuple[str, str], tuple[float, float]]:
    """Hold-out errors in the shipped tables: GPU and dtype, median and 90th percentile."""
    document = json.loads(Path(matmul.__file__).with_name("matmul.json").read_text("utf-8"))
    return {
        (entry["gpu"], entry["dtype"]): (entry["held_median"], entry["held_p90"])
        for entry in document["tables"]
    }


def test_the_documentation_states_the_range_of_the_errors() -> None:
    medians, p90s = zip(*stated().values(), strict=True)
    found = re.search(
        r"median error ([\d.]+) to ([\d.]+)%, 90% within (\d+) to (\d+)%",
        " ".join(DOCS.read_text(encoding="utf-8").split()),
    )
    assert found is not None
    low, high, least, most = (float(number) / 100 for number in found.groups())
    assert (low, high) == pytest.approx((min(medians), max(medians)), abs=6e-4)
    assert (least, most) == pytest.approx((min(p90s), max(p90s)), abs=6e-3)


HELD = json.loads(Path(__file__).with_name("held_matmuls.json").read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(HELD))
def test_errors_of_shapes_that_were_left_out_are_as_stated(name: str) -> None:
    """60 measured shapes of each table, with (n, k) that no fit had. Without the factor of
    sustained load, which short measurements do not have.
    """
    gpu, dtype = name.split()
    speeds = all_speeds()[gpu]
    table = matmul.tables()[gpu, dtype]
    roof = matmul.Roof(speeds.peak[dtype], speeds.bandwidth, speeds.processors, table.wave)
    size = 2 if dtype == "bfloat16" else 1
    errors = sorted(
        abs(
            math.log(
                seconds / (matmul.roofline(roof, m, n, k, size, 2) * matmul.excess(table, m, n, k))
            )
        )
        for m, n, k, seconds in HELD[name]
    )
    median, p90 = stated()[gpu, dtype]
    assert len(errors) == 60
    assert math.expm1(statistics.median(errors)) <= 1.6 * median
    assert math.expm1(errors[54]) <= 1.6 * p90


def test_the_contract_of_a_price_source() -> None:
    assert [source.name for source in PriceSource] == ["MEASURED", "MODEL", "GENERIC"]
    assert get_args(Price | Unavailable) == (Price, Unavailable)


def softmax(row: int, dtype: str = "float32") -> Work:
    size = 1 << 32
    return Work("aten::_softmax", WorkKind.ELEMENTS, dtype, (row,), read=size, written=size)


def test_a_softmax_over_long_rows_reads_them_again() -> None:
    """Cross-entropy of torch on A100, 131,072 columns of 16,384 tokens: Liger-Kernel's table."""
    size = 16384 * 131072 * 4
    work = Work("aten::_log_softmax", WorkKind.ELEMENTS, "float32", (131072,), "", 0, size, size)
    result = price("a100-80gb", work)
    assert result.low <= 20.7e-3 <= result.high
    assert price("a100-80gb", softmax(1024)).expected < price("a100-80gb", softmax(1025)).expected


def test_a_softmax_gains_less_than_the_bandwidth_of_newer_gpus() -> None:
    h100, h200 = (price(gpu, softmax(384)).expected for gpu in ("h100-80gb", "h200-141gb"))
    assert 1.0 <= h100 / h200 < 4800 / 3350
    added = moved(WorkKind.ELEMENTS, 1 << 32)
    assert price("h100-80gb", added).expected / price("h200-141gb", added).expected > 1.4


def test_half_precision_takes_longer_and_is_less_certain_where_float32_was_measured() -> None:
    wide, half = price("a100-80gb", softmax(384)), price("a100-80gb", softmax(384, "float16"))
    start = traffic.KERNEL
    assert half.expected - start == pytest.approx(1.2 * (wide.expected - start))
    assert half.low / half.expected < wide.low / wide.expected
    assert half.high / half.expected > 1.02 * wide.high / wide.expected


def test_a_batch_beyond_the_l2_moves_its_bytes() -> None:
    """Attention by matrix products: 1,792 of (384, 64) @ (64, 384)."""
    work = Work("aten::bmm", WorkKind.MATMUL, "float16", (1792, 384, 384, 64), "NT")
    bytes_moved = 1792 * 2 * (2 * 384 * 64 + 384 * 384)
    assert price("h100-80gb", work).expected >= bytes_moved / (0.65 * 3350e9)
