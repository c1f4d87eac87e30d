"""Measured kernels of the user's own card: their file, what prices make of them, and the script
that writes it, on a simulated GPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuprobe.analysis.baseline.measure import signature
from gpuprobe.errors import ConfigError
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time import calibration as own
from gpuprobe.step_time.calibration import Calibration, MeasuredCall
from gpuprobe.step_time.price import Price, PriceSource
from gpuprobe.step_time.prices import Prices, prices

ROOT = Path(__file__).resolve().parents[2]
GPU = "a100-40gb"
ROWS, COLUMNS, DEPTHS = (128, 1024, 8192), (512, 4096), (256, 1024, 4096, 16384)
factors = st.floats(0.3, 3.0)


def product_of(m: int, n: int, k: int) -> Work:
    return Work("aten::mm", WorkKind.MATMUL, "bfloat16", (1, m, n, k), "NT")


def of(calls: list[MeasuredCall], gpu: str = GPU) -> Calibration:
    host = (1e-6, 2e-6, 3e-6)
    return Calibration(1, gpu, "NVIDIA A100", "2026-11-30", "2.13.0", tuple(calls), host)


def built_in(work: Work, kernels: int = 1) -> float:
    price = prices(GPU)
    assert isinstance(price, Prices)
    known = price.of(work, kernels)
    return 0.0 if isinstance(known, Unavailable) else known.expected


def grid(times: list[float]) -> list[MeasuredCall]:
    shapes = product(ROWS, COLUMNS, DEPTHS)
    works = [product_of(*shape) for shape in shapes]
    return [
        MeasuredCall(work, built_in(work) * each) for work, each in zip(works, times, strict=True)
    ]


GRID = len(ROWS) * len(COLUMNS) * len(DEPTHS)
grids = st.lists(factors, min_size=GRID, max_size=GRID).map(grid)


def price(measured: Prices, work: Work) -> Price:
    known = measured.of(work, 1)
    assert isinstance(known, Price)
    return known


def with_calls(calls: list[MeasuredCall]) -> Prices:
    plain = prices(GPU)
    assert isinstance(plain, Prices)
    return Prices(plain._speeds, 0.0, of(calls))


@given(grids)
def test_a_file_is_read_as_it_was_written_and_its_points_are_priced_as_measured(
    tmp_path_factory: pytest.TempPathFactory, calls: list[MeasuredCall]
) -> None:
    path = tmp_path_factory.mktemp("own") / "card.json"
    path.write_text(json.dumps(to_plain(of(calls))))
    assert own.read(path) == of(calls)
    measured = with_calls(calls)
    for call in calls:
        known = price(measured, call.work)
        assert known.expected == pytest.approx(call.seconds)
        assert known.source is PriceSource.MEASURED
    assert measured.provenance[0] == (
        "measured on this card on 2026-11-30: NVIDIA A100, torch 2.13.0"
    )
    assert measured.host_call.expected == 2e-6


@given(grids, st.integers(0, 2), st.lists(st.floats(1.0, 64.0), min_size=2, max_size=2))
def test_between_two_points_the_correction_is_monotone_and_outside_it_stays(
    calls: list[MeasuredCall], axis: int, steps: list[float]
) -> None:
    (correction,) = dict(own._grids(of(calls), built_in)).values()
    points = correction.axes[axis]
    others = [one[0] for one in correction.axes]

    def at(size: float) -> float:
        return correction.at([round(size) if i == axis else s for i, s in enumerate(others)])

    low, high = points[0], points[1]
    inside = sorted(min(low * step, high) for step in steps)
    values = [at(low), at(inside[0]), at(inside[1]), at(high)]
    assert values in (sorted(values), sorted(values, reverse=True)) or math.isclose(
        min(values), max(values), rel_tol=1e-9
    )
    assert at(points[-1] * 5) == pytest.approx(at(points[-1]))
    assert at(max(1, points[0] // 5)) == pytest.approx(at(points[0]))


def test_what_was_not_measured_keeps_its_price() -> None:
    measured = with_calls(grid([2.0] * GRID))
    for work in (
        replace(product_of(512, 512, 512), variant="NN"),
        replace(product_of(512, 512, 512), dtype="float32"),
        Work("aten::add", WorkKind.ELEMENTS, "float32", (), "", 0, 1 << 26, 1 << 26),
    ):
        assert price(measured, work).expected == built_in(work)
    float16 = replace(product_of(512, 512, 512), dtype="float16")
    assert price(measured, float16).expected == pytest.approx(2 * built_in(float16))


def test_the_range_is_that_of_points_left_out_and_of_calls_of_one_size() -> None:
    even = price(with_calls(grid([1.3] * GRID)), product_of(512, 700, 700))
    assert even.high / even.expected == pytest.approx(1.04)  # what two days differ by
    uneven = price(with_calls(grid([1.0, 1.5] * (GRID // 2))), product_of(512, 700, 700))
    assert uneven.high / uneven.expected > 1.3
    sizes = (1 << 22, 1 << 26)
    works = [
        Work(f"aten::{name}", WorkKind.ELEMENTS, "float32", (), "", 0, size, size)
        for size in sizes
        for name in ("add", "gelu")
    ]
    calls = [
        MeasuredCall(work, built_in(work) * (1.0 if "add" in work.operator else 1.44))
        for work in works
    ]
    pointwise = price(with_calls(calls), works[0])
    assert pointwise.expected == pytest.approx(1.2 * built_in(works[0]))
    assert pointwise.high / pointwise.expected == pytest.approx(1.2, abs=0.01)


def test_the_variable_names_the_file_of_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signature() == ""
    path = tmp_path / "card.json"
    path.write_text(json.dumps(to_plain(of(grid([2.0] * GRID)))))
    plain = built_in(product_of(512, 512, 512))
    other = prices("t4")
    monkeypatch.setenv(own.ENVIRONMENT, str(path))
    assert built_in(product_of(512, 512, 512)) == pytest.approx(2 * plain)
    again = prices("t4")
    assert isinstance(other, Prices)
    assert isinstance(again, Prices)
    assert again.host_call == other.host_call
    assert len(signature()) == 8


def broken(change: dict[str, Any] | str | None) -> str | None:
    """The text of a file that is wrong in one way; None for no file."""
    if change is None or isinstance(change, str):
        return change
    return json.dumps({**to_plain(of(grid([1.0] * GRID))), **change})  # type: ignore[dict-item]


CALL = to_plain(grid([1.0] * GRID)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "No such file"),
        ("{", "cannot be read"),
        ("[]", '"schema_version": 1'),
        ({"schema_version": 2}, '"schema_version": 1'),
        ({"calls": to_plain(tuple(grid([1.0] * GRID)[1:]))}, "no whole grid"),
        ({"calls": [{**CALL, "seconds": 0.0}]}, "calls[0].seconds"),  # type: ignore[dict-item]
        ({"calls": [{**CALL, "seconds": "fast"}]}, "calls[0].seconds"),  # type: ignore[dict-item]
        ({"calls": [{"work": {"operator": "x", "kind": "other"}, "seconds": 1.0}]}, "x: calls"),
        ({"host_call": [3e-6, 2e-6, 1e-6]}, "host_call"),
        ({"gpus": "a100"}, "gpus"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line_with_its_name(
    change: dict[str, Any] | str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "card.json"
    text = broken(change)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        own.read(path)
    assert words in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.hint


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(Calibration.__dataclass_fields__)), json_values)
def test_any_other_value_of_a_field_is_read_or_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({**to_plain(of(grid([1.0] * GRID))), name: value}))  # type: ignore[dict-item]
    with contextlib.suppress(ConfigError):  # and no other error
        assert isinstance(own.read(path), Calibration)


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore")
def test_the_script_measures_what_prices_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls run on a simulated GPU; their times are 1.25 times those that are predicted."""
    import gpuprobe

    with gpuprobe.virtual_gpu("h200"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
        import calibrate

        monkeypatch.setattr(calibrate, "ROWS", (128, 512))
        monkeypatch.setattr(calibrate, "SIZES", (512, 1024))
        monkeypatch.setattr(calibrate, "BYTES", (1 << 20, 1 << 22, 1 << 24))
        plain = prices("h200-141gb")
        assert isinstance(plain, Prices)
        works = []

        def timer(call: object, work: Work) -> float:
            works.append(work)
            known = plain.of(work, 1)
            assert isinstance(known, Price), known
            return known.expected * 1.25

        measured = calibrate.calibration(timer, lambda: (1e-6, 2e-6, 3e-6), lambda: iter(()))
        path = tmp_path / "card.json"
        calibrate.write(measured, path)
    assert own.read(path) == measured == from_plain(Calibration, to_plain(measured))
    kinds = {work.kind for work in works}
    assert kinds == {
        WorkKind.MATMUL, WorkKind.ATTENTION, WorkKind.ATTENTION_BACKWARD, WorkKind.ELEMENTS,
        WorkKind.INDEXED, WorkKind.COPY,
    }  # fmt: skip
    assert {work.dtype for work in works if work.kind is WorkKind.MATMUL} == {
        "bfloat16", "float32", "tf32",
    }  # fmt: skip
    assert {work.variant for work in works if work.kind is WorkKind.ELEMENTS} == {
        "", "pointwise", "scattered",
    }  # fmt: skip
    monkeypatch.setenv(own.ENVIRONMENT, str(path))
    corrected = prices("h200-141gb")
    assert isinstance(corrected, Prices)
    for work in works:
        one, other = price(corrected, work), price(plain, work)
        assert one.expected == pytest.approx(1.25 * other.expected)
        assert one.source is PriceSource.MEASURED


def test_the_script_refuses_a_simulated_gpu(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "gpu" / "calibrate.py"
    command = [sys.executable, "-m", "gpuprobe", "run", "--gpu", "h200", "-o", "run.gpuprobe"]
    done = subprocess.run(
        [*command, str(script), "--out", "card.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "this GPU is simulated: its kernels take no time" in done.stderr
    assert done.returncode == 3
    assert not (tmp_path / "card.json").exists()
