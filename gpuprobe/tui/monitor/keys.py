"""The keys of the dashboard, and the screens that they open.

`SCREENS` is the registry of those: a new screen is a module like `gpuprobe.tui.monitor.screens` and
an entry there. Its key, help, documentation and entry in the command palette follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from gpuprobe.tui.widgets.keymap import Key
from gpuprobe.tui.widgets.table import MOVE_KEYS

if TYPE_CHECKING:
    from gpuprobe.tui.monitor.screens import Dashboard

INTERVALS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds between readings, as + and - select them."""


class OverlayScreen(NamedTuple):
    """A screen over the dashboard. ``key`` opens it; ``does`` and ``footer`` are as in `Key`."""

    key: str
    does: str
    footer: str
    open: Callable[[Dashboard], None]


def _open_runs(top: Dashboard) -> None:
    from gpuprobe.tui.viewer.app import RunsScreen  # 60 ms, with the screens it opens

    if top.demo or top.model.replayed:
        machine = "a simulated fleet" if top.demo else "a replayed log"
        top.notify(f"{machine} has no runs", severity="warning", markup=False)
    else:
        top.push_screen(RunsScreen())


def _open_doctor(top: Dashboard) -> None:
    from gpuprobe.tui.monitor.screens import DoctorScreen

    if top.model.replayed:
        top.notify("a replayed log cannot be diagnosed", severity="warning", markup=False)
    else:
        top.push_screen(DoctorScreen(top))


SCREENS = (
    OverlayScreen(
        "R", "training runs being recorded on this machine; Enter opens one", "runs", _open_runs
    ),
    OverlayScreen("D", "doctor: diagnose this machine", "doctor", _open_doctor),
)

KEYS = (
    *MOVE_KEYS,
    Key("Tab", "switch between GPUs and processes", {"tab": "other_pane"}),
    Key(
        "Enter",
        "on a GPU: only its processes; on a process: command, environment, history, recording (◉)",
    ),
    Key(
        "/",
        "filter: all words must match; user: pid: gpu: job: search one column",
        {"slash": "filter"},
        footer="filter",
        command=True,
    ),
    Key("Esc", "clear the filter", {"escape": "clear"}),
    Key(
        "o O",
        "sort by the next or previous column; r reverses",
        {"o": "sort(1)", "O": "sort(-1)", "r": "reverse"},
        footer="sort",
    ),
    Key(
        "M S P U C A N",
        "sort by memory, SM, PID, user, CPU, age, command (name)",
        {
            "M": "sort_by('memory')",
            "S": "sort_by('sm')",
            "P": "sort_by('pid')",
            "U": "sort_by('user')",
            "C": "sort_by('cpu')",
            "A": "sort_by('age')",
            "N": "sort_by('command')",
        },
    ),
    Key("t", "show processes as a tree or a list", {"t": "tree"}, footer="tree", command=True),
    Key(
        "*",
        "pin or unpin a process at the top",
        {"asterisk": "pin"},
        footer="pin",
        command=True,
    ),
    Key(
        "x",
        "tag or untag a process and move on; X untags all",
        {"x": "tag", "X": "untag"},
        footer="tag",
        command=True,
    ),
    Key(
        "f",
        "processes of the selected GPU only, or all",
        {"f": "follow"},
        footer="one GPU",
        command=True,
    ),
    Key(
        "m",
        "next plot first; v shows or hides the plots",
        {"m": "plot", "v": "detail"},
    ),
    Key(
        "K",
        "end the tagged processes, or the selected one, after confirmation",
        {"K": "end_process"},
        footer="end",
        command=True,
    ),
    *(
        Key(
            screen.key,
            screen.does,
            {screen.key: f"open_screen({at})"},
            footer=screen.footer,
            command=True,
        )
        for at, screen in enumerate(SCREENS)
    ),
    Key(
        "space",
        "pause; . next and , previous reading of a log",
        {"space": "pause", "full_stop": "step(1)", "comma": "step(-1)"},
        footer="pause",
    ),
    Key("+ -", "refresh less or more often", {"plus": "interval(1)", "minus": "interval(-1)"}),
    Key(
        "n",
        "notes: unavailable and unusual values",
        {"n": "notes"},
        command=True,
    ),
    Key("e", "export the current view as JSON to this folder", {"e": "export"}, command=True),
    Key(
        "mouse",
        "click GPUs, processes, headings (sort), keys below; wheel scrolls",
    ),
)
