"""Say where the memory of a recording, or of a torch memory snapshot, went."""

from __future__ import annotations

import argparse
import sys

from gpuprobe import api
from gpuprobe.cli import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", help="a recording (directory) or a torch snapshot (.pickle)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--top", type=_positive, default=10, metavar="N", help="rows per table (default: 10)"
    )


def run(args: argparse.Namespace) -> int:
    report = api.report(api.load(args.recording), top=args.top)
    if args.json:
        from gpuprobe.reporters import report_json

        report_json.write(report, sys.stdout)
    else:
        from gpuprobe.reporters import text

        text.write(report, sys.stdout)
    return exit_codes.OK


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return number
