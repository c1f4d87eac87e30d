"""List the GPUs with their state and processes, from NVML, the CUDA driver, torch and pycuda.

By default NVML and the CUDA driver are queried, which creates no CUDA context and does not import
torch. Exits with 3 if no source is available.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import sys

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_demo, add_json, format_of
from gpuprobe.cli.screen import columns

_DEFAULT = ("nvml", "cuda")


EXAMPLES = {
    "gpuprobe info": "the GPUs of this machine, and who uses them",
    "gpuprobe info --json": "the same for programs",
    "gpuprobe info --demo 8xh100 -v": "every value of a simulated fleet",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "print a JSON document")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="every value, with its source and status"
    )
    parser.add_argument(
        "--source",
        metavar="NAME[,NAME]",
        help="sources to query: nvml, cuda (the driver), torch, pycuda, or all (default: "
        "nvml,cuda)",
    )
    add_demo(parser, "; list: print the available ones")


def run(args: argparse.Namespace) -> int:
    # A garbage collection takes 4 of 60 ms and finds nothing in so short a process.
    collecting = gc.isenabled()
    gc.disable()
    # A last collection at exit would take 6 of 60 ms.
    atexit.register(gc.freeze)
    try:
        return _run(args)
    finally:
        if collecting:
            gc.enable()


def _run(args: argparse.Namespace) -> int:
    from gpuprobe.api.devices import inventory
    from gpuprobe.api.render import render
    from gpuprobe.testing import fleets

    if args.demo == "list":
        for name, about in fleets().items():
            sys.stdout.write(f"{name:<12} {about}\n")
        return exit_codes.OK
    named = tuple(part.strip() for part in (args.source or "").split(",") if part.strip())
    found = inventory(
        named or _DEFAULT,
        args.demo,
        detail="full" if format_of(args) != "text" or args.verbose else "table",
        require=[name for name in named if name != "all"],
    )
    render(found, format_of(args), sys.stdout, columns=columns(0), full=args.verbose)
    if any(source.available for source in found.sources):
        return exit_codes.OK
    stderr.note("no GPU source is available: is there an NVIDIA driver on this machine?")
    stderr.print_line("  hint: gpuprobe info --demo shows a simulated fleet")
    return exit_codes.ENVIRONMENT
