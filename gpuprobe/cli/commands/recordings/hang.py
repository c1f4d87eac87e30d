"""Show why a distributed job hangs, from the Flight Recorder dumps of its ranks."""

from __future__ import annotations

import argparse
import sys

from gpuprobe.api.recordings import hang
from gpuprobe.cli import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", help="the dumps: a file for each rank, whose name ends with the rank"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    found = hang(args.directory)
    if args.json:
        from gpuprobe.reporters.json import hang as hang_json

        hang_json.write(found, sys.stdout)
    else:
        from gpuprobe.reporters.sections.hang import hang_sections
        from gpuprobe.reporters.text import draw as text

        text.write(hang_sections(found), sys.stdout)
    return exit_codes.FINDINGS if found.hangs else exit_codes.OK
