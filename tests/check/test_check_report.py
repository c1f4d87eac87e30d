"""A check as text and Markdown: what is blamed, tables that sum, hostile names."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from report_builders import rank_recording, recording, session, step

from gpuprobe.analysis.baseline.check import check_baseline
from gpuprobe.analysis.baseline.measure import baseline_of
from gpuprobe.analysis.baseline.model import Baseline, Cause, CheckResult, Setting
from gpuprobe.analysis.baseline.text import dumps, loads
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.peak.peaks import Share
from gpuprobe.model.run.recording import Recording
from gpuprobe.model.run.session import SessionEnd
from gpuprobe.reporters import markdown
from gpuprobe.reporters.json import check as check_json
from gpuprobe.reporters.sections.check import check_sections, run_sections
from gpuprobe.reporters.text import draw as text

MIB = 1 << 20
HOSTILE = "tr\x1b[31mai|n`.py"


def line(number: int, size: int, category: str = "activation") -> LineShare:
    return LineShare(f"{HOSTILE}:{number} in main", size, 1, ((category, size),))


def account(*lines: LineShare) -> Account:
    total = sum(item.bytes for item in lines)
    return Account(total, lines, (Share("activation", total, 1),), (Share("Net.a", total, 1),))


def baseline(peak: Account, evaluation: Account, syncs: int) -> Baseline:
    places = (LineShare(f"{HOSTILE}:9 in main", syncs, syncs),) if syncs else ()
    return Baseline(
        environment={"device": "simulated t4"},
        steps=4,
        metrics={"peak_allocated": peak.total, "implicit_syncs_per_step": syncs // 4},
        phases={"later steps": peak.total, "phase evaluation": evaluation.total},
        accounts={
            "peak": peak,
            "later steps": peak,
            "phase evaluation": evaluation,
            "syncs": Account(syncs, places, unit="count"),
        },
    )


BEFORE = baseline(account(line(3, 9 * MIB)), account(line(5, MIB)), 0)


def texts(result: CheckResult) -> tuple[str, str]:
    plain, shared = io.StringIO(), io.StringIO()
    text.write(check_sections(result), plain)
    markdown.write(run_sections(result, summary=True), shared)
    for drawn in (plain.getvalue(), shared.getvalue()):
        assert "\x1b" not in drawn
    return plain.getvalue(), shared.getvalue()


def test_a_pass() -> None:
    plain, shared = texts(check_baseline(BEFORE, BEFORE))
    assert plain.splitlines()[0] == "memory is within the baseline"
    assert shared.startswith("### ✅ gpuprobe: memory is within the baseline")
    assert "cause" not in plain + shared
    assert "What changed" not in plain


def test_the_peak_is_shown_by_line_category_and_module() -> None:
    after = baseline(account(line(3, 9 * MIB), line(4, 2 * MIB)), account(line(5, MIB)), 0)
    result = replace(check_baseline(BEFORE, after), settings=(Setting("gpu", "x", "default"),))
    plain, shared = texts(result)
    assert plain.splitlines()[0] == "2 metrics above the baseline"
    assert "first cause: +2.0 MiB at tr\\x1b[31mai|n`.py:4 in main" in " ".join(plain.split())
    for by in ("lines", "categories", "modules"):
        (table,) = re.findall(rf"What changed at the peak, by {by}\n((?:  .*\n)+)", plain)
        assert table.splitlines()[-1].split() == ["+2.0", "MiB", "total"]
    assert "measured: gpu x (default)" in plain
    assert "| **peak_allocated** | 9.0 MiB | 11.0 MiB | +2.0 MiB |" in shared
    # A cell stays one cell.
    assert "| +2.0 MiB | `tr\\x1b[31mai\\|n'.py:4 in main` |" in shared


def short(result: CheckResult) -> list[str]:
    stream = io.StringIO()
    text.write(run_sections(result, full=False), stream)
    return stream.getvalue().splitlines()


def test_a_pass_is_a_few_lines() -> None:
    """The verdict, the peak, where the baseline is, and what else there is."""
    file = Setting("baseline", "memory.json", "command line")
    result = replace(check_baseline(BEFORE, BEFORE), settings=(file,), cautions=("unusual",))
    assert short(result) == [
        "memory is within the baseline",
        "  peak allocated: 9.0 MiB; baseline: 9.0 MiB (memory.json); limit: 9.1 MiB",
        "  note: unusual",
        "",
        "more with -v: 1 more metric, settings",
    ]


def test_a_failure_fits_on_a_screen() -> None:
    """With the first causes, what grew most, what to do; and all that is left out has a name."""
    lines = [line(number, number * MIB) for number in range(10, 40)]
    after = baseline(account(line(3, 9 * MIB), *lines), account(line(5, 9 * MIB)), 16)
    result = check_baseline(BEFORE, after)
    causes = tuple(Cause(f"reverting {n}", f"train.py:{n}") for n in range(1, 6))
    metrics = tuple(
        replace(item, cause=causes[0].text, place="train.py:1", causes=causes)
        if item.name == "peak_allocated"
        else item
        for item in result.metrics
    )
    result = replace(
        result, metrics=metrics, cause=causes[0].text, reproduce="again", accept="accept"
    )
    shown = short(result)
    assert len(shown) <= 40
    assert shown[0] == "4 metrics above the baseline"
    assert shown[1:4] == [
        "  first cause: reverting 1",
        "  next: reverting 2",
        "  next: reverting 3",
    ]
    assert "What changed at the peak, by lines" in shown
    assert {"     $ again", "     $ accept"} <= set(shown)
    last = " ".join(shown[shown.index("") :]).partition("more with -v: ")[2]
    named = ("1 more metric,", "more causes,", "changes by category, module")
    assert all(text in last for text in named), last
    assert "reverting 5" in texts(result)[0]


def test_a_longer_step_is_said_with_its_share() -> None:
    """Beside the first cause, if that is of memory; else in it."""
    after = baseline(account(line(3, 9 * MIB), line(4, 2 * MIB)), account(line(5, MIB)), 0)
    before, now = (
        replace(one, metrics={**one.metrics, "step_time": time})
        for one, time in ((BEFORE, 10_000_000), (after, 11_800_000))
    )
    checked = check_baseline(before, now)
    why = "reverting train.py:4 saves 1.8 of 1.8 ms"
    slower = tuple(
        replace(item, cause=why, place="train.py:4", causes=(Cause(why, "train.py:4"),))
        if item.name == "step_time"
        else item
        for item in checked.metrics
    )
    plain, _ = texts(replace(checked, metrics=slower))
    assert f"also: +18% a step: {why}" in " ".join(plain.split())
    alone = tuple(item for item in slower if item.name == "step_time")
    plain, _ = texts(replace(checked, metrics=alone, phases=(), cause=why))
    assert f"first cause: +18% a step: {why}" in " ".join(plain.split())


def test_what_is_not_used_again_is_said_with_its_line() -> None:
    """In the cause, in a table, and in the message of the finding."""

    def traced(number: int, size: int, *needs: tuple[str, int]) -> LineShare:
        return replace(line(number, size), needs=needs)

    before, after = (
        baseline(account(*lines), account(line(5, MIB)), 0)
        for lines in (
            (traced(3, 9 * MIB, ("needed_later", 9 * MIB)),),
            (
                traced(3, 9 * MIB, ("needed_later", 8 * MIB), ("never_used", MIB)),
                traced(4, 512 * MIB, ("never_used_again", 512 * MIB)),
            ),
        )
    )
    result = check_baseline(before, loads(dumps(after)))
    plain, _ = texts(result)
    (cause,) = {metric.cause for metric in result.regressions}
    assert "+512.0 MiB never used again" in cause
    (table,) = re.findall(r"by what it is needed for\n((?:  .*\n)+)", plain)
    assert [" ".join(row.split()) for row in table.splitlines()] == [
        "+512.0 MiB never used again",
        "+512.0 MiB made by tr\\x1b[31mai|n`.py:4 in main",
        "-1.0 MiB needed later",
        "-1.0 MiB made by tr\\x1b[31mai|n`.py:3 in main",
        "+1.0 MiB never used",
        "+1.0 MiB made by tr\\x1b[31mai|n`.py:3 in main",
        "+512.0 MiB total",
    ]
    assert any("never used again" in one.message for one in check_json.findings(result))
    # Nothing is known of a line whose uses were not traced before.
    untraced = baseline(account(line(3, 9 * MIB), line(4, MIB)), account(line(5, MIB)), 0)
    result = check_baseline(untraced, after)
    assert result.rows is not None
    assert not result.rows["need"]
    assert "never used" not in "".join(texts(result))


def test_what_is_blamed_is_shown_where_the_peak_is_the_same() -> None:
    after = baseline(account(line(3, 9 * MIB)), account(line(5, MIB), line(6, MIB)), 8)
    result = check_baseline(BEFORE, after)
    assert [metric.name for metric in result.regressions] == [
        "implicit_syncs_per_step",
        "phase evaluation",
    ]
    plain, shared = texts(result)
    assert "+8 implicit synchronisations in the run at" in " ".join(plain.split())
    assert "also: phase evaluation: +1.0 MiB at" in " ".join(plain.split())
    assert "What changed in the implicit synchronisations of the run, by lines" in plain
    assert re.search(r"^ +\+8  total$", plain, re.MULTILINE)
    assert "! phase evaluation" in plain
    assert "| **phase evaluation** | 1.0 MiB | 2.0 MiB | +1.0 MiB |" in shared
    found = check_json.findings(result)
    assert [finding.rule for finding in found] == [
        "GPM-implicit_syncs_per_step",
        "GPM-phase-evaluation",
    ]
    assert [finding.location.line for finding in found if finding.location] == [9, 6]


def test_what_is_not_compared_is_said_in_both() -> None:
    after = replace(BEFORE, environment={"device": "simulated t4", "precision": "float32"}, steps=9)
    for drawn in texts(check_baseline(BEFORE, after)):
        assert "float32 now" in drawn
        assert "4 steps in the baseline, 9 now" in drawn
    refused = check_baseline(BEFORE, replace(BEFORE, environment={"device": "simulated h100"}))
    for drawn in texts(refused):
        assert "the baseline is from another environment" in drawn
        assert "simulated h100" in drawn


def test_a_job_names_the_rank_that_is_compared() -> None:
    def job(sizes: tuple[int, int]) -> Recording:
        ranks = [
            rank_recording(
                [step(0, {"forward": size}), step(1, {"forward": size})],
                ended=SessionEnd(1_000_000_000),
                session=replace(session(), rank=rank, world_size=2),
            )
            for rank, size in enumerate(sizes)
        ]
        return Recording("runs/a.gpuprobe", (2, 0), tuple(ranks))

    before, after = baseline_of(job((60, 50))), baseline_of(job((60, 90)))
    found = check_baseline(before, after)
    assert "of 2 ranks, the one with the highest peak is compared: rank 1" in found.cautions
    alone = baseline_of(recording([step(0, {"forward": 60})]))
    assert not any("ranks" in text for text in check_baseline(alone, alone).cautions)


def growing(per_step: int, peak: int) -> CheckResult:
    """A run whose steps leave ``per_step`` bytes, and whose peak rises to ``peak``."""
    before, after = (
        Baseline(
            environment={"device": "simulated t4"},
            steps=4,
            metrics={"growth_per_step": one, "peak_allocated": two, "races": 0},
            phases={},
            accounts={},
        )
        for one, two in ((0, MIB), (per_step, peak))
    )
    return check_baseline(before, replace(after, metrics={**after.metrics, "races": 2}))


def test_a_leak_of_a_few_bytes_comes_after_a_peak_of_many() -> None:
    names = [item.name for item in growing(4, 71 * MIB).regressions]
    assert names == ["peak_allocated", "growth_per_step", "races"]
    names = [item.name for item in growing(MIB, 71 * MIB).regressions]
    assert names == ["growth_per_step", "peak_allocated", "races"]
