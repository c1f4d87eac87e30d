"""Show why a distributed job hangs, from the Flight Recorder dumps of its ranks."""

from __future__ import annotations

import argparse
import sys

from gpuprobe.api.recordings import hang
from gpuprobe.api.render import render
from gpuprobe.cli import exit_codes
from gpuprobe.cli.options import add_formats, format_of

EXAMPLES = {
    "gpuprobe hang dumps": "which rank did not call which collective, and where",
    "gpuprobe hang dumps --json": "for programs",
    "gpuprobe hang .": "dumps in this directory",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", help="the dumps: a file for each rank, whose name ends with the rank"
    )
    add_formats(parser, json="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    found = hang(args.directory)
    render(found, format_of(args), sys.stdout)
    return exit_codes.FINDINGS if found.hangs else exit_codes.OK
