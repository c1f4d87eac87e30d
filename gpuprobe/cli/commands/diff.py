"""Compare the peaks of two recordings or torch snapshots: what grew, shrank or moved."""

from __future__ import annotations

import argparse
import sys

from gpuprobe.api.recordings import diff
from gpuprobe.api.render import render
from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_formats, add_top, format_of
from gpuprobe.model.text import visible

_BY = ("category", "module", "line", "need")


EXAMPLES = {
    "gpuprobe diff before.gpuprobe after.gpuprobe": "what grew, by category, module, line and need",
    "gpuprobe diff before.gpuprobe after.gpuprobe --by line": "by line only",
    "gpuprobe diff before.gpuprobe after.gpuprobe --html diff.html": "as a page with both curves",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", help="a recording (directory) or a torch snapshot (.pickle)")
    parser.add_argument("after", help="the recording or snapshot to compare with it")
    parser.add_argument("--by", choices=_BY, help="only this breakdown (default: all)")
    add_formats(parser, json="print the diff as JSON")
    add_top(parser, 15)
    parser.add_argument(
        "--html", metavar="FILE.html", help="write an HTML page with curves instead"
    )
    parser.add_argument("--force", action="store_true", help="replace the page if it exists")


def run(args: argparse.Namespace) -> int:
    form = format_of(args)
    if args.html is not None:
        from gpuprobe.api.recordings import load
        from gpuprobe.api.views import write_diff

        written = write_diff(load(args.before), load(args.after), args.html, force=args.force)
        stderr.print_line(f"wrote {visible(str(written))}")
        if form == "text":
            return exit_codes.OK
    found = diff(args.before, args.after)
    by = (args.by,) if args.by else _BY
    render(found, form, sys.stdout, by=by, top=args.top)
    return exit_codes.OK
