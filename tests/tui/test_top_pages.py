"""`gpuprobe top`: a process in depth, tags, what is selected, no GPU, and curves with axes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from screen_svg import screen_text
from test_top_screens import app_of, child, moments, settle, shows, until

from gpuprobe.cli import main
from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.machine.monitor import Moment
from gpuprobe.model.machine.selection import Selection
from gpuprobe.model.values import Bytes, Reading, Unavailable
from gpuprobe.probes.monitor import Monitor
from gpuprobe.probes.secrets import details_without_secrets
from gpuprobe.tui.monitor.app import TopApp
from gpuprobe.tui.monitor.history import PROCESS_GONE_AFTER, ProcessHistory
from gpuprobe.tui.monitor.model import TopModel, divide
from gpuprobe.tui.monitor.screens import EndProcess, ProcessScreen
from gpuprobe.tui.widgets.plot import area, area_plot, stretched
from gpuprobe.tui.widgets.styled_text import line_width, text_of

# -- curves


def dots(cell: str) -> int:
    return (ord(cell) - 0x2800).bit_count() if cell != " " else 0


@given(
    st.lists(st.floats(0, 100) | st.just(math.nan), max_size=50),
    st.integers(1, 20),
    st.integers(1, 8),
)
def test_a_curve_has_as_many_dots_as_its_values_are_high(
    values: list[float], columns: int, rows: int
) -> None:
    lines = area(values, columns, rows, 100)
    assert [len(line) for line in lines] == [columns] * rows
    shown = values[-2 * columns :]
    known = [value for value in shown if value > 0]
    drawn = sum(dots(cell) for line in lines for cell in line)
    assert drawn == sum(max(1, round(value / 100 * 4 * rows)) for value in known)


def test_the_latest_value_of_a_curve_is_at_the_right_end() -> None:
    top, bottom = area([100, 25], 3, 2, 100)
    assert (top, bottom) == ("  ⡇", "  ⣧")


def test_a_curve_that_has_just_begun_is_stretched_and_its_axis_tells() -> None:
    found, each = stretched([0.0, 10.0], 120)
    assert each == 4
    assert list(found) == [0.0, 2.5, 5.0, 7.5, 10.0]
    few = area_plot([1.0] * 10, 40, 8, 1.0, "{:.0f}".format, 2.0)
    many = area_plot([1.0] * 500, 40, 8, 1.0, "{:.0f}".format, 2.0)
    assert "└-76 s " in text_of(few[-1])
    assert "└-3 min " in text_of(many[-1])
    assert {line_width(line) for line in (*few, *many)} == {40}


# -- a process in depth

SECRET = "hunter2hunter2"


def test_a_process_is_read_without_its_secrets() -> None:
    environ = {
        "PATH": os.environ["PATH"],
        "WANDB_API_KEY": SECRET,
        "DATABASE": f"postgres://me:{SECRET}@db/x",
        "PLAIN": "yes",
    }
    code = "import sys; sys.stdin.read()"
    command = [sys.executable, "-c", code, "--password", "letmein99", "--seed", "3", SECRET]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
    try:
        while Path(f"/proc/{made.pid}/cmdline").read_bytes().count(b"\0") < len(command):
            pass  # between fork and exec it is this process
        found = details_without_secrets(made.pid, 0)
    finally:
        made.communicate()
    assert isinstance(found.environment, tuple)
    variables = dict(found.environment)
    assert variables["PLAIN"] == "yes"
    assert variables["WANDB_API_KEY"] == "<secret>"
    assert isinstance(found.arguments, tuple)
    assert found.arguments[3:] == ("--password", "<secret>", "--seed", "3", "<secret>")
    assert SECRET not in repr(found)
    assert "letmein99" not in repr(found)
    assert found.folder == str(Path.cwd())
    assert found.threads == 1
    gone = details_without_secrets(made.pid, 0)
    assert isinstance(gone.environment, Unavailable)
    other = details_without_secrets(os.getpid(), 1)  # the number is another process's now
    assert isinstance(other.arguments, Unavailable)


async def test_enter_opens_the_page_of_a_process() -> None:
    app = TopApp("8xh100", interval=0.05)
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot, app)
        await until(pilot, lambda: shows(app, "rank 0"))
        await pilot.press("P", "g", "enter")  # by PID: rank 0
        assert isinstance(app.screen, ProcessScreen)
        await until(pilot, lambda: shows(app, "WANDB_API_KEY"))
        text = "\n".join(screen_text(app))
        assert "process 41000" in text
        assert "python3 -u train.py --config llama-8b.yaml" in text
        assert "folder    /home/alice/llama" in text
        assert "hf_0123456789" not in text
        assert "memory on GPU 0 69.7 GiB" in text
        assert "SM of GPU 0" in text
        assert "expandable_segments:True" in text
        await pilot.press("enter")
        assert any("not recorded" in n.message for n in app._notifications)
        await pilot.press("K")  # a process of the demo is not on this machine
        assert isinstance(app.screen, ProcessScreen)
        await pilot.press("escape")
        assert shows(app, "processes 8")


async def test_the_page_of_a_process_that_ended_keeps_its_last_readings() -> None:
    first, last = moments("8xh100")
    app = app_of(first, last)
    async with app.run_test(size=(100, 40)) as pilot:
        await until(pilot, lambda: len(app.model.history.host_cpu()) == 2)  # no more will come
        await settle(pilot, app)
        await pilot.press("P", "g", "enter")
        gone = [p for p in last.inventory.processes if p.pid != 41000]
        app.model.add(replace(last, inventory=replace(last.inventory, processes=tuple(gone))))
        app._show()
        await until(pilot, lambda: shows(app, "this process has ended"))
        assert shows(app, "69.7 GiB")


def test_the_history_of_processes_is_bounded() -> None:
    base = moments("8xh100")[-1]
    history = ProcessHistory(kept=10)
    for at in range(200):
        one = replace(base.inventory.processes[0], pid=5000 + at // 2)
        held = base.inventory.processes[1]
        history.add(
            replace(base, inventory=replace(base.inventory, processes=(one, held)), processes=())
        )
    assert len(list(history.keys())) <= PROCESS_GONE_AFTER + 2
    kept = history.of((held.pid, 0, held.device), "memory")
    assert isinstance(held.memory.value, int)
    assert kept == [float(held.memory.value)] * 10
    assert history.of((1, 1, "GPU"), "memory") == []


# -- tags


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
async def test_tagged_processes_are_ended_together_and_others_are_not() -> None:
    started = [child() for _ in range(3)]
    inventory = Inventory(0.0, (), processes=tuple(process for _, process, _ in started))
    # A GPU, or there would be no table.
    inventory = replace(inventory, devices=moments("8xh100")[-1].inventory.devices[:1])
    key = inventory.devices[0].key
    inventory = replace(
        inventory, processes=tuple(replace(p, device=key) for p in inventory.processes)
    )
    app = app_of(Moment(inventory, processes=tuple(load for _, _, load in started)))
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            await settle(pilot, app)
            await pilot.press("P", "g", "x", "x")  # the first two by PID
            assert shows(app, "2 tagged, 2.0 GiB")
            await pilot.press("K")
            assert isinstance(app.screen, EndProcess)
            assert shows(app, "End 2 processes?")
            await pilot.press("t")
            await until(pilot, lambda: len(app._notifications) == 1)
            assert "2 processes" in next(iter(app._notifications)).message
            running = sorted((made for made, _, _ in started), key=lambda made: made.pid)
            assert [made.wait(20) for made in running[:2]] == [-signal.SIGTERM] * 2
            assert running[2].poll() is None
            await pilot.press("X")
            assert not app.model.tagged
    finally:
        for made, _, _ in started:
            made.kill()
            made.communicate()


# -- what is selected


def test_users_processes_and_gpus_can_be_selected() -> None:
    inventory = moments("8xh100")[-1].inventory
    assert {p.pid for p in Selection(users=("bob",)).of(inventory).processes} == {60321, 60999}
    assert {p.pid for p in Selection(users=("1002",)).of(inventory).processes} == {60321, 60999}
    assert {p.pid for p in Selection(pids=(52110,)).of(inventory).processes} == {52110}
    two = Selection(gpus=("0", "5")).of(inventory)
    assert [d.identity.nvml_index for d in two.devices] == [0, 5]
    assert {p.pid for p in two.processes} == {41000, 60321, 60999}
    assert len(two.waterfalls) == 2
    by_uuid = Selection(gpus=("gpu-3ebf1335",)).of(inventory)
    by_place = Selection(gpus=("0f:00.0",)).of(inventory)
    assert [d.identity.nvml_index for d in by_uuid.devices] == [0]
    assert by_place.devices == by_uuid.devices
    assert Selection(gpus=("0", "9", "x")).unknown_gpus(inventory) == ("9", "x")
    assert Selection().of(inventory) is inventory


def test_a_selection_is_printed_and_a_wrong_gpu_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["top", "--once", "--demo", "--only", "4,5", "--user", "bob"]) == 0
    text = capsys.readouterr().out
    assert "bob" in text
    assert "alice" not in text
    assert "vllm" not in text
    assert "2 GPUs" in text
    assert main(["top", "--once", "--demo", "--only", "4,9"]) == 2
    assert "no such GPU: 9" in capsys.readouterr().err
    assert main(["top", "--once", "--demo", "--only", ","]) == 2


async def test_the_screen_shows_what_is_selected_only() -> None:
    app = app_of(*moments("8xh100"), selection=Selection(users=("alice",), gpus=("0", "1")))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot, app)
        assert shows(app, "processes 2 ")
        assert shows(app, " only user alice, GPU 0, GPU 1 ")
        assert len(app.model.devices) == 2
    wrong = app_of(*moments("8xh100"), selection=Selection(gpus=("42",)))
    async with wrong.run_test(size=(80, 24)) as pilot:
        await settle(pilot, wrong)
        assert shows(wrong, "matches --only 42. It has 0 H100 80GB HBM3")


# -- no GPU, and what is where


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (200, 60)])
async def test_without_a_gpu_the_screen_explains_what_to_do(size: tuple[int, int]) -> None:
    app = TopApp("no-driver", interval=60)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: shows(app, "No GPU is available"))
        lines = screen_text(app)
        assert not any("MEMORY▼" in line for line in lines)
        assert any("doctor" in line for line in lines)
        if size[1] >= 24:
            assert any("gpuprobe top --demo" in line for line in lines)
        at = next(line for line in lines if "No GPU is available" in line)
        left = len(at) - len(at.lstrip())
        assert left >= (size[0] - 76) // 2 - 1  # in the middle


async def test_a_gpu_that_comes_back_has_its_tables_again() -> None:
    here = moments("8xh100")[-1]
    empty = replace(here, inventory=replace(here.inventory, devices=(), processes=()))
    app = app_of(empty)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: len(app.model.history.host_cpu()) == 2)  # no more will come
        await until(pilot, lambda: shows(app, "No GPU is available"))
        app.model.add(here)
        app._arrange()
        await until(pilot, lambda: shows(app, "MEMORY▼"))
        assert app._processes.has_focus
        assert not shows(app, "No GPU is available")


def test_lines_that_processes_leave_unused_go_to_the_plots() -> None:
    few = divide(60, 8, noted=False, processes=8)
    many = divide(60, 8, noted=False, processes=80)
    assert sum(few) == sum(many) == 60
    assert few.detail > many.detail
    assert 10 <= few.processes < many.processes
    # A process more or less does not move the panes.
    assert divide(60, 8, noted=False, processes=7) == divide(60, 8, noted=False, processes=6)


def test_the_colours_of_bars_are_explained() -> None:
    model = TopModel()
    for one in moments("8xh100"):
        model.add(one)
    panel = model.panel(120, two_lines=True)
    legend = text_of(panel.legend)
    shown = {part.name for row in model.devices for part in row.parts if part.size}
    assert shown
    assert all(name in legend for name in shown)
    assert not model.panel(120, two_lines=False).legend


def test_the_demo_has_a_host_ages_and_cpu_time() -> None:
    with Monitor("8xh100", moving=True) as monitor:
        seen = [monitor.read() for _ in range(10)]
    last = seen[-1]
    assert last.inventory.host.hostname == "node-17"
    assert last.inventory.host.cpu_count == 112
    assert isinstance(last.host.cpu.value, float)
    assert 5 < last.host.cpu.value < 12
    cpu = {p.pid: p.cpu.value for p in last.processes if isinstance(p.cpu.value, float)}
    assert len(cpu) == len(last.processes)
    assert 100 < cpu[41000] < 160
    for process in last.inventory.processes:
        started = process.started_at.value
        assert isinstance(started, float)
        assert 3600 < last.inventory.taken_at - started < 10 * 86400
    assert {load.memory for load in last.processes} != {Reading(Bytes(4 << 30), "host")}
