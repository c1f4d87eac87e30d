"""Press every key on every screen, at every size, for a given time.

    python benchmarks/monkey_screens.py [--steps 10000] [--seed 0] [--screens top,view,…]

A step is a key (all that are bound, letters, digits and what else a terminal can send), a
click, a paste, or a new size from 1×1 up. The screens: ``top`` of a fake fleet, ``top`` replaying
a log, ``view`` of recordings and snapshots, the list of runs; whatever they open is reached from
them. Prints the steps of each; the first fault ends it, with its traceback and the steps that led
there, which ``--seed`` repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from quick_pilot import QuickPilot  # noqa: E402

RECORDED = ROOT / "tests" / "recorded" / "v2"

KEYS = [
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "up", "down", "left", "right", "pageup", "pagedown", "home", "end", "enter", "escape", "tab",
    "shift+tab", "space", "backspace", "delete", "insert", "slash", "question_mark", "plus",
    "minus", "comma", "full_stop", "less_than_sign", "greater_than_sign", "left_square_bracket",
    "right_square_bracket", "colon", "semicolon", "equals_sign", "underscore", "asterisk",
    "shift+up", "shift+down", "shift+left", "shift+right", "ctrl+left", "ctrl+right", "ctrl+home",
    "ctrl+end", "ctrl+p", "ctrl+a", "ctrl+e", "ctrl+u", "ctrl+k", "ctrl+w", "ctrl+z", "f1", "f2",
    "f5", "f12", "é", "漢", "percent_sign", "dollar_sign", "apostrophe", "quotation_mark",
]  # fmt: skip
# These leave the screen, or suspend the process.
_LEAVING = {"q", "ctrl+q", "ctrl+c", "ctrl+z"}


def sizes(rng: random.Random) -> tuple[int, int]:
    """Small ones often: there a screen has to leave out the most."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randint(1, 12), rng.randint(1, 12)
    if kind == 1:
        return rng.randint(1, 250), rng.randint(1, 5)
    if kind == 2:
        return rng.randint(1, 20), rng.randint(1, 120)
    return rng.randint(20, 250), rng.randint(8, 80)


def _top(folder: Path) -> Any:
    from gpuprobe.tui.monitor.app import TopApp

    return TopApp("8xh100", 0.05, moving=True, settings_file=folder / "top.json")


def _replayed(folder: Path) -> Any:
    from gpuprobe.recording.monitor_log import ReplayedLog
    from gpuprobe.tui.monitor.app import TopApp

    path = RECORDED / "readings.jsonl"
    return TopApp(None, 0.05, source=lambda: ReplayedLog(path), replayed="x", readonly=True)


def _view(name: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from gpuprobe.recording.load import Followed
        from gpuprobe.tui.viewer.app import ViewApp

        return ViewApp(Followed(RECORDED / name), interval=0.05, demo="8xh100")

    return make


def _snapshot(folder: Path) -> Any:
    import pickle

    from snapshot_samples import modern

    from gpuprobe.recording.load import Followed
    from gpuprobe.tui.viewer.app import ViewApp

    path = folder / "s.pickle"
    path.write_bytes(pickle.dumps(modern()))
    return ViewApp(Followed(path), interval=0.05)


def _runs(folder: Path) -> Any:
    from gpuprobe.tui.viewer.app import ViewApp

    return ViewApp(None, interval=0.05, demo="8xh100")


SCREENS: dict[str, Callable[[Path], Any]] = {
    "top": _top,
    "top --replay": _replayed,
    "view, simulated GPU": _view("virtual.gpuprobe"),
    "view, two ranks": _view("ranks.gpuprobe"),
    "view, out of memory": _view("oom.gpuprobe"),
    "view, a snapshot": _snapshot,
    "view, the runs": _runs,
}


class Fault(Exception):
    """A screen ended. ``steps`` led there."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__(f"after {len(steps)} steps, the last: {', '.join(steps[-12:])}")


async def play(make: Callable[[], Any], rng: random.Random, steps: int) -> int:
    """So many random steps on one screen, opened again if it was left; returns how many were
    made. Raises what the screen raised, from `Fault`.
    """
    made = 0
    while made < steps:
        app = make()
        done: list[str] = []
        try:
            async with app.run_test(size=sizes(rng)):
                pilot, first = QuickPilot(app), True
                while made < steps and app.is_running:
                    step = "resize" if first else _step(rng)
                    first = False
                    done.append(step)
                    await _do(pilot, app, step, rng, done)
                    made += 1
            if app.crash is not None:
                raise app.crash
        except Exception as error:
            error.__cause__ = Fault(done)
            raise
    return made


def _step(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.15:
        return "resize"
    if kind < 0.2:
        return "click"
    if kind < 0.22:
        return "paste"
    key = rng.choice(KEYS)
    return "escape" if key in _LEAVING and rng.random() < 0.9 else key


async def _do(pilot: Any, app: Any, step: str, rng: random.Random, done: list[str]) -> None:
    from textual import events
    from textual.errors import NoWidget

    if step == "resize":
        columns, lines = sizes(rng)
        done[-1] = f"{columns}×{lines}"
        await pilot.resize_terminal(columns, lines)
    elif step == "click":
        at = rng.randrange(max(1, app.size.width)), rng.randrange(max(1, app.size.height))
        with contextlib.suppress(NoWidget):  # the screen has become smaller since
            await pilot.click(offset=at)
    elif step == "paste":
        app.post_message(events.Paste("x" * rng.randint(0, 50) + "\x1b[2J\n漢"))
        await pilot.pause()
    else:
        await pilot.press(step)


def _unraisable(given: Any) -> None:
    """A coroutine that was never awaited is a key that does nothing."""
    print(f"unraisable: {given.exc_value}", flush=True)
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=10_000, help="in all (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--screens", default=",".join(SCREENS).replace(", ", "; "))
    args = parser.parse_args()
    requested = [name.replace("; ", ", ") for name in args.screens.split(",")]
    os.environ.setdefault("TERM", "xterm-256color")
    warnings.simplefilter("error", RuntimeWarning)
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # what is saved is saved there
        for name in requested:
            began = time.perf_counter()
            rng = random.Random(f"{args.seed}.{name}")
            share = -(-args.steps // len(requested))
            sys.unraisablehook = _unraisable
            made = asyncio.run(play(lambda: SCREENS[name](Path(folder)), rng, share))  # noqa: B023
            total += made
            print(f"{name:<22} {made:>6} steps  {time.perf_counter() - began:6.0f} s", flush=True)
    print(f"{'all':<22} {total:>6} steps, no fault")


if __name__ == "__main__":
    main()
