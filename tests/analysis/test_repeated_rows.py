"""Rows that repeat are one row, and nothing is lost: groups sum to the rows, and open to them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import report_builders as build
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.analysis.compare.diff import Diff, DiffRow, PeakDiff
from gpuprobe.analysis.repeated_names import line_names, module_names
from gpuprobe.analysis.repeats import change_groups, share_groups
from gpuprobe.api.render import render
from gpuprobe.model.place import NoPlace, Place
from gpuprobe.model.report import (
    LineRow,
    Remainder,
    Report,
    ShareRow,
    ShareTable,
    cut_to,
)
from gpuprobe.model.values import Peak
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.html.draw import Drawing
from gpuprobe.reporters.sections.diff import diff_sections
from gpuprobe.reporters.sections.report.memory import share_sections


def grouped(*names: str, held: object = 0) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, group in module_names(dict.fromkeys(names, held)).items():
        found.setdefault(group, []).append(name)
    return found


LAYERS = [f"GPT.h.{i}.{part}" for i in range(12) for part in ("attn", "mlp.0", "mlp.2")]


def test_layers_are_one_row_and_the_parts_of_a_layer_are_not() -> None:
    found = grouped(*LAYERS, "GPT.wte", "GPT.head")
    assert {name: len(members) for name, members in found.items()} == {
        "GPT.h.*.attn": 12,
        "GPT.h.*.mlp.0": 12,
        "GPT.h.*.mlp.2": 12,
        "GPT.wte": 1,
        "GPT.head": 1,
    }


def test_several_numbers_are_replaced() -> None:
    names = [f"m.layers.{i}.experts.{j}.w1" for i in range(3) for j in range(4)]
    assert grouped(*names) == {"m.layers.*.experts.*.w1": names}


def test_only_numbers_that_differ_are_replaced() -> None:
    names = [f"m.stages.1.layers.{i}.conv" for i in range(3)]
    assert grouped(*names, "m.stages.1.pool") == {
        "m.stages.1.layers.*.conv": names,
        "m.stages.1.pool": ["m.stages.1.pool"],
    }
    assert set(grouped("m.layers.0.conv", "m.head")) == {"m.layers.0.conv", "m.head"}


def test_a_layer_without_parts_is_a_layer_if_another_has_parts() -> None:
    names = [f"m.h.{i}" for i in range(6)]
    assert grouped(*names, "m.h.3.mlp") == {"m.h.*": names, "m.h.3.mlp": ["m.h.3.mlp"]}


def test_checkpointed_layers_hold_the_same() -> None:
    names = [f"m.h.{i}" for i in range(6)]
    assert grouped(*names) == {"m.h.*": names}
    held = dict(zip(names, (9, 1, 1, 1, 1, 2), strict=True))
    assert set(module_names(held).values()) == {"m.h.*"}
    different = dict(zip(names, range(6), strict=True))
    assert module_names(different) == {name: name for name in names}
    few = ["m.mlp.0", "m.mlp.1", "m.mlp.2"]
    assert set(grouped(*few)) == set(few)


def test_names_that_are_no_paths_of_modules() -> None:
    for name in ("", ".", "(no module)", "(before the trace)", "0", "a.²", "a.-1", "a.0x"):
        assert module_names({name: 0}) == {name: name}
    assert module_names({}) == {}


def test_a_line_in_several_functions_is_one_row() -> None:
    lines = ["m.py:7 in forward", "m.py:7 in <listcomp>", "m.py:8 in forward", "(no user frame)"]
    assert line_names(lines) == {
        "m.py:7 in forward": "m.py:7",
        "m.py:7 in <listcomp>": "m.py:7",
        "m.py:8 in forward": "m.py:8 in forward",
        "(no user frame)": "(no user frame)",
    }


PARTS = st.sampled_from(["h", "mlp", "0", "1", "2", "10", "*", "(no module)", ""])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
PLACES = st.one_of(
    st.sampled_from(list(NoPlace)),
    st.builds(
        Place,
        st.sampled_from(["/a.py", "b c.py", ""]),
        st.integers(1, 3),
        st.sampled_from(["f", "g", ""]),
    ),
)


@pytest.mark.parametrize("by", ["line", "module"])
@given(data=st.data())
def test_groups_sum_to_the_rows_and_open_to_the_rows(by: str, data: st.DataObject) -> None:
    keys = data.draw(st.lists(PLACES if by == "line" else NAMES, max_size=40, unique_by=str))
    rows = [
        ShareRow(key, data.draw(st.integers(0, 4)), data.draw(st.none() | st.integers(0, 3)))
        for key in keys
    ]
    groups = share_groups(rows, by)
    members = [row for group in groups for row in group.members]
    assert sorted(map(str, members)) == sorted(map(str, rows))
    assert sum(group.sum.bytes for group in groups) == sum(row.bytes for row in rows)
    assert [group.sum.bytes for group in groups] == sorted(
        (group.sum.bytes for group in groups), reverse=True
    )
    if all(row.blocks is not None for row in rows):
        blocks = [group.sum.blocks for group in groups]
        assert sum(number or 0 for number in blocks) == sum(row.blocks or 0 for row in rows)
    for group in groups:
        if len(group.members) == 1:
            assert group.name == str(group.members[0].key)
        elif by == "module":
            for row in group.members:
                parts, name = str(row.key).split("."), group.name.split(".")
                assert len(parts) == len(name)
                for part, shown in zip(parts, name, strict=True):
                    assert shown in (part, "*")
                    assert shown == part or part.isdigit()
            for i, shown in enumerate(group.name.split(".")):
                if shown == "*":
                    assert len({str(row.key).split(".")[i] for row in group.members}) > 1


@pytest.mark.parametrize("by", ["line", "module", "category"])
@given(data=st.data())
def test_groups_of_changes_sum_to_the_rows_and_open_to_them(by: str, data: st.DataObject) -> None:
    keys = data.draw(st.lists(NAMES if by == "module" else PLACES.map(str), unique=True))
    sizes = st.integers(0, 4)
    rows = [
        DiffRow(key, data.draw(sizes), data.draw(sizes), 1, 1, status, "x" * (status == "moved"))
        for key in keys
        for status in [data.draw(st.sampled_from(["changed", "added", "removed", "moved"]))]
    ]
    groups = change_groups(rows, by)
    members = [row for group in groups for row in group.members]
    assert sorted(row.key for row in members) == sorted(row.key for row in rows)
    totals = [sum(row.delta for row in group.members) for group in groups]
    assert sum(totals) == sum(row.delta for row in rows)
    if by != "category":  # they stay in the order of the diff
        assert [abs(total) for total in totals] == sorted(map(abs, totals), reverse=True)
    for group in groups:
        changes = [abs(row.delta) for row in group.members]
        assert changes == sorted(changes, reverse=True)
        assert len({row.status for row in group.members}) == 1
        assert len({row.delta > 0 for row in group.members}) == 1
        assert len(group.members) == 1 or not any(row.moved_from for row in group.members)


def test_a_diff_has_one_row_for_equal_layers() -> None:
    rows = tuple(
        DiffRow(f"GPT.h.{i}.mlp.act", 1 << 20, 2 << 20, 1, 1, "changed") for i in range(48)
    )
    peak = PeakDiff(0, "cuda:0", Peak.exactly(1), Peak.exactly(2), "", "", {"module": rows})
    diff = Diff("a", "b", (peak,), ())
    text = " ".join(drawn(diff, by=("module",)).split())
    assert "48.0 MiB 96.0 MiB +48.0 MiB GPT.h.*.mlp.act ×48" in text
    page = Drawing().section(diff_sections(diff, ("module",))[2])
    assert page.index("×48") < page.index("GPT.h.7.mlp.act")


def table(modules: list[tuple[str, int]]) -> ShareTable:
    rows = tuple(ShareRow(name, size, 1) for name, size in modules)
    return ShareTable(sum(row.bytes for row in rows), rows, Remainder("0 more modules", 0, 0))


def report_of(modules: ShareTable) -> Report:
    return replace(summarize(build.recording([build.step(0, {"forward": 5})])), top_modules=modules)


def drawn(report: Report | Diff, form: str = "text", **options: object) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    render(report, form, stream, **options)
    return stream.buffer.getvalue().decode()


MODULES = [(f"GPT.h.{i}.mlp.act", 64 << 20) for i in range(48)] + [("GPT.head", 1 << 20)]


def test_the_text_has_one_row_and_verbose_text_also_its_members() -> None:
    report = report_of(table(MODULES))
    text = drawn(report)
    assert "GPT.h.*.mlp.act ×48" in text
    assert "3.0 GiB" in text
    assert "GPT.h.7.mlp.act" not in text
    full = drawn(report, full=True)
    assert all(f" {name}\n" in full for name, _ in MODULES)


def test_markdown_has_one_row() -> None:
    assert "`GPT.h.*.mlp.act` ×48" in drawn(report_of(table(MODULES)), "markdown")


def test_rows_that_are_left_out_are_counted_one_by_one() -> None:
    more = [*MODULES, *((f"GPT.norm.{i}.w", 1) for i in range(5))]
    text = " ".join(drawn(report_of(table(more)), top=1).split())
    assert "(6 more modules)" in text
    assert "total" in text


def test_a_table_that_is_not_complete_is_not_grouped() -> None:
    whole = table(MODULES)
    some = ShareTable(whole.total, whole.rows[:3], Remainder("46 more modules", 45 << 26, 46))
    text = drawn(report_of(some))
    assert "*" not in text.partition("Modules at the peak")[2].partition("\n\n")[0]


def test_a_line_opens_to_its_modules() -> None:
    modules = tuple(ShareRow(name, size, 1) for name, size in MODULES)
    total = sum(row.bytes for row in modules)
    line = LineRow(Place("/a/m.py", 7, "forward"), total, 49, modules)
    lines = ShareTable(total, (line,), Remainder("0 more lines", 0, 0))
    report = replace(report_of(table(MODULES)), top_lines=lines)
    text = drawn(report).partition("Lines at the peak")[2].partition("Modules")[0]
    assert "m.py:7 in forward" in text
    assert "GPT" not in text
    full = drawn(report, full=True).partition("Lines at the peak")[2].partition("Modules")[0]
    assert "GPT.h.*.mlp.act ×48" in full
    assert "GPT.head" in full
    page = Drawing().section(share_sections(report, 10)[1])
    assert page.index("<details") < page.index("GPT.h.*.mlp.act") < page.index("GPT.head")
    (row,) = cut_to(lines, 10, "lines").rows
    assert type(row) is ShareRow  # as documents have it


def test_a_page_opens_a_row_to_its_members() -> None:
    *_, modules = share_sections(report_of(table(MODULES)), 10)
    page = Drawing().section(modules)
    closed, _, opened = page.partition("<details")
    assert "GPT.h.7.mlp.act" not in closed
    assert opened.index("×48") < opened.index("<table") < opened.index("GPT.h.7.mlp.act")
    assert opened.count("GPT.h.") == 49
    assert opened.count("64.0 MiB") == 48
