"""Diagnose this machine's GPUs, driver, torch and settings, and print how to fix problems."""

from __future__ import annotations

import argparse
import sys

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_formats, format_of
from gpuprobe.model.values import Unavailable

EXAMPLES = {
    "gpuprobe doctor": "what is wrong on this machine, and how to fix it",
    "gpuprobe doctor --bundle report.zip": "also a file for a bug report",
    "gpuprobe doctor --json": "for programs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_formats(parser, json="print the diagnosis as JSON")
    parser.add_argument(
        "--bundle",
        metavar="FILE.zip",
        help="also write a bundle for bug reports, with private data redacted",
    )
    parser.add_argument("--demo", metavar="FLEET", help="show a simulated fleet instead")


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.doctor import diagnose
    from gpuprobe.api.render import render

    diagnosis = diagnose(args.demo, bundle=args.bundle)
    render(diagnosis, format_of(args), sys.stdout)
    if args.bundle:
        stderr.print_line(f"wrote {args.bundle}; review it before you share it")
    if isinstance(diagnosis.driver, Unavailable):
        return exit_codes.ENVIRONMENT
    return exit_codes.OK if diagnosis.healthy else exit_codes.FINDINGS
