"""Programs that do not need the same memory in every run."""

from __future__ import annotations

from dataclasses import replace

from test_check_report import BEFORE, MIB, account, baseline, line

from gpuprobe.analysis.baseline.check import check_baseline, with_repeats

GROWN = baseline(account(line(3, 9 * MIB), line(4, 2 * MIB)), account(line(5, MIB)), 0)


def test_what_every_run_needs_is_a_regression() -> None:
    result = check_baseline(BEFORE, GROWN)
    assert with_repeats(result, [GROWN, GROWN]) == result
    higher = replace(GROWN, metrics={**GROWN.metrics, "peak_allocated": 12 * MIB})
    found = with_repeats(result, [higher])
    assert [metric.name for metric in found.regressions] == ["peak_allocated", "later steps"]
    assert found.cautions[0].startswith(
        "not deterministic: 2 runs needed different memory (peak_allocated 11.0 MiB, 12.0 MiB)"
    )


def test_what_one_run_does_without_is_none() -> None:
    result = check_baseline(BEFORE, GROWN)
    assert not result.ok
    found = with_repeats(result, [BEFORE])
    assert found.ok
    assert found.cause == ""
    assert "not deterministic: 2 runs" in found.cautions[0]
    assert {metric.after for metric in found.metrics if metric.name == "peak_allocated"} == {
        9 * MIB
    }
