"""What the dashboard shows, as plain data: no screen is opened here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.machine.devices import (
    Container,
    Device,
    DeviceIdentity,
    EccCounts,
    GpuProcess,
    Inventory,
)
from gpuprobe.model.machine.monitor import Moment, ProcessLoad, XidNote
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.probes.monitor import Monitor
from gpuprobe.testing import fleets
from gpuprobe.tui.monitor.device_panes import (
    PLOTS,
    device_detail,
    device_table,
    waterfall_bar,
    waterfall_legend,
)
from gpuprobe.tui.monitor.devices import device_rows
from gpuprobe.tui.monitor.history import GONE_AFTER, DeviceHistory, numbers
from gpuprobe.tui.monitor.process_panes import process_heading, process_layout, process_line
from gpuprobe.tui.monitor.processes import SORTS, ListOptions, age_text, process_rows
from gpuprobe.tui.widgets.palette import PALETTES, default_palette
from gpuprobe.tui.widgets.plot import spark
from gpuprobe.tui.widgets.styled_text import bar, fit, left, line_width, right, text_of

MIB = 1 << 20
words = st.text(max_size=40)


def moments(fleet: str, count: int = 3) -> list[Moment]:
    with Monitor(fleet, moving=True) as monitor:
        return [monitor.read() for _ in range(count)]


def read(value: object) -> Reading[object]:
    return Reading(value, "test")


def process(
    pid: int, memory: int | None = MIB, device: str = "GPU-a", **facts: object
) -> GpuProcess:
    size: Bytes | Unavailable = Unavailable("refused", ReadStatus.DENIED)
    if memory is not None:
        size = Bytes(memory)
    described = {name: read(value) for name, value in facts.items()}
    return GpuProcess(pid, device, ("compute",), Reading(size, "nvml"), **described)  # type: ignore[arg-type]


def moment(processes: Sequence[GpuProcess], loads: Sequence[ProcessLoad] = ()) -> Moment:
    devices = tuple(
        Device(DeviceIdentity(uuid=f"GPU-{name}", nvml_index=index))
        for index, name in enumerate("abcdefghijkl")
    )
    found = Inventory(1000.0, (), devices=devices, processes=tuple(processes))
    return Moment(found, processes=tuple(loads))


# -- lines


@given(words, st.integers(0, 60))
def test_text_fits_its_column_whatever_its_characters(text: str, columns: int) -> None:
    from gpuprobe.model.text import visible

    shown = visible(text)
    for made in (left(shown, columns), right(shown, columns)):
        assert line_width(((made, ""),)) == columns


@given(st.lists(st.tuples(words, st.sampled_from(["", "dim"])), max_size=6), st.integers(1, 80))
def test_a_line_is_exactly_as_wide_as_asked(spans: list[tuple[str, str]], columns: int) -> None:
    from gpuprobe.model.text import visible

    line = fit(tuple((visible(text), role) for text, role in spans), columns)
    assert line_width(line) == columns


@given(st.floats(0, 1), st.integers(1, 60))
def test_a_bar_fills_its_columns(share: float, columns: int) -> None:
    made = bar(share, columns, "calm")
    assert line_width(made) == columns
    full = text_of(made).count("█")
    assert full == int(round(share * columns * 8) / 8)


@given(st.lists(st.floats(0, 100), max_size=90), st.integers(1, 60))
def test_a_spark_ends_with_the_latest_and_hides_nothing(values: list[float], columns: int) -> None:
    drawn = spark(values, columns, 100)
    assert len(drawn) == columns
    for value, cell in zip(reversed(values), reversed(drawn), strict=False):
        assert (cell == " ") is (value == 0)
    assert spark([math.nan], 1, 100) == "╌"


# -- devices


@pytest.mark.parametrize("fleet", sorted(fleets()))
def test_every_fleet_can_be_drawn_at_every_size(fleet: str) -> None:
    history = DeviceHistory()
    for one in (seen := moments(fleet, 4)):
        history.add(one)
    rows = device_rows(seen[-1])
    assert len(rows) == len(seen[-1].inventory.devices)
    for columns in (40, 60, 80, 100, 131, 200, 300):
        panel = device_table(
            rows, history, columns, chosen=rows[0].key if rows else "", two_lines=True
        )
        for line in (panel.heading, *panel.lines):
            assert line_width(line) == columns
            assert text_of(line).isprintable()
        for row in rows:
            for height in (1, 3, 8, 20):
                lines = device_detail(row, history, columns, height)
                assert [line_width(line) for line in lines] == [columns] * height


def test_what_is_missing_is_said_and_is_never_nought() -> None:
    rows = device_rows(moments("denied")[-1])
    assert any(math.isnan(row.power) and row.power_text == "denied" for row in rows)
    lost = [row for row in device_rows(moments("lost-gpu")[-1]) if row.lost]
    assert len(lost) == 2
    for row in lost:
        assert row.badges[0].text == "LOST"
        assert math.isnan(row.memory)


def test_badges_name_the_worst_first() -> None:
    with Monitor("ecc") as monitor:
        monitor.read()
        rows = device_rows(monitor.read())
    badges = [badge.text for badge in rows[0].badges]
    assert badges[0] == "Xid 48×2"
    assert any(badge.startswith("ECC ") for row in rows for badge in [b.text for b in row.badges])
    throttled = device_rows(moments("throttled")[-1])
    found = {(b.text, b.role) for row in throttled for b in row.badges}
    assert ("power cap", "badge-warning") in found
    assert any(role == "badge-bad" and "thermal" in text for text, role in found)


def test_an_xid_is_shown_at_its_device_only() -> None:
    base = moments("8xh100")[-1]
    key = base.inventory.devices[3].key
    rows = device_rows(replace(base, xids=(XidNote(key, 79, 1, 5.0, "fell off", "error"),)))
    with_xid = [row.index for row in rows if any(b.text == "Xid 79" for b in row.badges)]
    assert with_xid == ["3"]


def test_the_instances_of_a_divided_gpu_are_listed() -> None:
    rows = device_rows(moments("8xh100")[-1])
    assert rows[7].instances
    assert rows[7].instances[0].startswith("7.0 3g.40gb ")
    lines = device_detail(rows[7], DeviceHistory(), 100, 10)
    assert any("7.0 3g.40gb" in text_of(line) for line in lines)


def test_the_waterfall_shows_every_part_to_scale() -> None:
    for row in device_rows(moments("8xh100")[-1]):
        if not row.parts:
            continue
        shown = [part for part in row.parts if part.size > 0]
        for columns in (len(shown), 30, 200):
            spans = waterfall_bar(row, columns)
            assert line_width(spans) == columns
            assert [role for _, role in spans] == [f"part-{p.part.value}" for p in shown]
        drawn = {role: len(text) for text, role in waterfall_bar(row, 200)}
        for part in shown:
            exact = part.size / row.total * 200
            assert abs(drawn[f"part-{part.part.value}"] - exact) <= len(shown)
        legend = " ".join(text_of(line) for line in waterfall_legend(row, 50, plain=True))
        assert all(part.name in legend for part in shown)


def test_history_is_bounded_and_forgets_what_is_gone() -> None:
    first = moments("8xh100", 2)[-1]
    history = DeviceHistory(kept=10)
    for _ in range(25):
        history.add(first)
    key = first.inventory.devices[0].key
    assert len(history.of(key, "power")) == 10
    assert set(numbers(first.inventory.devices[0], None)) == {name for name, _, _ in PLOTS}
    empty = replace(first, inventory=replace(first.inventory, devices=()), links=())
    for _ in range(GONE_AFTER + 1):
        history.add(empty)
    assert not list(history.keys())
    assert history.of(key, "power") == []


# -- processes


def test_processes_say_who_where_and_for_how_long() -> None:
    rows = process_rows(moments("8xh100")[-1], ListOptions())
    first = rows[0]
    assert (first.user, first.gpu, first.place) == ("alice", "3", "rank 3 job 918273.0")
    assert first.memory_text == "69.7 GiB"
    assert {row.gpu for row in rows} >= {"7.0"}  # an instance of a partitioned GPU
    assert any(row.place.startswith("docker ") for row in rows)
    assert any(row.place.startswith("pod ") for row in rows)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0 s"),
        (59.9, "59 s"),
        (60, "1:00"),
        (3605, "1:00:05"),
        (86400 * 5 + 3 * 3600, "5d 03h"),
        (86400 * 120, "120 days"),
    ],
)
def test_ages_in_words(seconds: float, words: str) -> None:
    assert age_text(seconds) == words


numbers_of = st.one_of(st.none(), st.integers(0, 5))
listed = st.lists(
    st.builds(
        lambda pid, memory, at, user: process(pid, memory, f"GPU-{at}", user=user),
        st.integers(2, 12),
        numbers_of,
        st.sampled_from("abcdefghijkl"),
        st.sampled_from(["ann", "bob", "\x1b[31m"]),
    ),
    max_size=12,
    unique_by=lambda p: (p.pid, p.device),
)
loaded = st.lists(
    st.builds(
        lambda pid, parent: ProcessLoad(pid, parent, pid * 7, f"name{pid}"),
        st.integers(2, 12),
        st.integers(0, 14),
    ),
    unique_by=lambda load: load.pid,
)


@given(listed, loaded, st.sampled_from(SORTS), st.booleans(), st.booleans())
def test_sorting_and_trees_lose_and_invent_no_process(
    processes: list[GpuProcess], loads: list[ProcessLoad], sort: str, reverse: bool, tree: bool
) -> None:
    now = moment(processes, loads)
    rows = process_rows(now, ListOptions(sort=sort, reverse=reverse, tree=tree))
    real = [row for row in rows if row.device]
    assert sorted((r.pid, r.device) for r in real) == sorted((p.pid, p.device) for p in processes)
    assert len({row.identity for row in rows}) == len(rows)
    if not tree:
        values = [r.memory for r in rows]
        if sort == "memory":
            known = [v for v in values if v is not None]
            assert known == sorted(known, reverse=not reverse)
            assert values == known + [None] * (len(values) - len(known))
    for row in rows:
        assert row.branch.isprintable() or not row.branch
        assert row.user.isprintable()


def test_gpu_ten_comes_after_gpu_nine() -> None:
    now = moment([process(1, device=f"GPU-{name}") for name in "jka"])
    assert [row.gpu for row in process_rows(now, ListOptions(sort="gpu"))] == ["0", "9", "10"]


def test_the_tree_puts_workers_under_their_launcher() -> None:
    workers = [process(pid, MIB * pid, command=f"w{pid}") for pid in (10, 11)]
    other = process(50, MIB, command="other")
    loads = [
        ProcessLoad(5, 1, 1, "torchrun"),
        ProcessLoad(10, 5, 2, "python"),
        ProcessLoad(11, 5, 3, "python"),
        ProcessLoad(50, 1, 4, "python"),
    ]
    rows = process_rows(moment([*workers, other], loads), ListOptions(tree=True))
    shown = [(row.branch, row.command, row.memory_text) for row in rows]
    assert shown == [
        ("", "torchrun", "21.0 MiB"),
        ("├─ ", "w11", "11.0 MiB"),
        ("└─ ", "w10", "10.0 MiB"),
        ("", "other", "1.0 MiB"),
    ]


def test_parents_in_a_circle_are_all_shown() -> None:
    loads = [ProcessLoad(10, 11, 1, "a"), ProcessLoad(11, 10, 2, "b")]
    rows = process_rows(moment([process(10), process(11)], loads), ListOptions(tree=True))
    assert {row.pid for row in rows} == {10, 11}


def test_pinned_processes_stay_on_top_and_a_new_one_with_the_number_does_not() -> None:
    now = moment([process(10, 9), process(11, 5)], [ProcessLoad(11, 1, 7), ProcessLoad(10, 1, 3)])
    wish = ListOptions(pinned=frozenset({(11, 7)}))
    assert [row.pid for row in process_rows(now, wish)] == [11, 10]
    again = moment([process(10, 9), process(11, 5)], [ProcessLoad(11, 1, 8)])
    assert [row.pid for row in process_rows(again, wish)] == [10, 11]


@pytest.mark.parametrize(
    ("needle", "pids"),
    [
        ("", {10, 11, 12}),
        ("TRAIN", {10, 11}),
        ("train user:bob", {11}),
        ("user:train", set()),
        ("gpu:2", {12}),
        ("pid:1", {10, 11, 12}),
        ("job:55", {12}),
        ("nothing", set()),
    ],
)
def test_filters(needle: str, pids: set[int]) -> None:
    now = moment(
        [
            process(10, user="ann", command="python train.py"),
            process(11, user="bob", command="python train.py"),
            process(12, device="GPU-c", user="bob", container=Container("slurm", job="55")),
        ]
    )
    assert {row.pid for row in process_rows(now, ListOptions(needle=needle))} == pids
    by_device = process_rows(now, ListOptions(device="GPU-c"))
    assert [row.pid for row in by_device] == [12]


@pytest.mark.parametrize("fleet", ["8xh100", "hostile", "denied"])
def test_the_table_of_processes_fits_every_width(fleet: str) -> None:
    now = moments(fleet)[-1]
    for columns in (40, 60, 80, 120, 300):
        chosen = process_layout(columns)
        for tree in (False, True):
            wish = ListOptions(tree=tree)
            for row in process_rows(now, wish):
                line = process_line(row, chosen)
                assert line_width(line) == columns
                assert text_of(line).isprintable()
            assert line_width(process_heading(chosen, wish)) == columns
        for column, first, wide in chosen.shown:
            assert chosen.sort_at(first) == column.sort
            assert text_of(process_heading(chosen, ListOptions()))[first : first + wide].strip("▼ ")
        assert chosen.sort_at(columns - 1) == "command"


# -- themes


def test_every_theme_has_every_role_and_rich_understands_it() -> None:
    from rich.style import Style

    roles = {name: set(palette.roles) for name, palette in PALETTES.items()}
    assert len(set(map(frozenset, roles.values()))) == 1
    for palette in PALETTES.values():
        for style in palette.roles.values():
            Style.parse(style)
    plain = PALETTES["no colour"]
    assert plain.plain
    assert all(Style.parse(style).color is None for style in plain.roles.values())


def test_no_color_is_obeyed() -> None:
    assert default_palette({"NO_COLOR": "1"}) == "no colour"
    assert default_palette({"NO_COLOR": ""}) == "dark"


def test_ecc_counts_of_nought_are_no_badge() -> None:
    device = Device(DeviceIdentity(nvml_index=0), ecc=EccCounts(uncorrected_volatile=read(0)))  # type: ignore[arg-type]
    rows = device_rows(Moment(Inventory(0.0, (), devices=(device,))))
    assert rows[0].badges == ()
