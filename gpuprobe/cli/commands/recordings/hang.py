"""Show why a distributed job hangs, from the Flight Recorder dumps of its ranks."""

from __future__ import annotations

import argparse
import sys

from gpuprobe.api.recordings import hang, print_hang
from gpuprobe.cli import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", help="the dumps: a file for each rank, whose name ends with the rank"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    found = hang(args.directory)
    print_hang(found, sys.stdout, as_json=args.json)
    return exit_codes.FINDINGS if found.hangs else exit_codes.OK
