"""Every command and format that reads a file, and what must be true of how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from hostile_mutations import RECORDED

from gpuprobe.cli import main

GOOD = RECORDED / "virtual.gpuprobe"
BASELINE = RECORDED / "baseline.json"
ACCEPTED = "--accept-environment"
"""The baseline is of a model of a GPU: without this option a check compares nothing."""


class Ended(NamedTuple):
    code: int
    out: str
    talk: str


def of_recording(target: str, out: str) -> list[list[str]]:
    """What reads a recording or a snapshot. ``out`` is a folder for what is written."""
    good, compare = str(GOOD), ["--baseline", str(BASELINE), ACCEPTED]
    return [
        ["report", target],
        ["report", target, "--json"],
        ["report", target, "-v", "--top", "1000"],
        ["report", target, "--html", f"{out}/r.html", "--force"],
        ["report", target, "--perfetto", f"{out}/p.json.gz", "--force"],
        ["report", target, "--snapshot", f"{out}/s.pickle", "--force"],
        ["view", target, "--once"],
        ["replay", target],
        ["replay", target, "--what-if", "expandable_segments:True", "--json"],
        ["check", target, *compare, "--json"],
        ["check", target, *compare, "--markdown"],
        ["check", target, *compare, "--sarif", f"{out}/s.json",
         "--junit", f"{out}/j.xml", "--annotations", "github"],
        ["baseline", "update", target, "--baseline", f"{out}/new.json"],
        ["diff", target, target],
        ["diff", good, target, "--json"],
        ["diff", target, good, "--html", f"{out}/d.html", "--force"],
        ["export", "--prometheus", "--once", "--runs", target, "--no-discovery"],
    ]  # fmt: skip


def of_snapshot(target: str, out: str) -> list[list[str]]:
    """All of those but ``export``, which is for runs."""
    return [argv for argv in of_recording(target, out) if argv[0] != "export"]


def of_baseline(target: str, out: str) -> list[list[str]]:
    check = ["check", str(GOOD), "--baseline", target, ACCEPTED]
    return [
        check[:-1],
        [*check, "--json"],
        [*check, "--markdown"],
        [*check, "--sarif", f"{out}/s.json", "--junit", f"{out}/j.xml", "--annotations", "github"],
        ["baseline", "update", str(GOOD), "--baseline", target],
    ]


def of_log(target: str, out: str) -> list[list[str]]:
    return [["top", "--replay", target, "--once"]]


def of_configuration(target: str, out: str) -> list[list[str]]:
    """Run in the folder of the file."""
    return [
        ["check", str(GOOD), "--baseline", str(BASELINE), ACCEPTED],
        ["check", str(GOOD), "--json"],
        ["baseline", "update", str(GOOD), "--baseline", f"{out}/new.json"],
    ]


def written(kind: str, files: dict[str, bytes], folder: Path) -> Path:
    """Write a mutation of `hostile_mutations.numbered`; where it is."""
    if kind != "recording":
        names = {"details": "x.pickle", "snapshot": "x.pickle", "configuration": "pyproject.toml"}
        path = folder / names.get(kind, "x.json")
        path.write_bytes(files[""])
        return path
    path = folder / "x.gpuprobe"
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


COMMANDS: dict[str, Callable[[str, str], list[list[str]]]] = {
    "recording": of_recording,
    "snapshot": of_snapshot,
    "baseline": of_baseline,
    "log": of_log,
    "configuration": of_configuration,
}

_CODES = {
    "report": {0, 2, 4},
    "view": {0, 2, 4},
    "export": {0, 3},
    "top": {0, 2, 3, 4},
    "estimate": {0, 2},
    "run": {0, 1, 2, 4},
}
_ANY = {0, 1, 2, 4}


def run(argv: list[str]) -> Ended:
    """The command, in this process."""
    out, talk = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(talk):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 99
    return Ended(code, out.getvalue(), talk.getvalue())


def problem(argv: list[str], ended: Ended) -> str:
    """What is wrong with how a command ended; "" for nothing."""
    code, out, talk = ended
    if "Traceback" in talk or "internal error" in talk or "Traceback" in out:
        return f"a traceback: {talk.strip()[-400:]}"
    if code not in _CODES.get(argv[0], _ANY):
        return f"exit code {code}: {talk.strip()[-300:]}"
    errors = [line for line in talk.splitlines() if line.startswith("gpuprobe: error:")]
    if code in (3, 4) and argv[0] != "export" and len(errors) + talk.count("gpuprobe: note") > 1:
        return f"{len(errors)} errors: {talk[-400:]}"
    if code == 4 and len(errors) != 1:
        return f"exit 4 without one line that says why: {talk[-300:]}"
    if any(len(line) > 2000 for line in talk.splitlines()):
        return f"a line of {max(map(len, talk.splitlines()))} characters"
    if re.search(r"[\x00-\x09\x0b-\x1f\x7f\x80-\x9f]", talk):
        return f"a control character on stderr: {talk[:300]!r}"
    if code in (0, 1) and ("--json" in argv):
        try:
            json.loads(out, parse_constant=_refuse)
        except ValueError as error:
            return f"no JSON: {error}"
    elif argv[0] != "export" and (found := re.search(r"[\x00-\x09\x0b-\x1f\x7f\x80-\x9f]", out)):
        return f"a control character on stdout: {out[max(0, found.start() - 50) :][:100]!r}"
    return ""


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


VIEW_KEYS = (
    ("5", "4", "3"), ("2", "1", "enter", "enter"), ("t", "n", "p"), ("t", "down", "right", "left"),
    ("up", "end", "home", "question_mark"),
)  # fmt: skip
"""What is pressed, a few keys at a time where many files are shown."""

LOG_KEYS = ("space", "right", "right", "left", "t", "down", "enter", "escape", "i")


def show(path: Path, keys: Sequence[str] = tuple(chain.from_iterable(VIEW_KEYS))) -> str:
    """Open a recording or snapshot on the screen, press keys; what went wrong, or ""."""
    from gpuprobe.errors import GpuprobeError
    from gpuprobe.recording.load import Followed
    from gpuprobe.tui.viewer.app import ViewApp

    try:
        followed = Followed(path)
    except GpuprobeError as error:
        return "several lines" if "\n" in str(error) else ""
    return on_screen(lambda: ViewApp(followed, interval=0.05), keys, (100, 30))


def show_log(path: Path) -> str:
    """Open a log of readings in ``top``, press some keys; what went wrong, or ""."""
    from contextlib import nullcontext

    from gpuprobe.errors import GpuprobeError
    from gpuprobe.recording.monitor_log import ReplayedLog
    from gpuprobe.tui.monitor.app import TopApp

    try:
        log = ReplayedLog(path)
    except GpuprobeError as error:
        return "several lines" if "\n" in str(error) else ""
    with log:
        return on_screen(
            lambda: TopApp(
                None, 0.05, source=lambda: nullcontext(log), replayed="x", readonly=True
            ),
            LOG_KEYS,
        )


def show_settings(path: Path) -> str:
    """Open ``top`` of a fake machine with these settings; what went wrong, or ""."""
    from gpuprobe.tui.monitor.app import TopApp

    return on_screen(
        lambda: TopApp("unified", 0.05, settings_file=path, readonly=True), ("d", "s", "t")
    )


def on_screen(
    make: Callable[[], Any], keys: Sequence[str], size: tuple[int, int] = (120, 40)
) -> str:
    """Run a screen and press keys; what went wrong, or ""."""
    from quick_pilot import QuickPilot

    async def session() -> None:
        app = make()
        async with app.run_test(size=size):
            pilot = QuickPilot(app)
            for key in keys:
                if not app.is_running:
                    break
                await pilot.press(key)
            await pilot.pause()
        if app.crash is not None:
            raise app.crash

    return _watched(session)


def _watched(session: Callable[[], object]) -> str:
    try:
        asyncio.run(session())  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        import traceback

        return "a screen: " + "".join(traceback.format_exception(error))[-1500:]
    return ""


def in_process_snapshots() -> None:
    """Have snapshots read in this process, as where no process can be started: 50 times faster."""
    sys.executable = ""
