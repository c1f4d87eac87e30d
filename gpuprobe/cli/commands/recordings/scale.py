"""Compare a program's speed on different numbers of ranks."""

from __future__ import annotations

import argparse
import sys

from gpuprobe.api.recordings import print_scaling, scale
from gpuprobe.cli import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recordings", nargs="+", help="recordings; the first is the baseline")
    parser.add_argument(
        "--work",
        choices=("step", "run"),
        default="step",
        help="what is the same in all: the work of a rank's step (batches of one size; default), "
        "or that of the whole run (the same data)",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    found = scale(*args.recordings, work=args.work)
    print_scaling(found, sys.stdout, as_json=args.json)
    return exit_codes.OK
