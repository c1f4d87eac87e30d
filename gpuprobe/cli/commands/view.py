"""Open a recording, or a torch memory snapshot, on the screen.

A recording that is still being written is followed. Piped, or with --once, prints its report
as text instead.
"""

from __future__ import annotations

import argparse
import sys

from gpuprobe.cli import exit_codes
from gpuprobe.cli.screen import can_show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", help="a recording (directory) or a torch snapshot (.pickle)")
    parser.add_argument("--once", action="store_true", help="print text and exit")
    parser.add_argument(
        "--interval", type=float, default=0.5, metavar="SECONDS", help="how often to read anew"
    )


def run(args: argparse.Namespace) -> int:
    if args.once or not can_show():
        from gpuprobe.api.recordings import load, report
        from gpuprobe.reporters import text

        text.write(report(load(args.recording)), sys.stdout)
        return exit_codes.OK

    from gpuprobe.api.live import Followed

    followed = Followed(args.recording)
    followed.poll()  # what is wrong with it is said before a screen opens
    from gpuprobe.tui.view_app import ViewApp  # 190 ms: Textual

    app = ViewApp(followed, interval=max(0.05, args.interval))
    app.run()
    return app.return_code or exit_codes.OK
