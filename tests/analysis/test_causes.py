"""Causes of growth, and the steps that are compared."""

from __future__ import annotations

from collections import Counter

from report_builders import recording, step, trace

from gpuprobe.analysis.compare.accounts import Account, LineShare, _sorted
from gpuprobe.analysis.compare.causes import Context, explain, wording
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.analysis.growth import Growth, growth_of
from gpuprobe.analysis.peak.peaks import device_peaks
from gpuprobe.analysis.trace.parts import AFTER, FIRST, LATER, traced
from gpuprobe.model.memory import Category

MIB = 1 << 20


def row(key: str, before: int, after: int, blocks: tuple[int, int] = (1, 1)) -> DiffRow:
    return DiffRow(key, before * MIB, after * MIB, *blocks, "changed")


def account(*lines: tuple[str, int, str]) -> Account:
    shares = [
        LineShare(key, size * MIB, 1, ((category, size * MIB),)) for key, size, category in lines
    ]
    return Account(sum(share.bytes for share in shares), tuple(shares))


def test_of_several_inputs_the_largest_is_named() -> None:
    before = account(
        ("y.py:1", 10, "input"), ("x.py:2", 50, "input"), ("m.py:3", 900, "activation")
    )
    after = account(
        ("y.py:1", 20, "input"), ("x.py:2", 100, "input"), ("m.py:3", 1800, "activation")
    )
    rows = [row("y.py:1", 10, 20), row("x.py:2", 50, 100), row("m.py:3", 900, 1800)]
    found = explain(rows, before, after, Context())
    assert found is not None
    assert found.place == "x.py:2"
    assert "inputs 2.00 times as large at x.py:2: 50.0 MiB before, 100.0 MiB now" in found.text


def test_more_and_fewer_blocks() -> None:
    lines = {line.key: line for line in account(("m.py:3", 9, "activation")).lines}
    fewer = wording([row("m.py:3", 5, 9, (4, 3))], {}, lines, Context())
    assert fewer[-1] == "1 fewer block"
    more = wording([row("m.py:3", 5, 9, (4, 6))], {}, lines, Context())
    assert more[-1] == "2 more blocks"


def test_the_first_step_is_a_separate_kind() -> None:
    sizes = {0: 30, 1: 50, 2: 40, 3: 20}
    steps = [
        step(index, {"forward": size * MIB}, ended_by="end" if index == 3 else "user")
        for index, size in sizes.items()
    ]
    traces = [
        trace([("m.py:3", size * MIB, Category.ACTIVATION)], step=index)
        for index, size in sizes.items()
    ]
    (site,) = device_peaks(recording(steps, traces))
    found = traced(site).kinds_of_step()
    assert {kind: point.bytes // MIB for kind, point in found.items()} == {
        FIRST: 30,
        LATER: 50,
        AFTER: 20,
    }


def test_traces_are_complete_if_every_full_step_has_one() -> None:
    def complete(*traced_steps: int) -> bool:
        steps = [
            step(index, {"forward": 30 * MIB}, ended_by="end" if index == 2 else "user")
            for index in range(3)
        ]
        made = [trace([("m.py:3", 30 * MIB, Category.ACTIVATION)], step=i) for i in traced_steps]
        (site,) = device_peaks(recording(steps, made))
        return traced(site).complete

    assert complete(0, 1)
    assert complete(0, 1, 2)
    assert not complete(0, 2)
    assert not complete()


def test_names_are_in_the_order_of_their_bytes() -> None:
    sizes = Counter({"b": 3, "a": 3, "c": 9, "": 20})
    assert _sorted(sizes) == (("c", 9), ("a", 3), ("b", 3))


def test_growth_that_is_small_in_a_short_run_counts_in_a_long_one() -> None:
    def grown(rise: int) -> Growth | None:
        steps = [step(at, {"forward": 1000 * MIB}, end=500 * MIB + at * rise) for at in range(12)]
        (site,) = device_peaks(recording(steps))
        assert growth_of(site) is None
        return growth_of(site, 0.05, 10_000)

    assert grown(512) is None  # of a loss
    found = grown(64 << 10)
    assert found is not None
    assert found.per_step == 64 << 10
