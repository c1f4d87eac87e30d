"""The keys of the screens of a run."""

from __future__ import annotations

from gpuprobe.tui.widgets.keymap import Key
from gpuprobe.tui.widgets.table import FIND_KEYS, MOVE_KEYS

PANES = ("steps", "now", "trace", "ranks", "findings")

_LIST_KEYS = (*MOVE_KEYS, *FIND_KEYS)

VIEW_KEYS = (
    Key(
        "1 2 3 4 5 Tab",
        ", ".join(PANES),
        {
            "tab": "next_pane(1)",
            "shift+tab": "next_pane(-1)",
            **{str(at + 1): f"pane('{name}')" for at, name in enumerate(PANES)},
        },
    ),
    *_LIST_KEYS,
    Key("p", "go to the peak", {"p": "peak"}, footer="peak"),
    Key("t", "open the trace of the selected step", {"t": "trace"}, footer="trace"),
    Key("n", "next rank", {"n": "rank(1)"}),
    Key("r", "read again", {"r": "reload"}),
    Key("e", "save the current view as JSON", {"e": "export"}, footer="save JSON", command=True),
    Key("Esc", "back", {"escape": "back"}),
)

STEPS_KEYS = (Key("m", "change the quantity of the steps plot", {"m": "measure"}, footer="plot"),)
"""Of the list of steps."""

_FOLD = Key("c", "all frames", {"c": "fold"})

BLOCK_KEYS = (_FOLD, Key("Esc", "back", {"escape,q,enter": "dismiss"}))
"""Of a block's stack and source."""

TRACE_KEYS = (
    Key(
        "← → h l",
        "move along the trace; with Shift ten times as far; , . one event",
        {
            "left,h": "along(-1)",
            "right,l": "along(1)",
            "shift+left,H": "along(-10)",
            "shift+right,L": "along(10)",
            "comma": "event(-1)",
            "full_stop": "event(1)",
        },
    ),
    Key("+ -", "zoom", {"plus,equals_sign": "zoom(0.5)", "minus": "zoom(2)"}),
    Key(
        "[ ]",
        "previous, next trace",
        {"left_square_bracket": "trace(-1)", "right_square_bracket": "trace(1)"},
    ),
    Key("b", "group by line, module, category or block", {"b": "group"}, footer="group"),
    Key(
        "Enter",
        f"open a group's blocks, or a block's stack and source ({_FOLD.shown}: {_FOLD.does})",
    ),
    Key(
        "m",
        "switch between segment map and treemap",
        {"m": "map"},
        footer="segment map",
    ),
    Key("o", "change the order of the segments", {"o": "order"}, footer="order"),
    Key("Esc", "back to the groups", {"escape": "back"}),
)
"""Of a trace."""

RUNS_KEYS = (
    *_LIST_KEYS,
    Key("Enter", "open the run"),
    Key("Esc", "back", {"escape": "back"}),
)
"""Of the list of runs."""
