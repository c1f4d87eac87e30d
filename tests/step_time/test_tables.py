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
from gpuprobe.model.values import Bytes, Nanoseconds
from gpuprobe.reporters.sections.step_time import gpu_table_sections, step_time_sections
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


def test_gpus_are_one_table_with_what_does_not_fit() -> None:
    rows = (
        row("rtx4070ti-super", FITS, 305.2, 366.1, 499.9),
        row("v100-pcie-16gb", WITHIN_MARGIN, 9, 10, 12.5),
        GpuRow("rtx4060-laptop", FITS, 1, 2, Bytes(3), no_time="no speeds are known"),
        row("t4", NOT, 10, 20, 30),
        GpuRow("l4", failed="it has no kernels"),
    )
    text = printed([*gpu_table_sections(GpuTable(rows))])
    assert max(map(len, text.splitlines())) <= 80
    assert [" ".join(line.split()) for line in text.splitlines()[1:7]] == [
        "GPU needs of step, with its range tokens/s cost",
        "rtx4070ti-super 8.0 GiB 15.0 GiB 366.1 ms (305.2 to 499.9) 2,731 7.22",
        "v100-pcie-16gb 8.0 GiB 15.0 GiB 10.0 ms (9.0 to 12.5) 100,000 7.22",
        "rtx4060-laptop 2 B 3 B not predicted - -",
        "t4 8.0 GiB 15.0 GiB does not fit - -",
        "l4 - - no estimate - -",
    ]
    flat = " ".join(text.split())
    assert "at the slow end of the range (price list of 2026-11-30)" in flat
    assert f"- v100-pcie-16gb: {WITHIN_MARGIN} - rtx4060-laptop: no speeds are known" in flat
    assert "- l4: it has no kernels" in flat


# -- price lists


def listed(tmp_path: Path, text: str) -> PriceList:
    path = tmp_path / "prices.json"
    path.write_text(text)
    return prices(str(path))


def test_a_price_pricedhas_a_date_and_every_name_of_a_gpu(tmp_path: Path) -> None:
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
def test_a_wrong_price_pricedis_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=reason):
        listed(tmp_path, text)


def test_a_price_pricedthat_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="No such file"):
        prices(str(tmp_path / "prices.json"))
