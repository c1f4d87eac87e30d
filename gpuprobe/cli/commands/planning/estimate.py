"""Estimate the memory of a training script on a GPU that need not be there.

The script runs on a virtual GPU, without computing values, and is stopped after a few optimizer
steps. gpuprobe's options stand before or after the script; what follows -- is the script's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from gpuprobe.cli import exit_codes, talk
from gpuprobe.errors import ProgramFailed, UsageError

OPTIONS_AFTER_SCRIPT = True
SUPERVISED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "gpuprobe estimate (SCRIPT | -m MODULE) [--gpu GPU] [--steps N] "
        "[--compute shapes|real] [--conf CONF] [--ranks N] [--json] [--] [ARGS ...]"
    )
    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        metavar="GPU",
        help="the GPU, such as h100-80gb or 2xa100-40gb (default: h100-80gb)",
    )
    parser.add_argument(
        "--steps", type=_positive, default=3, metavar="N", help="optimizer steps (default: 3)"
    )
    parser.add_argument(
        "--compute",
        choices=("shapes", "real"),
        default="shapes",
        help="shapes: no values, fast (default); real: every value, on the CPU",
    )
    parser.add_argument(
        "--conf", metavar="CONF", help="allocator settings, as in PYTORCH_CUDA_ALLOC_CONF"
    )
    parser.add_argument(
        "--ranks", type=_positive, default=1, metavar="N", help="pretend to be one of N processes"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--top", type=_positive, default=8, metavar="N", help="rows per table (default: 8)"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module"
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api import watch
    from gpuprobe.api.virtual import estimate_program

    if args.module is not None:
        if not args.module:
            raise UsageError("-m needs the name of a module")
        target, *arguments = args.module
    elif args.script is not None:
        target, arguments = args.script, args.args
    else:
        raise UsageError("nothing to run", hint="gpuprobe estimate --gpu GPU SCRIPT")
    program = watch.program(target, arguments, module=args.module is not None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the script prints is not the answer
            found = estimate_program(
                program,
                args.gpu,
                steps=args.steps,
                compute=args.compute,
                conf=args.conf,
                ranks=args.ranks,
            )
    except ProgramFailed as error:
        if error.__cause__ is not None:
            talk.raw(watch.own_traceback(error.__cause__))
        raise
    if args.json:
        from gpuprobe.reporters.json import estimate as estimate_json

        estimate_json.write(found, sys.stdout)
    else:
        from gpuprobe.reporters.sections.plans import estimate_sections
        from gpuprobe.reporters.text import draw as text

        text.write(estimate_sections(found, args.top), sys.stdout, cwd=str(Path.cwd()))
    return exit_codes.OK if found.fits else exit_codes.FINDINGS


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return number
