"""Browse a recording or torch memory snapshot in the terminal; without an argument, list the runs
being recorded on this machine.

A recording that is still being written is followed. Piped, or with --once, prints its report
(or the list) as text instead.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from gpuprobe.cli import exit_codes
from gpuprobe.cli.options import add_json, format_of
from gpuprobe.cli.screen import can_show

if TYPE_CHECKING:
    from gpuprobe.recording.load import Followed


EXAMPLES = {
    "gpuprobe view train.gpuprobe": "browse a recording, also while it is written",
    "gpuprobe view snapshot.pickle": "browse a torch memory snapshot",
    "gpuprobe view": "list the runs being recorded on this machine",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording",
        nargs="?",
        help="a recording (directory) or a torch snapshot (.pickle); default: list running "
        "recordings",
    )
    parser.add_argument("--once", action="store_true", help="print text and exit")
    add_json(parser, "print the list as JSON, or the recording's report")
    parser.add_argument(
        "--interval", type=float, default=0.5, metavar="SECONDS", help="how often to read again"
    )


def run(args: argparse.Namespace) -> int:
    if args.recording is None:
        return _runs(args)
    if args.once or args.json or not can_show():
        from gpuprobe.api.recordings import load
        from gpuprobe.api.render import render
        from gpuprobe.recording.summary import summarize

        report = summarize(load(args.recording), whole=not args.json)
        render(report, format_of(args), sys.stdout, cwd=report.session.cwd, top=10)
        return exit_codes.OK

    from gpuprobe.recording.load import Followed

    followed = Followed(args.recording)
    if followed.cheap:
        followed.poll()  # errors are reported before a screen opens
    return _show(followed, args)


def _show(followed: Followed | None, args: argparse.Namespace) -> int:
    from gpuprobe.tui.viewer.app import ViewApp  # 190 ms: Textual

    app = ViewApp(followed, interval=max(0.05, args.interval))
    code = app.show()
    if app.failure is not None:
        raise app.failure
    return code


def _runs(args: argparse.Namespace) -> int:
    if not (args.once or args.json) and can_show():
        return _show(None, args)
    from gpuprobe.api.render import RunList, render
    from gpuprobe.recording.running import running

    render(RunList(running()), format_of(args), sys.stdout)
    return exit_codes.OK
