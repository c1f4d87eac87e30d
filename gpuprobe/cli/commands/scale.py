"""Compare a program's speed on different numbers of ranks."""

from __future__ import annotations

import argparse
import sys

from gpuprobe.api.recordings import scale
from gpuprobe.api.render import render
from gpuprobe.cli import exit_codes
from gpuprobe.cli.options import add_formats, amount, format_of

EXAMPLES = {
    "gpuprobe scale one.gpuprobe four.gpuprobe": "speed-up and efficiency on four ranks",
    "gpuprobe scale one.gpuprobe four.gpuprobe --work run": "the same data, divided among ranks",
    "gpuprobe scale one.gpuprobe four.gpuprobe --json": "for programs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recordings", nargs="+", help="recordings; the first is the baseline")
    parser.add_argument(
        "--work",
        choices=("step", "run"),
        default="step",
        help="what is the same in all: the work of a rank's step (batches of one size; default), "
        "or that of the whole run (the same data)",
    )
    parser.add_argument(
        "--network",
        type=amount,
        default=0.0,
        metavar="GB/S",
        help="of simulated GPUs: bandwidth of each GPU's network adapter, for several nodes",
    )
    add_formats(parser, json="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    scaling = scale(*args.recordings, work=args.work, network=args.network)
    render(scaling, format_of(args), sys.stdout)
    return exit_codes.OK
