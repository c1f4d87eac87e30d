"""The dashboard in Textual's test driver: keys, mouse, trouble, and pictures of every screen."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from screen_svg import screen_svg, screen_text
from textual.pilot import Pilot

from gpuprobe.api.doctor import diagnose
from gpuprobe.errors import DataError, EnvironmentUnavailable
from gpuprobe.model.machine.devices import GpuProcess, HostInfo, Inventory
from gpuprobe.model.machine.monitor import HostLoad, Moment, ProcessLoad
from gpuprobe.model.values import Bytes, Reading, Unavailable
from gpuprobe.probes.host import parse_stat
from gpuprobe.probes.monitor import Monitor
from gpuprobe.recording.monitor_log import MomentLog, ReplayedLog
from gpuprobe.tui.monitor import settings
from gpuprobe.tui.monitor.app import TopApp
from gpuprobe.tui.monitor.keys import KEYS
from gpuprobe.tui.monitor.model import divide
from gpuprobe.tui.monitor.processes import SORTS
from gpuprobe.tui.monitor.reader_thread import Done, Ended, Failed, MachineReader, Taken
from gpuprobe.tui.monitor.screens import DoctorScreen, EndProcess
from gpuprobe.tui.monitor.settings import Settings
from gpuprobe.tui.probe_app import APP_KEYS, TextScreen
from gpuprobe.tui.widgets.prompt import Prompt

SIZES = [(60, 16), (100, 30), (200, 60)]
GOLDEN = Path(__file__).parent / "screens"


class Script:
    """Moments that were made before; the last one stays."""

    def __init__(self, moments: list[Moment | Exception]) -> None:
        self.moments = list(moments)
        self.reads = 0

    def read(self) -> Moment | None:
        self.reads += 1
        one = self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]
        if isinstance(one, Exception):
            raise one
        return one

    @contextmanager
    def open(self) -> Iterator[MachineReader]:
        yield self


def moments(fleet: str, count: int = 2) -> list[Moment]:
    return list(_moments(fleet, count, os.getuid()))


@functools.cache
def _moments(fleet: str, count: int, uid: int) -> tuple[Moment, ...]:
    """``uid``: whose processes are "your processes" in the moments."""
    with Monitor(fleet, moving=True) as monitor:
        return tuple(monitor.read() for _ in range(count))


def app_of(*script: Moment | Exception, interval: float = 60, **options: Any) -> TopApp:
    """Shows two of the moments at once, and another one each ``interval`` seconds."""
    return TopApp(interval=interval, source=Script(list(script)).open, **options)


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the app run until the condition holds; fails after a minute."""
    for _ in range(6000):
        if condition():
            return
        await pilot.pause(0.01)
    raise AssertionError("it never happened:\n" + "\n".join(screen_text(pilot.app)))


def shows(app: TopApp, text: str) -> bool:
    return any(text in line for line in screen_text(app))


async def settle(pilot: Pilot[None], app: TopApp) -> None:
    """Until what was read last is on the screen."""
    await until(pilot, lambda: app.first_paint is not None)
    await pilot.pause()


# -- what is shown


@pytest.mark.parametrize("size", [(80, 24), (300, 100)])
async def test_a_fleet_at_every_size(size: tuple[int, int]) -> None:
    app = app_of(*moments("8xh100", 4), interval=0.05)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: len(app.model.history.host_cpu()) > 4)
        await settle(pilot, app)
        await until(pilot, lambda: shows(app, "alice"))
        lines = screen_text(app)
        assert len(lines) == size[1]
        assert "demo: 8xh100" in lines[0]
        assert shows(app, "70.2/79.6 GiB")
        assert shows(app, "q quit")
        assert shows(app, "other users") is (size[1] >= 24)
        assert shows(app, "NVLink in") is (size[0] >= 200)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 16])
@pytest.mark.parametrize("size", [(60, 16), (100, 30), (300, 100)])
def test_the_lines_of_the_screen_are_divided_without_rest(
    count: int, size: tuple[int, int]
) -> None:
    for height in range(2, size[1] + 1):
        for noted in (False, True):
            made = divide(height, count, noted=noted)
            assert sum(made) == height
            assert min(made.devices, made.detail, made.processes, made.note) >= 0
            if height >= 12:
                assert made.processes >= 4
                assert made.devices >= min(count + 1, 3)


async def test_sixteen_gpus_and_hundreds_of_processes_can_be_scrolled() -> None:
    base = moments("8xh100", 2)[-1]
    devices = tuple(
        replace(d, identity=replace(d.identity, uuid=f"GPU-{i:02}", nvml_index=i))
        for i, d in enumerate(base.inventory.devices * 2)
    )
    processes = tuple(
        GpuProcess(1000 + i, f"GPU-{i % 16:02}", ("compute",), Reading(Bytes(i << 20), "nvml"))
        for i in range(400)
    )
    loads = tuple(ProcessLoad(1000 + i, 1, i + 1) for i in range(400))
    big = replace(
        base,
        inventory=replace(base.inventory, devices=devices, processes=processes, waterfalls=()),
        processes=loads,
    )
    app = app_of(big)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, app)
        assert shows(app, "processes 400")
        await pilot.press("G")
        await until(pilot, lambda: shows(app, " 1000 "))
        await pilot.press("g", "pagedown")
        assert app._processes.cursor == app._processes.page
        await pilot.press("tab", "G")
        await until(pilot, lambda: shows(app, "▸  15"))
        assert app.model.chosen == "GPU-15"


async def test_the_cursor_stays_on_its_process_when_the_order_changes() -> None:
    app = app_of(*moments("8xh100"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot, app)
        await pilot.press("j", "j")
        row = app._row()
        assert row is not None
        for key in ("P", "U", "o", "O", "r", "t"):
            await pilot.press(key)
            now = app._row()
            assert now is not None
            assert (now.pid, now.device) == (row.pid, row.device)


# -- keys


async def test_filter_pin_tree_and_sorting_by_keys(tmp_path: Path) -> None:
    file = tmp_path / "top.json"
    app = app_of(*moments("8xh100"), settings_file=file)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot, app)
        await pilot.press("slash")
        assert isinstance(app.screen, Prompt)
        await pilot.press(*"qx", "backspace", "backspace", *"user:bob", "enter")
        assert shows(app, "processes 2 of 8")
        assert app.model.options.needle == "user:bob"
        await pilot.press("slash", *"zzz", "escape")  # dropped: as it was before
        assert app.model.options.needle == "user:bob"
        await pilot.press("escape")
        assert shows(app, "processes 8 ")
        await pilot.press("G", "asterisk", "g")
        assert len(app.model.options.pinned) == 1
        assert app.model.processes[0].pinned
        await pilot.press("U", "U", "t")
        assert (app.model.options.sort, app.model.options.reverse) == ("user", True)
        await pilot.press("tab", "j", "enter")
        assert app.model.options.device == app.model.devices[1].key
        assert shows(app, "on GPU 1")
        await pilot.press("k")  # the filter follows the GPU that is looked at
        assert app.model.options.device == app.model.devices[0].key
        await pilot.press("f", "m", "v")
        assert app.model.options.device == ""
        assert not shows(app, "memory used")
    assert settings.load(file) == (
        Settings(theme="", sort="user", reverse=True, tree=True, detail=False),
        "",
    )
    again = app_of(*moments("8xh100"), settings_file=file)
    assert (again.model.options.sort, again.model.options.tree) == ("user", True)


async def test_themes_are_changed_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = tmp_path / "top.json"
    app = app_of(*moments("8xh100"), settings_file=file)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        pictures = set()
        for _ in range(4):
            await pilot.pause()
            pictures.add(screen_svg(app))
            await pilot.press("d")
        assert len(pictures) == 4
        await pilot.press("d")
    assert settings.load(file)[0].theme == "light"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = app_of(*moments("8xh100"), settings_file=file)
    async with plain.run_test(size=(100, 30)) as pilot:
        await settle(pilot, plain)
        assert plain.model.plain
        assert shows(plain, "oooooo")  # other users' memory, told apart without colour


async def test_help_notes_doctor_and_the_palette_open_and_close() -> None:
    app = TopApp("ecc", interval=60)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        await pilot.press("question_mark")
        await until(pilot, lambda: shows(app, "switch between GPUs and processes"))
        assert isinstance(app.screen, TextScreen)
        await pilot.press("escape", "n")
        await until(pilot, lambda: shows(app, "Notes"))
        await pilot.press("escape", "R")  # those of this machine are not on its GPUs
        await until(pilot, lambda: any("no runs" in n.message for n in app._notifications))
        assert len(app.screen_stack) == 1
        await pilot.press("D")
        await until(pilot, lambda: shows(app, "GP122"))
        assert isinstance(app.screen, DoctorScreen)
        await pilot.press("K", "t")  # keys of the dashboard, which mean nothing here
        assert not app.model.options.tree
        assert len(app.screen_stack) == 2
        await pilot.press("r")
        await until(pilot, lambda: not app.screen._checking)  # type: ignore[attr-defined]
        await pilot.press("escape")
        assert len(app.screen_stack) == 1
        await pilot.press("ctrl+p")
        await until(pilot, lambda: len(app.screen_stack) == 2)
        await pilot.press(*"colour-blind")
        await until(pilot, lambda: shows(app, "change the colours"))
        await pilot.press("enter", "enter")
        await until(pilot, lambda: app.palette.name == "colour-blind")
        await pilot.press("q")
    assert app.return_code == 0


async def test_runs_open_over_the_dashboard() -> None:
    app = app_of(*moments("8xh100"))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        await pilot.press("R")
        await until(pilot, lambda: shows(app, "recorded on this machine"))


@pytest.mark.parametrize("opened", [(), ("question_mark",), ("slash", *"alice")])
async def test_ctrl_c_quits(opened: tuple[str, ...]) -> None:
    """Wherever the focus is; Textual's own binding only says how to quit."""
    app = app_of(*moments("8xh100"))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        await pilot.press(*opened, "ctrl+c")
        await until(pilot, lambda: not app.is_running)
    assert app.return_code == 0


async def test_enter_on_a_screen_over_the_dashboard_opens_no_process() -> None:
    app = app_of(*moments("8xh100"))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, TextScreen))
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, TextScreen)


async def test_pause_and_interval() -> None:
    app = app_of(*moments("8xh100", 30), interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        await pilot.press("space")
        await until(pilot, lambda: shows(app, " paused "))
        await pilot.pause(0.1)
        before = len(app.model.history.host_cpu())
        await pilot.press("full_stop")
        await until(pilot, lambda: len(app.model.history.host_cpu()) > before)
        await pilot.pause(0.1)
        assert len(app.model.history.host_cpu()) == before + 1
        await pilot.press("plus", "plus", "minus")
        assert app.reader.interval == app.model.interval == 0.25
        await pilot.press("space")
        await until(pilot, lambda: len(app.model.history.host_cpu()) > before + 1)


async def test_the_mouse_chooses_sorts_and_presses_keys() -> None:
    app = app_of(*moments("8xh100"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot, app)
        await pilot.click("#devices", offset=(5, 3))
        assert app.model.chosen == app.model.devices[2].key
        await pilot.click("#processes", offset=(5, 4))
        assert app._processes.cursor == 2
        await pilot.click("#processes", offset=(20, 1))
        assert app.model.options.sort in SORTS
        assert app.model.options.sort != "memory"
        await pilot.click("#footer", offset=(2, 0))
        await until(pilot, lambda: isinstance(app.screen, TextScreen))


# -- files


async def test_what_is_on_the_screen_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_of(*moments("8xh100"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot, app)
        await pilot.press("slash", *"alice", "enter", "P", "e", "s")
        await until(pilot, lambda: len(list(tmp_path.iterdir())) == 2)
    (exported,) = tmp_path.glob("*.json")
    document = json.loads(exported.read_text())
    assert document["schema"] == "gpuprobe.top"
    assert [p["pid"] for p in document["processes"]] == [41000, 41001, 41002, 41003]
    assert document["shown"]["filter"] == "alice"
    assert len(document["devices"]) == 8
    (picture,) = tmp_path.glob("*.svg")
    assert "41003" in picture.read_text()
    assert re.fullmatch(r"gpuprobe-screen-[0-9]{8}-[0-9]{6}\.svg", picture.name)


async def test_read_only_writes_nothing_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_of(*moments("8xh100"), readonly=True, settings_file=tmp_path / "c" / "top.json")
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        await pilot.press("e", "s", "K", "U", "d")
        await until(pilot, lambda: len(app._notifications) == 4)
        assert len(app.screen_stack) == 1
    assert not list(tmp_path.iterdir())


async def test_a_log_is_replayed_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    log = MomentLog(path)
    seen = moments("8xh100", 5)
    for one in seen:
        log.write(one)
    with ReplayedLog(path) as replayed:

        @contextmanager
        def source() -> Iterator[MachineReader]:
            yield replayed

        app = TopApp(interval=0.05, source=source, replayed=path.name)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: shows(app, "end of the log"))
            assert app.model.moment == seen[-1]
            await pilot.press("comma")
            await until(pilot, lambda: app.model.moment == seen[-2])
            await pilot.press("comma")
            await until(pilot, lambda: app.model.moment == seen[-3])
            await pilot.press("full_stop")
            await until(pilot, lambda: app.model.moment == seen[-2])
            log.write(seen[0])  # whoever writes it goes on
            await pilot.press("full_stop", "full_stop")
            await until(pilot, lambda: app.model.moment == seen[0])
    log.close()


# -- trouble


_SAFE = ("s", "e", "q", "K", "ctrl+p")  # these write files, end something, or open a foreign screen


@pytest.mark.parametrize("seed", range(2))
async def test_no_order_of_keys_and_sizes_ends_the_screen(seed: int) -> None:
    """Sixty random keys, sizes and readings each; processes and GPUs come and go."""
    draw = random.Random(seed)
    full = moments("8xh100", 4)
    few = [
        replace(
            one,
            inventory=replace(
                one.inventory,
                devices=one.inventory.devices[:1],
                processes=one.inventory.processes[:2],
                waterfalls=(),
            ),
        )
        for one in full
    ]
    none = moments("no-driver", 1)
    app = app_of(full[0])
    names = [
        name for key in (*KEYS, *APP_KEYS) for names in key.actions for name in names.split(",")
    ]
    keys = [name for name in (*names, "enter", "a", "9") if name not in _SAFE]
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
        for _ in range(60):
            action = draw.random()
            if action < 0.3:
                await pilot.resize_terminal(draw.randint(1, 210), draw.randint(1, 70))
            elif action < 0.5:
                app._arrived(Taken(draw.choice([*full, *few, *none])))
            else:
                await pilot.press(draw.choice(keys))
        while len(app.screen_stack) > 1:
            app.pop_screen()
        await pilot.resize_terminal(100, 30)
        app._arrived(Taken(full[0]))
        await until(pilot, lambda: shows(app, "q quit"))
    assert app.crash is None


async def test_what_arrives_after_the_last_screen_is_gone_is_left_alone() -> None:
    """A thread may still be reading when the app ends."""
    (moment,) = moments("8xh100", 1)
    app = app_of(moment)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app)
    assert not app.screen_stack
    for payload in (Taken(moment), Failed("no"), Ended(), Done(print, None)):
        app.on_top_app_arrived(TopApp.Arrived(payload))
    assert app.crash is None


async def test_a_driver_that_goes_away_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    there = moments("8xh100")[-1]
    gone = replace(
        there,
        inventory=replace(
            moments("no-driver", 1)[0].inventory, host=there.inventory.host, demo="8xh100"
        ),
    )
    script = Script([there, there, gone])
    app = TopApp(interval=0.05, source=script.open)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: shows(app, "no GPU is available"))
        await until(pilot, lambda: shows(app, "70.2/79.6 GiB"))  # what was there is still shown
        await until(pilot, lambda: shows(app, "processes 0"))
        script.moments = [there]
        await until(pilot, lambda: not shows(app, "no GPU is available") and shows(app, "alice"))


async def test_readings_that_fail_are_said_and_tried_again() -> None:
    there = moments("8xh100")[-1]
    app = app_of(there, DataError("the disk \x1b[31mis full"), there, interval=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: len(app.model.history.host_cpu()) >= 3)
        assert app.is_running
        assert not shows(app, "\x1b")


async def test_no_driver_denied_lost_and_hostile() -> None:
    for fleet, expected in (
        ("no-driver", "No GPU is available"),
        ("denied", "denied"),
        ("lost-gpu", " LOST "),
        ("hostile", "\\x1b"),
        ("empty", "The driver is loaded, and lists no GPU"),
        ("throttled", "power cap"),
        ("unified", "the host's"),
    ):
        app = TopApp(fleet, interval=0.05)
        async with app.run_test(size=(160, 40)) as pilot:
            await until(pilot, lambda expected=expected, app=app: shows(app, expected))
            assert "\x1b" not in "".join(screen_text(app))
            assert app.is_running


async def test_a_fault_in_the_reading_thread_ends_the_screen_with_its_error() -> None:
    class Broken:
        def read(self) -> Moment:
            raise ZeroDivisionError("a fault")

    @contextmanager
    def source() -> Iterator[MachineReader]:
        yield Broken()

    app = TopApp(interval=0.05, source=source)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: app.crash is not None)
    assert isinstance(app.crash, ZeroDivisionError)
    assert app.return_code == 70
    assert not app.reader._thread.is_alive()


# -- ending a process


def child() -> tuple[subprocess.Popen[bytes], GpuProcess, ProcessLoad]:
    """A real process that waits, and what the screen would know of it."""
    made = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    stat = parse_stat(Path(f"/proc/{made.pid}/stat").read_text())
    assert not isinstance(stat, Unavailable)
    process = GpuProcess(made.pid, "GPU-a", ("compute",), Reading(Bytes(1 << 30), "nvml"))
    return made, process, ProcessLoad(made.pid, os.getpid(), stat.start)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
async def test_ending_a_process_asks_first_and_hits_that_one_only() -> None:
    running, process, load = child()
    inventory = Inventory(time.time(), (), processes=(process,))
    here = Moment(inventory, processes=(load,))
    app = app_of(here)
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            await settle(pilot, app)
            await pilot.press("K")
            assert isinstance(app.screen, EndProcess)
            assert shows(app, f"End process {running.pid}?")
            await pilot.press("escape")
            assert running.poll() is None
            # The number was given to another process meanwhile: nobody is hit.
            app.model.add(replace(here, processes=(replace(load, ticks=load.ticks + 1),)))
            app._show()
            await pilot.press("K", "t")
            await until(pilot, lambda: len(app._notifications) == 1)
            assert "another process" in next(iter(app._notifications)).message
            assert running.poll() is None
            app.model.add(here)
            app._show()
            await pilot.press("K", "t")
            await until(pilot, lambda: len(app._notifications) == 2)
            assert await asyncio.to_thread(running.wait, 20) == -15
            await pilot.press("K", "9")  # it is gone by now
            await until(pilot, lambda: len(app._notifications) == 3)
            assert app.is_running
    finally:
        running.kill()
        running.wait()
        assert running.stdin is not None
        running.stdin.close()


def test_what_cannot_be_held_is_not_signalled() -> None:
    from gpuprobe.probes.host import end_process

    for pid, ticks in ((0, 5), (1, 5), (-4, 5), (os.getpid(), 0), (2**22 + 1, 5)):
        with pytest.raises(EnvironmentUnavailable):
            end_process(pid, ticks)


# -- settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", True),
        ("[]", True),
        ("{", True),
        ('{"sort": "nonsense", "theme": "nonsense", "other": 2}', False),
        ('{"theme": 3}', True),
        ('{"tree": 1}', True),
        ("[" * 100_000, True),
    ],
)
def test_settings_that_make_no_sense_are_defaults(tmp_path: Path, text: str, said: bool) -> None:
    path = tmp_path / "top.json"
    path.write_text(text)
    found, complaint = settings.load(path)
    assert found == Settings()
    assert bool(complaint) is said


def test_where_settings_are() -> None:
    assert settings.settings_path({"XDG_CONFIG_HOME": "/a"}) == Path("/a/gpuprobe/top.json")
    home = settings.settings_path({"XDG_CONFIG_HOME": "b", "HOME": "/h"})
    assert home == Path("/h/.config/gpuprobe/top.json")
    assert settings.settings_path({}) is None
    settings.save(None, Settings())


# -- pictures


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[Moment]]]:
    """Moments of a fleet that are the same on every machine and at every time."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(
        "gpuprobe.recording.running.running", list
    )  # none, whatever this machine does
    time.tzset()
    host = HostInfo("node", "Linux", "3.11.0", 1, 112)
    load = HostLoad(
        Reading(23.0, "host"),
        Reading((9.61, 8.8, 7.95), "host"),
        Reading(Bytes(2 << 40), "host"),
        Reading(Bytes(1800 << 30), "host"),
    )

    def made(fleet: str) -> list[Moment]:
        scripted = []
        for at, one in enumerate(moments(fleet, 90)):
            links = tuple(
                replace(rate, tx=Reading(1.5e9 * (at % 7), "nvml"), rx=Reading(1e9, "nvml"))
                if isinstance(rate.tx.value, float)
                else rate
                for rate in one.links
            )
            listed = tuple(
                replace(p, started_at=Reading(1_700_978_000.0 - 4321 * (p.pid % 100), "host"))
                for p in one.inventory.processes
            )
            inventory = replace(
                one.inventory, taken_at=1_701_000_000.0 + at, host=host, processes=listed
            )
            loads = tuple(replace(p, cpu=Reading(99.0, "host")) for p in one.processes)
            scripted.append(
                replace(one, inventory=inventory, host=load, links=links, processes=loads)
            )
        return scripted

    yield made
    monkeypatch.undo()
    time.tzset()


CASES = [
    *(("devices", "8xh100", size, ()) for size in SIZES),
    *(("doctor", "ecc", size, ("D",)) for size in SIZES),
    ("trouble", "lost-gpu", (100, 30), ()),
    ("help", "8xh100", (100, 30), ("question_mark",)),
    ("filter", "8xh100", (60, 16), ("slash", *"bob")),
    ("end", "8xh100", (100, 30), ("K",)),
    ("light", "8xh100", (100, 30), ("d",)),
    ("no-colour", "8xh100", (100, 30), ("d", "d", "d")),
    ("tree", "8xh100", (100, 30), ("t", "asterisk")),
]


@pytest.mark.parametrize(
    ("name", "fleet", "size", "keys"), CASES, ids=[f"{c[0]}-{c[2][0]}x{c[2][1]}" for c in CASES]
)
async def test_pictures(
    fixed: Callable[[str], list[Moment]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fleet: str,
    size: tuple[int, int],
    keys: tuple[str, ...],
) -> None:
    """GPUPROBE_UPDATE_SCREENS=1 writes them anew; then look at each one."""
    script = fixed(fleet)
    monkeypatch.setattr("gpuprobe.reporters.text.info.__version__", "0.0")
    source = Script([script[-1]])
    app = TopApp(interval=1.0, source=source.open)
    app.reader.pause(True)  # reads once, and once more when that is on the screen; then no more
    for one in script[:-1]:
        app.model.history.add(one)
    monkeypatch.setattr(DoctorScreen, "_check", lambda screen: None)
    monkeypatch.setattr(app, "notify", lambda *args, **kwargs: None)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: len(app.model.history.host_cpu()) == len(script) + 1)
        await settle(pilot, app)
        await pilot.press(*keys)
        if isinstance(app.screen, DoctorScreen):
            app.screen.show_result(replace(diagnose(fleet), taken_at=1_701_000_000.0))
        await pilot.pause()
        await pilot.pause()
        picture = screen_svg(app)
    assert source.reads == 2
    golden = GOLDEN / f"{name}-{size[0]}x{size[1]}.svg"
    if os.environ.get("GPUPROBE_UPDATE_SCREENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(picture, encoding="utf-8")
    assert picture == golden.read_text("utf-8")
