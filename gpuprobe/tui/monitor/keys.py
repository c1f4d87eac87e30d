"""The keys of the dashboard: what they do, how they are explained, where they count."""

from __future__ import annotations

from textual.binding import Binding, BindingType

__all__ = ["COMMANDS", "FOOTER", "HELP", "HERE", "INTERVALS", "KEYS"]

INTERVALS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds between readings that + and - lead through."""

FOOTER: tuple[tuple[str, str, str], ...] = (
    ("?", "help", "help"),
    ("q", "quit", "quit"),
    ("/", "filter", "filter"),
    ("o", "sort", "sort(1)"),
    ("t", "tree", "tree"),
    ("*", "pin", "pin"),
    ("f", "one GPU", "follow"),
    ("K", "end", "end_process"),
    ("R", "runs", "runs"),
    ("D", "doctor", "doctor"),
    ("space", "pause", "pause"),
)
"""Key, name and action of what the last line offers, also to the mouse."""

HELP: tuple[tuple[str, str], ...] = (
    ("j k ↑ ↓", "move; g G first and last; Ctrl-D Ctrl-U, PgDn PgUp a page"),
    ("Tab", "between GPUs and processes"),
    ("Enter", "on a GPU: its processes only; on a process that is recorded (◉): its run"),
    ("f", "the processes of the GPU that is looked at only, or all"),
    ("m", "begin the plots with another one; v shows or hides them"),
    ("/", "filter: words that all occur; user: pid: gpu: job: look there only"),
    ("Esc", "drop the filter"),
    ("o O", "sort by the next or the previous column; r the other way round"),
    ("M S P U C A N", "sort by memory, SM, PID, user, CPU, age, command (name)"),
    ("t", "processes as a tree, or as a list"),
    ("*", "pin a process to the top, or let it go"),
    ("K", "end a process: asks first, and never hits another one"),
    ("space", "pause; . the next reading; , the one before, in a log"),
    ("+ -", "read less or more often"),
    ("R", "training runs that are being recorded on this machine; Enter opens one"),
    ("D", "doctor: what is wrong with this machine"),
    ("n", "notes: all that could not be read, and what is odd"),
    ("d", "the next theme: dark, light, colour-blind, no colour"),
    ("s", "save the screen as SVG in this folder"),
    ("e", "export what is on the screen as JSON into this folder"),
    ("Ctrl-P", "the command palette"),
    ("mouse", "click a GPU, a process, a heading (sorts), a key at the bottom; wheel"),
    ("q", "quit"),
)

KEYS: list[BindingType] = [
    Binding("tab", "other_pane", "other pane", show=False, priority=True),
    Binding("space", "pause", "pause"),
    Binding("full_stop", "step(1)", "next reading", show=False),
    Binding("comma", "step(-1)", "reading before", show=False),
    Binding("slash", "filter", "filter"),
    Binding("escape", "clear", "drop the filter", show=False),
    Binding("o", "sort(1)", "sort"),
    Binding("O", "sort(-1)", "sort", show=False),
    Binding("r", "reverse", "reverse", show=False),
    Binding("M", "sort_by('memory')", "sort by memory", show=False),
    Binding("S", "sort_by('sm')", "sort by SM", show=False),
    Binding("P", "sort_by('pid')", "sort by PID", show=False),
    Binding("U", "sort_by('user')", "sort by user", show=False),
    Binding("C", "sort_by('cpu')", "sort by CPU", show=False),
    Binding("A", "sort_by('age')", "sort by age", show=False),
    Binding("N", "sort_by('command')", "sort by command", show=False),
    Binding("t", "tree", "tree"),
    Binding("asterisk", "pin", "pin", show=False),
    Binding("f", "follow", "this GPU only", show=False),
    Binding("m", "plot", "another plot", show=False),
    Binding("v", "detail", "plots", show=False),
    Binding("plus", "interval(1)", "slower", show=False),
    Binding("minus", "interval(-1)", "faster", show=False),
    Binding("K", "end_process", "end a process", show=False),
    Binding("D", "doctor", "doctor", show=False),
    Binding("R", "runs", "runs", show=False),
    Binding("n", "notes", "notes", show=False),
    Binding("e", "export", "export JSON", show=False),
]

HERE = frozenset(
    {
        "other_pane",
        "pause",
        "step",
        "filter",
        "clear",
        "sort",
        "reverse",
        "sort_by",
        "tree",
        "pin",
        "follow",
        "plot",
        "detail",
        "interval",
        "end_process",
        "doctor",
        "runs",
        "notes",
        "export",
    }
)
"""Actions that mean nothing, or something else, on the screens over this one."""

COMMANDS: dict[str, str] = {
    "f": "follow",
    "/": "filter",
    "t": "tree",
    "*": "pin",
    "K": "end_process",
    "R": "runs",
    "D": "doctor",
    "n": "notes",
    "s": "save_screen",
    "e": "export",
    "q": "quit",
}
"""Key to action, of the lines of `HELP` that the command palette offers."""
