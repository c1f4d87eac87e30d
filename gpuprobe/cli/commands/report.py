"""Show where the memory of a recording or torch memory snapshot went.

Modules of equal layers are one row, such as GPT.h.*.mlp ×48: -v also lists them one by one, and the
page of --html opens them. --json has no such rows.
"""

from __future__ import annotations

import argparse
import sys

from gpuprobe.api.recordings import load_to_report
from gpuprobe.api.render import render
from gpuprobe.api.views import VIEWS, write_report
from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_formats, add_top, format_of
from gpuprobe.model.text import visible

EXAMPLES = {
    "gpuprobe report train.gpuprobe": "the peak, and what to try first",
    "gpuprobe report train.gpuprobe --html train.html": "as a page with charts",
    "gpuprobe report snapshot.pickle --json": "a torch memory snapshot, for programs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", help="a recording (directory) or a torch snapshot (.pickle)")
    add_formats(parser, json="print the report as JSON")
    parser.add_argument(
        "--device",
        default="",
        metavar="DEVICE",
        help="the device whose peak is shown, such as cuda:1 (default: the one with the highest)",
    )
    add_top(parser, 10)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print every figure and row, without shortening lines",
    )
    views = parser.add_argument_group("other formats, written to a file instead of the report")
    views.add_argument(
        "--html", metavar="FILE.html", help="write the report as an HTML page with charts"
    )
    for name, view in VIEWS.items():
        views.add_argument(f"--{name}", metavar=view.metavar, help=view.help)
    views.add_argument("--force", action="store_true", help="replace files that exist")


def run(args: argparse.Namespace) -> int:
    form = format_of(args)
    recording = load_to_report(args.recording)
    if args.html is not None:
        for written in write_report(recording, args.html, force=args.force):
            stderr.print_line(f"wrote {visible(str(written))}")
    requested = [(view, getattr(args, name)) for name, view in VIEWS.items() if getattr(args, name)]
    for view, path in requested:
        for written in view.write(recording, path, force=args.force):
            stderr.print_line(f"wrote {visible(str(written))}")
    if (requested or args.html is not None) and form == "text":
        return exit_codes.OK
    from gpuprobe.recording.summary import summarize  # 60 ms, which `load_to_report` has spent

    report = summarize(recording, top=args.top, device=args.device, whole=form != "json")
    cwd = report.session.cwd
    render(report, form, sys.stdout, full=args.verbose, cwd=cwd, top=args.top)
    return exit_codes.OK
