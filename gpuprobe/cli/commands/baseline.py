"""Write the baseline that `gpuprobe check` compares with."""

from __future__ import annotations

import argparse

from gpuprobe.cli import exit_codes, talk
from gpuprobe.cli.commands import check

_USAGE = (
    "gpuprobe baseline update (RECORDING | SCRIPT | -m MODULE) --baseline FILE [--virtual GPU] "
    "[--hazards] [--] [ARGS ...]"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = _USAGE
    parser.add_argument("action", choices=("update",), help="write it, or write it anew")
    # What follows has options of its own, and then the script's: read in two goes.
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="as for gpuprobe check"
    )


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.check import write_baseline
    from gpuprobe.cli.parser import own_options_first

    parser = argparse.ArgumentParser(prog="gpuprobe baseline update", usage=_USAGE)
    check.add_target(parser)
    check.add_script(parser)
    wanted = parser.parse_args(own_options_first(parser, args.rest))
    write_baseline(check.measured(wanted), wanted.baseline)
    talk.say(f"gpuprobe: baseline written: {wanted.baseline}")
    return exit_codes.OK
