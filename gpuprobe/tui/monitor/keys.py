"""The keys of the dashboard."""

from __future__ import annotations

from gpuprobe.tui.widgets.keymap import Key
from gpuprobe.tui.widgets.table import MOVE_KEYS

INTERVALS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds between readings that + and - lead through."""

KEYS = (
    *MOVE_KEYS,
    Key("Tab", "between GPUs and processes", {"tab": "other_pane"}),
    Key("Enter", "of a GPU: its processes only; of a process that is recorded (◉): its run"),
    Key(
        "/",
        "filter: words that all occur; user: pid: gpu: job: search there only",
        {"slash": "filter"},
        footer="filter",
        command=True,
    ),
    Key("Esc", "drop the filter", {"escape": "clear"}),
    Key(
        "o O",
        "sort by the next or the previous column; r the other way round",
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
    Key("t", "processes as a tree, or as a list", {"t": "tree"}, footer="tree", command=True),
    Key(
        "*",
        "pin a process to the top, or let it go",
        {"asterisk": "pin"},
        footer="pin",
        command=True,
    ),
    Key(
        "f",
        "the processes of the chosen GPU only, or all",
        {"f": "follow"},
        footer="one GPU",
        command=True,
    ),
    Key(
        "m",
        "begin the plots with another one; v shows or hides them",
        {"m": "plot", "v": "detail"},
    ),
    Key(
        "K",
        "end a process: asks first, and never hits another one",
        {"K": "end_process"},
        footer="end",
        command=True,
    ),
    Key(
        "R",
        "training runs that are being recorded on this machine; Enter opens one",
        {"R": "runs"},
        footer="runs",
        command=True,
    ),
    Key(
        "D",
        "doctor: what is wrong with this machine",
        {"D": "doctor"},
        footer="doctor",
        command=True,
    ),
    Key(
        "space",
        "pause; . the next reading; , the one before, in a log",
        {"space": "pause", "full_stop": "step(1)", "comma": "step(-1)"},
        footer="pause",
    ),
    Key("+ -", "read less or more often", {"plus": "interval(1)", "minus": "interval(-1)"}),
    Key(
        "n",
        "notes: all that could not be read, and what is unusual",
        {"n": "notes"},
        command=True,
    ),
    Key(
        "e", "export what is on the screen as JSON into this folder", {"e": "export"}, command=True
    ),
    Key("mouse", "click a GPU, a process, a heading (sorts), a key at the bottom; wheel"),
)
