"""Write the baseline that `gpuprobe check` compares with."""

from __future__ import annotations

import argparse
import os

from gpuprobe.cli import exit_codes, talk
from gpuprobe.cli.commands import check

_USAGE = (
    "gpuprobe baseline update [RECORDING | SCRIPT | -m MODULE] [--baseline FILE] [--virtual GPU] "
    "[--stop-after N] [--hazards] [--] [ARGS ...]"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = _USAGE
    parser.add_argument("action", choices=("update",), help="write it, or write it anew")
    # What follows has options of its own, and then the script's: read in two goes.
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="as for gpuprobe check"
    )


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.check import read_baseline, write_baseline
    from gpuprobe.api.check_plan import baseline_path
    from gpuprobe.api.config import read_project
    from gpuprobe.cli.parser import own_options_first

    parser = argparse.ArgumentParser(prog="gpuprobe baseline update", usage=_USAGE)
    check.add_target(parser)
    check.add_script(parser)
    wanted = parser.parse_args(own_options_first(parser, args.rest))
    project = read_project()
    path = baseline_path(wanted.baseline, project)
    before = read_baseline(path) if path.exists() else None
    plan = check.planned(wanted, before=before, project=project, writing=True)
    write_baseline(check.measured(plan), path)
    for setting in plan.settings:
        talk.say(f"gpuprobe: {setting.name}: {setting.value} ({setting.source})")
    talk.say(f"gpuprobe: baseline written: {os.path.relpath(path)}")
    return exit_codes.OK
