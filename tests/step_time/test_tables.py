"""What people read of a step's time: the tables, the comparison of GPUs, and price lists."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprobe.cli.options import prices
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.estimate import FITS, NOT, WITHIN_MARGIN
from gpuprobe.model.plans.gpu_table import GpuRow, GpuTable
from gpuprobe.model.plans.request import PriceList
from gpuprobe.model.plans.step_time import MEMORY, BoundShare, StepTime, TimeShare, cost_of
from gpuprobe.model.values import Bytes, Nanoseconds, Unavailable
from gpuprobe.reporters.sections.step_time import (
    gpu_table_sections,
    short_step_time,
    step_time_sections,
)
from gpuprobe.reporters.text import draw

GIB = 2**30


def ms(number: float) -> Nanoseconds:
    return Nanoseconds(round(number * 1e6))


def shares(**named: float) -> tuple[TimeShare, ...]:
    return tuple(TimeShare(name, ms(time), 2) for name, time in named.items())


STEP = StepTime(
    "h100-80gb", 1, ms(8), ms(10), ms(13), ms(10), 0.5, (BoundShare(MEMORY, ms(10)),),
    by_kind=shares(elementwise=10),
    by_phase=shares(forward=10),
    by_module=(
        *(TimeShare(f"Net.h.{layer}.mlp", ms(1), 3) for layer in range(6)),
        TimeShare("Net.h.0.mlp.act", ms(0.5), 1),
        TimeShare("Net.head", ms(3.5), 1),
    ),
    by_line=shares(**{"train.py:3 in main": 10}),
    tokens=1000,
)  # fmt: skip


def printed(sections: list[object]) -> str:
    text = io.StringIO()
    draw.write(sections, text)  # type: ignore[arg-type]
    return text.getvalue()


def test_modules_of_equal_layers_are_one_row() -> None:
    _, _, table = printed([*step_time_sections(STEP, 2)]).partition("Time of a step by module\n")
    assert [line.split() for line in table.splitlines()[1:4]] == [
        ["6.0", "ms", "60%", "18", "Net.h.*.mlp", "x6"],
        ["3.5", "ms", "35%", "1", "Net.head"],
        ["500.0", "us", "5%", "1", "(1", "more)"],
    ]


def test_a_table_without_any_place_is_left_out() -> None:
    nowhere = replace(STEP, by_module=(TimeShare("(no module)", ms(10), 9),))
    text = printed([*step_time_sections(nowhere, 2)])
    assert "by line" in text
    assert "by module" not in text


def row(gpu: str, verdict: str, low: float, expected: float, high: float) -> GpuRow:
    return GpuRow(
        gpu, verdict, 7 * GIB, 8 * GIB, Bytes(15 * GIB), ms(low), ms(expected), ms(high), 1000,
        cost=cost_of(STEP, 2.0, 1, "2026-11-30"),
    )  # fmt: skip


def test_every_figure_of_a_gpu_has_a_range_and_a_source() -> None:
    text = " ".join(printed([*step_time_sections(STEP, 2, cost=cost_of(STEP, 0.5, 1))]).split())
    assert "Step time on h100-80gb: 10.0 ms (8.0 to 13.0 ms), predicted" in text
    assert "76,923 to 125,000 tokens a second" in text
    assert "at 0.5 an hour for a GPU: 0.0000011 to 0.0000018 a step, 1.11 to 1.81 a billion" in text
    assert (
        "prices are by measured kernels of this GPU for 50% of it, the rest by models (-v: s"
        in text
    )
    used = replace(STEP, used=0.2, measured=0.0, sources=("a data sheet",))
    full = " ".join(printed([*step_time_sections(used, 2, full=True)]).split())
    assert "15 to 25% of the GPU's peak (MFU)" in full
    assert "prices are by models, none by measured kernels of this GPU step" in full
    assert full.endswith("Prices - a data sheet")


def test_without_tokens_and_images_it_is_samples_or_the_reason() -> None:
    rows = replace(STEP, tokens=0, samples=512)
    text = printed([*step_time_sections(rows, 2, full=True, cost=cost_of(rows, 0.5, 2))])
    assert "39,385 to 64,000 samples a second" in text
    assert "the 512 rows of the model's first input" in text
    assert "a million samples" in text
    assert "samples" not in printed([*step_time_sections(replace(rows, images=8), 2)])
    unknown = replace(STEP, tokens=0, samples=Unavailable("the model gets no tensors"))
    text = printed([*step_time_sections(unknown, 2)])
    assert "samples a second are unknown: the model gets no tensors" in text
    table = GpuTable((replace(row("l4", FITS, 8, 10, 13), tokens=0, samples=512),))
    assert "samples/s" in printed([*gpu_table_sections(table)])


def test_the_speed_of_a_job_is_that_of_each_rank() -> None:
    text = printed([*short_step_time(replace(STEP, left_out=("loading of data: why",)), ranks=2)])
    assert "76,923 to 125,000 tokens a second on each rank" in text
    assert "not included: loading of data (-v: why)" in text
    network = "2 launches (collective): their network is not given (--network)"
    text = printed([*short_step_time(replace(STEP, left_out=("loading: why", network)))])
    included = "not included: loading; 2 launches (collective), without --network (-v: why)"
    assert included in " ".join(text.split())
    assert "on each rank" not in printed([*step_time_sections(STEP, 2)])
    tiny = printed([*step_time_sections(replace(STEP, measured=0.004), 2)])
    assert "none by measured kernels" in tiny
    assert "less than 1% of the GPU" in printed([*step_time_sections(replace(STEP, used=1e-4), 2)])


def test_who_issued_the_work_is_a_table_of_all_figures() -> None:
    threads = replace(STEP, by_thread=shares(**{"main thread": 7, "autograd's thread": 3}))
    assert "host thread" not in printed([*step_time_sections(threads, 2)])
    text = " ".join(printed([*step_time_sections(threads, 2, full=True)]).split())
    assert "7.0 ms 70% 2 main thread 3.0 ms 30% 2 autograd's thread" in text


def test_gpus_are_one_table_with_what_does_not_fit() -> None:
    rows = (
        replace(row("rtx4070ti-super", FITS, 305.2, 366.1, 499.9), measured=0.25),
        replace(row("v100-pcie-16gb", WITHIN_MARGIN, 9, 10, 12.5), no_kernels="no kernels"),
        GpuRow("rtx4060-laptop", FITS, 1, GIB, Bytes(3 * GIB), no_time="no speeds are known"),
        row("t4", NOT, 10, 20, 30),
        GpuRow("l4", failed="it has no kernels"),
    )
    text = printed([*gpu_table_sections(GpuTable(rows))])
    assert max(map(len, text.splitlines())) <= 80
    assert [" ".join(line.split()) for line in text.splitlines()[1:7]] == [
        "GPU needs, GiB step, with its range tokens/s cost",
        "rtx4070ti-super 8.0 of 15.0 366 ms (305 to 500) 2.0k to 3.3k 4.44 to 7.22",
        "v100-pcie-16gb 8.0 of 15.0 10.0 ms (9.0 to 12.5) 80k to 111k 4.44 to 7.22",
        "rtx4060-laptop 1.0 of 3.0 not predicted - -",
        "t4 8.0 of 15.0 does not fit - -",
        "l4 - no estimate - -",
    ]
    flat = " ".join(text.split())
    assert "or for a step without any (price list of 2026-11-30)" in flat
    assert "by measured kernels of the GPU for 25% of its time: rtx4070ti-super; by mod" in flat
    assert f"- v100-pcie-16gb: no kernels - v100-pcie-16gb: {WITHIN_MARGIN} - rtx" in flat
    assert "- rtx4060-laptop: no speeds are known" in flat
    assert "- l4: it has no kernels" in flat


# -- price lists


def listed(tmp_path: Path, text: str) -> PriceList:
    path = tmp_path / "prices.json"
    path.write_text(text)
    return prices(str(path))


def test_a_price_list_has_a_date_and_every_name_of_a_gpu(tmp_path: Path) -> None:
    document = {"date": "2026-11-30", "prices": {"H100": 2.5, "l4": 0.7}}
    priced = listed(tmp_path, json.dumps(document))
    assert priced.date == "2026-11-30"
    assert priced.of("h100-80gb") == priced.of("h100") == priced.of("2xh100-sxm5") == 2.5
    assert priced.of("t4") == 0
    priced.check(["t4", "l4"])
    with pytest.raises(UsageError, match="the price list of 2026-11-30 has no price of t4"):
        priced.check(["t4"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"prices": {"l4": 1}}', "it has no 'date'"),
        ('{"date": "now", "prices": {"l4": 1}}', "isoformat"),
        ('{"date": "2026-11-30", "prices": {"l9": 1}}', "unknown GPU 'l9'"),
        ('{"date": "2026-11-30", "prices": {"l4": 0}}', "a number above 0"),
        ('{"date": "2026-11-30", "prices": 3}', "no attribute"),
        ("[]", "list indices"),
        ("{", "Expecting"),
    ],
)
def test_a_wrong_price_list_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=reason):
        listed(tmp_path, text)


def test_a_price_list_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="No such file"):
        prices(str(tmp_path / "prices.json"))
