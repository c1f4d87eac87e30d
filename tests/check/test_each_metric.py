"""Each metric regresses alone, and is blamed on the line that did it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from check_programs import PROGRAM, measured

from gpuprobe.analysis.baseline.model import BELOW_PEAK, METRICS, Baseline, Tolerance
from gpuprobe.analysis.baseline.text import dumps, loads
from gpuprobe.api.check import compare

# metric -> (edits, what is regressed beside it, a part of the blamed line)
ALONE: dict[str, tuple[tuple[tuple[str, str], ...], set[str], str]] = {
    "growth_per_step": (
        (("    # after\n", "    kept.append(torch.ones(1, device='cuda'))\n"),),
        set(),
        "kept.append(torch.ones",
    ),
    "peak_allocated": (
        (
            ("    # before\n", "    y = torch.empty(1 << 19, device='cuda')\n"),
            ("    del x\n", "    del x, y\n"),
        ),
        {"later steps", "first step", "phase backward", "phase forward"},
        "y = torch.empty(",
    ),
    "steady_allocated": (
        (
            ("    # before\n", "    held = None\n"),
            ("    del x\n", "    del x; held = torch.empty(1 << 18, device='cuda')\n"),
        ),
        set(),  # of phases below the peak, too little to matter
        "held = torch.empty(",
    ),
    # The same bytes from the pool of another stream, where nobody takes them up again: the next
    # that needs as much has to take a segment of its own.
    "peak_reserved": (
        (("scratch = ", "with other: scratch = "),),
        set(),
        "with other: scratch",
    ),
    # 2 MiB of a new pool are within what is accepted of reserved memory.
    "device_allocs_after_warm_up": (
        (
            (
                "    # after\n",
                "    if step > 3:\n        with other: x = torch.empty(9, device='cuda')\n",
            ),
        ),
        {"step_time"},  # the host, which bounds the step, waits for cudaMalloc
        "x = torch.empty(9",
    ),
    "implicit_syncs_per_step": (
        (("    # after\n", "    print(loss.item())\n"),),
        {"step_time"},
        "loss.item()",
    ),
    "races": (
        (
            (
                "    # after\n",
                "    with other: scores.add_(1)\n    scores.mul_(2)\n",
            ),
        ),
        set(),
        "scores.",
    ),
    "phase evaluation": (
        (("        model(torch.randn(4096,", "        model(torch.randn(8300,"),),
        {"after the last step"},
        "        model(torch.randn(8300,",
    ),
    "phase setup": (
        (("30 << 20", "42 << 20"),),
        set(),
        "scratch = torch.empty(42 << 20",
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    return measured(tmp_path_factory.mktemp("base"), options=["--hazards"])


def test_all_of_them_are_measured(base: Baseline) -> None:
    assert set(base.metrics) == set(METRICS)
    assert {"phase forward", "phase backward", "phase evaluation"} <= set(base.phases)
    assert base.metrics["growth_per_step"] == 0
    assert base.metrics["races"] == 0
    for name, account in base.accounts.items():
        assert sum(line.bytes for line in account.lines) == account.total, name
    peak = base.accounts["peak"]
    for rows in (peak.categories, peak.modules):
        assert sum(row.bytes for row in rows) == base.metrics["peak_allocated"]


@pytest.mark.parametrize("name", ALONE)
def test_it_regresses_alone(name: str, base: Baseline, tmp_path: Path) -> None:
    edits, besides, blamed = ALONE[name]
    after = measured(tmp_path, *edits, options=["--hazards"])
    result = compare(base, after)
    print(result.cause)
    assert {metric.name for metric in result.regressions} == {name} | besides
    (metric,) = (metric for metric in result.regressions if metric.name == name)
    match = re.fullmatch(r"train\.py:(\d+) in <module>", metric.place)
    assert match is not None, metric
    source = (tmp_path / "train.py").read_text(encoding="utf-8").splitlines()
    assert blamed in source[int(match[1]) - 1], metric.cause
    assert metric.rows is not None
    if name not in ("growth_per_step", "implicit_syncs_per_step"):
        assert sum(row.delta for row in metric.rows) == metric.delta
    # The same run is within its own baseline, and so is the program as it was.
    assert compare(after, after).ok
    assert compare(loads(dumps(after)), after).ok


def test_a_phase_may_take_as_many_bytes_more_as_the_peak(base: Baseline) -> None:
    peak = base.metrics["peak_allocated"]
    share = peak // 100
    within = replace(base, phases={name: size + share for name, size in base.phases.items()})
    assert compare(base, within).ok
    above = replace(base, phases={name: size + share + 1 for name, size in base.phases.items()})
    high = {name for name, size in base.phases.items() if size + share + 1 >= peak * BELOW_PEAK}
    assert set() < high < set(base.phases)
    assert {metric.name for metric in compare(base, above).regressions} == high
    assert compare(base, above, {"peak_allocated": Tolerance(0.02)}).ok
    # What somebody has chosen holds for every phase.
    strict = compare(base, above, {"peak_allocated": Tolerance(0.01)})
    assert {metric.name for metric in strict.regressions} == set(base.phases)


def test_a_phase_below_the_peak_may_take_a_twentieth_more(base: Baseline) -> None:
    name = "phase evaluation"
    size = base.phases[name]
    assert size * 1.06 < base.metrics["peak_allocated"] * BELOW_PEAK
    within, above = (
        replace(base, phases={**base.phases, name: size + more})
        for more in (size // 20, size // 20 + 1)
    )
    result = compare(base, within)
    assert result.ok
    (metric,) = (item for item in result.phases if item.name == name)
    assert metric.ignored
    assert metric.accepted.endswith("ignored: below the peak")
    assert [item.name for item in compare(base, above).regressions] == [name]


@pytest.mark.parametrize("name", ["phase setup", "first step", "after the last step"])
def test_what_happens_once_counts_where_it_comes_near_the_peak(base: Baseline, name: str) -> None:
    near = int(base.metrics["peak_allocated"] * BELOW_PEAK)
    low = replace(base, phases={**base.phases, name: near // 2})
    within, above = (
        replace(base, phases={**base.phases, name: size}) for size in (near - 1, near + 1)
    )
    result = compare(low, within)
    assert result.ok
    (metric,) = (item for item in result.phases if item.name == name)
    assert metric.ignored
    assert metric.limit == near
    assert [item.name for item in compare(low, above).regressions] == [name]
    # What somebody has chosen holds for every phase.
    strict = compare(low, within, {"peak_allocated": Tolerance(0.01)})
    assert [item.name for item in strict.regressions] == [name]


def test_an_evaluation_at_the_end_counts_as_what_follows_the_last_step(base: Baseline) -> None:
    near = int(base.metrics["peak_allocated"] * BELOW_PEAK)
    low, within, above = (
        replace(base, phases={**base.phases, "phase evaluation": size, "after the last step": end})
        for size, end in ((near // 2, near // 2), (near - 1, near - 1), (near - 1, near // 2))
    )
    assert compare(low, within).ok
    assert [item.name for item in compare(low, above).regressions] == ["phase evaluation"]


def test_the_text_is_stable_reviewable_and_reads_back(base: Baseline, tmp_path: Path) -> None:
    text = dumps(base)
    assert dumps(measured(tmp_path, options=["--hazards"])) == text
    assert dumps(loads(text)) == text
    assert str(tmp_path.parent) not in text
    assert json.loads(text)["metrics"]["peak_allocated"]["text"].endswith("MiB")
    # One row per line, so that a diff of it shows what changed.
    (row,) = (line for line in text.splitlines() if '"phase setup": {"bytes"' in line)
    assert row.strip().startswith('"phase setup": {"bytes": ')
    assert PROGRAM.count("\n") < text.count("\n") < 200
    rows = [line for line in text.splitlines() if '"statements": "' not in line]
    assert len(rows) == text.count("\n") - 1  # the digests of a file's lines are one row
    assert max(map(len, rows)) < 320  # the longest name a line and its caller
