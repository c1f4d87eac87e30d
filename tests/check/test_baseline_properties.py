"""Laws of every comparison: rows sum to the change, and what only moved is not a change."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuprobe.analysis.baseline.check import check_baseline
from gpuprobe.analysis.baseline.model import METRICS, Baseline, Tolerance
from gpuprobe.analysis.baseline.text import dumps, loads
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.peak.peaks import Share

FILES = ("shop/train.py", "shop/model.py", "shop/deep/data.py")
FUNCTIONS = ("main", "forward", "step")
CALLS = ("", "linear forward _call_impl", "_engine_run_backward backward", "__call__")
CATEGORIES = ("activation", "parameter", "temporary", "unknown")
NEEDS = ("needed_later", "never_used_again", "not_traced")
MODULES = ("Net.a", "Net.a.b", "Net.head", "Net.blocks.0", "Net.blocks.1")

sizes = st.integers(1, 1 << 40)


@st.composite
def places(draw: st.DrawFn) -> list[tuple[str, int, str, str]]:
    """Lines of a program: file, line, function, calls. A line is in one function."""
    found = {}
    for _ in range(draw(st.integers(0, 8))):
        file = draw(st.sampled_from(FILES))
        line = draw(st.integers(1, 99))
        # Functions lie one after the other in a file.
        found[file, line] = (FUNCTIONS[line // 34], draw(st.sampled_from(CALLS)))
    return [(file, line, *rest) for (file, line), rest in sorted(found.items())]


def key(file: str, line: int, function: str) -> str:
    return f"{file}:{line} in {function}"


@st.composite
def categories(
    draw: st.DrawFn, size: int, names: tuple[str, ...] = CATEGORIES
) -> tuple[tuple[str, int], ...]:
    """One category, or two that sum to ``size``."""
    one, two = draw(st.permutations(names))[:2]
    part = draw(st.integers(1, size))
    found = [(one, part), (two, size - part)] if part < size else [(one, size)]
    return tuple(sorted(found, key=lambda item: (-item[1], item[0])))


@st.composite
def accounts(draw: st.DrawFn, lines: list[tuple[str, int, str, str]], whole: bool) -> Account:
    chosen = [place for place in lines if draw(st.booleans())]
    traced = whole and draw(st.booleans())
    shares = [
        LineShare(
            key(file, line, function),
            size := draw(sizes),
            draw(st.integers(1, 9)),
            draw(categories(size)),
            draw(st.sampled_from(("", "backward", "later"))),
            calls,
            needs=draw(categories(size, NEEDS)) if traced else (),
        )
        for file, line, function, calls in chosen
    ]
    if draw(st.booleans()):
        shares.append(LineShare("(before the trace)", draw(sizes), 1))
    shares.sort(key=lambda share: (-share.bytes, share.key))
    total = sum(share.bytes for share in shares)
    if not whole:
        return Account(total, tuple(shares))
    return Account(
        total,
        tuple(shares),
        draw(_parts(total, ("activation", "parameter", "unknown"))),
        draw(_parts(total, (*MODULES, "(unknown)"))),
    )


@st.composite
def _parts(draw: st.DrawFn, total: int, names: tuple[str, ...]) -> tuple[Share, ...]:
    """Shares that sum to ``total``."""
    left = total
    found = []
    for name in names[:-1]:
        part = draw(st.integers(0, left))
        if part:
            found.append(Share(name, part, draw(st.integers(1, 9))))
            left -= part
    found.append(Share(names[-1], left, 1))
    return tuple(sorted(found, key=lambda share: (-share.bytes, share.key)))


@st.composite
def baselines(draw: st.DrawFn) -> Baseline:
    lines = draw(places())
    found = {"peak": draw(accounts(lines, whole=True))}
    for name in ("steady", "growth", "phase forward"):
        found[name] = draw(accounts(lines, whole=False))
    metrics = {
        "peak_allocated": found["peak"].total,
        "steady_allocated": found["steady"].total,
        "growth_per_step": found["growth"].total,
    }
    if draw(st.booleans()):
        metrics["races"] = draw(st.integers(0, 5))
    return Baseline(
        environment={"device": "simulated t4", "torch": "2.13", "allocator": ""},
        steps=draw(st.integers(1, 9)),
        metrics=metrics,
        phases={"phase forward": found["phase forward"].total},
        accounts=found,
        tolerances=draw(
            st.dictionaries(
                st.sampled_from(sorted(METRICS)),
                st.builds(Tolerance, st.sampled_from((0.0, 0.01, 0.5)), st.integers(0, 1 << 30)),
            )
        ),
        stopped_after=draw(st.none() | st.integers(1, 9)),
    )


@given(baselines(), baselines())
@settings(deadline=None)
def test_rows_sum_to_the_change_of_every_account(before: Baseline, after: Baseline) -> None:
    result = check_baseline(before, after)
    assert result.rows is not None
    change = after.metrics["peak_allocated"] - before.metrics["peak_allocated"]
    tables = ["category", "module", "line", *(["need"] if result.rows["need"] else [])]
    for by in tables:
        assert sum(row.delta for row in result.rows[by]) == change
        assert sum(row.before for row in result.rows[by]) == before.metrics["peak_allocated"]
        assert sum(row.after for row in result.rows[by]) == after.metrics["peak_allocated"]
    for metric in (*result.metrics, *result.phases):
        if metric.regressed and metric.name != "races":
            assert metric.rows is not None
            assert sum(row.delta for row in metric.rows) == metric.delta > 0
            assert metric.cause
    assert result.ok == (not result.regressions and not result.mismatches)
    if result.mismatches:  # of one environment: then of two models
        assert not any(row.status in ("same", "moved") for row in result.rows["line"])


@given(baselines())
@settings(deadline=None)
def test_a_run_is_within_its_own_baseline(found: Baseline) -> None:
    result = check_baseline(found, found)
    assert result.ok
    assert not result.cautions
    assert result.rows is not None
    assert {row.status for rows in result.rows.values() for row in rows} <= {"same"}


@given(baselines())
@settings(deadline=None)
def test_the_text_reads_back(found: Baseline) -> None:
    text = dumps(found)
    again = loads(text)
    assert dumps(again) == text
    assert text.isascii()
    for name, account in found.accounts.items():
        assert again.accounts[name].total == account.total
        was, now = (
            {
                (line.key, line.bytes, line.blocks, line.categories)
                for line in found.lines
                if line.calls
            }
            for found in (account, again.accounts[name])
        )
        assert was == now
    assert check_baseline(again, found).ok
    assert again.tolerances == found.tolerances
    assert again.stopped_after == found.stopped_after


def moved(found: Baseline, line, module) -> Baseline:  # type: ignore[no-untyped-def]
    """The same memory under other names. ``line`` and ``module`` map a key to its new one."""

    def of(account: Account) -> Account:
        return replace(
            account,
            lines=tuple(replace(item, key=line(item.key)) for item in account.lines),
            modules=tuple(replace(item, key=module(item.key)) for item in account.modules),
        )

    return replace(found, accounts={name: of(account) for name, account in found.accounts.items()})


@given(baselines(), st.integers(1, 50), st.sampled_from(FILES), st.sampled_from(FUNCTIONS))
@settings(deadline=None)
def test_lines_that_shift_are_the_same_lines(
    before: Baseline, by: int, file: str, function: str
) -> None:
    """Lines are added above a function: all of it moves down, and what follows it too."""

    def shifted(name: str) -> str:
        match = re.fullmatch(r"(.+):(\d+) in (.+)", name)
        if match is None or match[1] != file:
            return name
        if FUNCTIONS.index(match[3]) < FUNCTIONS.index(function):
            return name
        return key(match[1], int(match[2]) + by, match[3])

    result = check_baseline(before, moved(before, shifted, lambda name: name))
    assert result.ok
    assert result.rows is not None
    for row in result.rows["line"]:
        assert row.delta == 0
        assert row.status in ("same", "moved")
        assert shifted(row.moved_from or row.key) == row.key


@given(baselines(), st.sampled_from(("Net.a", "Net.head", "Net.blocks")))
@settings(deadline=None)
def test_a_renamed_module_is_the_same_module(before: Baseline, name: str) -> None:
    def renamed(path: str) -> str:
        return (
            f"Net.other{path[len(name) :]}" if path == name or path.startswith(f"{name}.") else path
        )

    result = check_baseline(before, moved(before, lambda line: line, renamed))
    assert result.ok
    assert result.rows is not None
    for row in result.rows["module"]:
        assert row.delta == 0
        assert row.status in ("same", "moved")


@given(baselines(), st.sampled_from(FILES))
@settings(deadline=None)
def test_a_file_in_another_folder_is_the_same_file(before: Baseline, file: str) -> None:
    def elsewhere(name: str) -> str:
        return name.replace(file, f"packages/{file}") if name.startswith(f"{file}:") else name

    result = check_baseline(before, moved(before, elsewhere, lambda path: path))
    assert result.ok
    assert result.rows is not None
    assert all(row.delta == 0 for row in result.rows["line"])
