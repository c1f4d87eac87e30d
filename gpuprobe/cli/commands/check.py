"""Check a training run's memory against a baseline; a regression is exit code 1.

TARGET is a recording, or a script that is run and recorded. gpuprobe's options stand before or
after it; what follows -- is the script's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from gpuprobe.cli import exit_codes, talk
from gpuprobe.errors import ProgramFailed, UsageError

OPTIONS_AFTER_SCRIPT = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "gpuprobe check (RECORDING | SCRIPT | -m MODULE) --baseline FILE [--virtual GPU] "
        "[--hazards] [--tolerance METRIC=AMOUNT] [--json | --markdown] [--] [ARGS ...]"
    )
    add_target(parser)
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="METRIC=AMOUNT",
        help="accept this much more, such as peak_allocated=2%% or peak_reserved=64MiB",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="also write SARIF 2.1.0")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write JUnit XML")
    add_script(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """What `check` and `baseline` have in common."""
    parser.add_argument(
        "--baseline",
        type=Path,
        required=True,
        metavar="FILE",
        help="the baseline (JSON, kept in the repository)",
    )
    parser.add_argument(
        "--virtual", metavar="GPU", help="run the script on this GPU in software: none is needed"
    )
    parser.add_argument(
        "--hazards", action="store_true", help="also count races and implicit synchronisations"
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module"
    )
    parser.add_argument("target", nargs="?", metavar="TARGET")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")


def measured(args: argparse.Namespace) -> Any:
    """Run or read what is to be compared. What a script prints goes to stderr."""
    from gpuprobe.api import watch
    from gpuprobe.api.check import measure

    if args.module is not None:
        if not args.module:
            raise UsageError("-m needs the name of a module")
        target, *arguments = args.module
    elif args.target is not None:
        target, arguments = args.target, args.args
    else:
        raise UsageError("nothing to check", hint="give a recording or a script")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return measure(
                target,
                arguments,
                virtual=args.virtual,
                hazards=args.hazards,
                module=args.module is not None,
            )
    except ProgramFailed as error:
        if error.__cause__ is not None:
            talk.raw(watch.own_traceback(error.__cause__))
        raise


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.check import compare, read_baseline, tolerances

    accepted = tolerances(args.tolerance)
    before = read_baseline(args.baseline)
    result = compare(before, measured(args), accepted)
    from gpuprobe.reporters import check_json, check_text, junit, sarif

    found = check_json.findings(result)
    if args.sarif is not None:
        with args.sarif.open("w", encoding="utf-8") as stream:
            sarif.write(found, stream, str(Path.cwd()))
    if args.junit is not None:
        passed = [metric.name for metric in result.metrics if not metric.regressed]
        with args.junit.open("w", encoding="utf-8") as stream:
            junit.write(found, stream, suite="memory", passed=passed)
    if args.json:
        check_json.write(result, sys.stdout)
    elif args.markdown:
        check_text.markdown(result, sys.stdout)
    else:
        check_text.write(result, sys.stdout)
    if result.mismatches:
        return exit_codes.USAGE
    return exit_codes.OK if result.ok else exit_codes.FINDINGS
