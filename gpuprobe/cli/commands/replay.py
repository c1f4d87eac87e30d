"""Replay a snapshot's allocations exactly, and simulate other allocator settings."""

from __future__ import annotations

import argparse
import re
import sys

from gpuprobe.api.recordings import replay
from gpuprobe.api.render import render
from gpuprobe.cli import exit_codes
from gpuprobe.cli.options import add_formats, format_of

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


EXAMPLES = {
    "gpuprobe replay snapshot.pickle": "repeat every allocation of a snapshot",
    "gpuprobe replay snapshot.pickle --what-if expandable_segments:True": "try a setting",
    "gpuprobe replay snapshot.pickle --search --capacity 24GiB": "find the best setting",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("snapshot", help="a torch snapshot (.pickle) or a recording (directory)")
    parser.add_argument(
        "--what-if",
        metavar="CONF",
        help="settings to change, as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,…",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="try common settings and recommend the smallest change",
    )
    parser.add_argument(
        "--capacity",
        type=_size,
        metavar="SIZE",
        help="memory available to the allocator, such as 80GiB (default: the limit shown by an "
        "out-of-memory event in the trace, if any)",
    )
    parser.add_argument("--device", type=_index, metavar="N", help="only this CUDA device")
    add_formats(parser)


def run(args: argparse.Namespace) -> int:
    result = replay(
        args.snapshot,
        args.what_if,
        device=args.device,
        capacity=args.capacity,
        search=args.search,
    )
    render(result, format_of(args), sys.stdout)
    return exit_codes.OK if result.exact and not result.would_oom else exit_codes.FINDINGS


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is not None and not match[2] and not match[3]:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: write {text}GiB, or {text}B")
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 80GiB, found {text!r}")
    return size


def _index(text: str) -> int:
    digits = text.removeprefix("cuda:")
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a device such as 0 or cuda:0, found {text!r}")
    return int(digits)
