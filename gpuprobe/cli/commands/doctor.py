"""Diagnose this machine's GPUs, driver, torch and settings, and print how to fix problems."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gpuprobe.cli import exit_codes
from gpuprobe.cli.options import add_formats, format_of
from gpuprobe.errors import UsageError
from gpuprobe.model.values import Unavailable

EXAMPLES = {
    "gpuprobe doctor": "what is wrong on this machine, and how to fix it",
    "gpuprobe doctor --demo ecc": "a simulated machine with errors of memory",
    "torchrun --nproc-per-node 8 -m gpuprobe doctor --distributed": "check the ranks of a job",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_formats(parser, json="print the diagnosis as JSON")
    parser.add_argument("--demo", metavar="FLEET", help="show a simulated fleet instead")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="check the ranks of a job: torchrun ... -m gpuprobe doctor --distributed",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="with --distributed: seconds to wait for the ranks (default: 30)",
    )


def run(args: argparse.Namespace) -> int:
    if args.distributed:
        if args.demo:
            raise UsageError("--distributed cannot be combined with --demo")
        return _run_ranks(args)
    from gpuprobe.api.doctor import diagnose
    from gpuprobe.api.render import render

    diagnosis = diagnose(args.demo)
    render(diagnosis, format_of(args), sys.stdout)
    if isinstance(diagnosis.driver, Unavailable):
        return exit_codes.ENVIRONMENT
    return exit_codes.OK if diagnosis.healthy else exit_codes.FINDINGS


def _run_ranks(args: argparse.Namespace) -> int:
    from gpuprobe.api.doctor import diagnose_ranks
    from gpuprobe.api.render import render

    with _quiet_torch():
        diagnosis = diagnose_ranks(args.timeout)
    if diagnosis.speaks:
        # Rank 0 has the report; another rank reports only why there is none.
        first = diagnosis.rank == 0
        stream = sys.stdout if first else sys.stderr
        render(diagnosis, format_of(args) if first else "text", stream)
    return exit_codes.OK if diagnosis.healthy else exit_codes.FINDINGS


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Disable torch's C++ stacks at time-outs, which the report has in one line. torch reads the
    variable when it is imported.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "FATAL"
    try:
        yield
    finally:
        del os.environ[name]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text!r}")
    return seconds
