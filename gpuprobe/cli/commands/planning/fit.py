"""Find the largest batch size (or another number) with which a script fits on a GPU.

Every figure is an estimate of a real run of the script on a virtual GPU; see gpuprobe estimate.
gpuprobe's options stand before or after the script; what follows -- is the script's own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpuprobe.cli import exit_codes, talk
from gpuprobe.errors import UsageError

OPTIONS_AFTER_SCRIPT = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "gpuprobe fit SCRIPT --arg NAME [--gpu GPU] [--min N] [--max N] [--steps N] "
        "[--compute shapes|real] [--conf CONF] [--no-suggestions] [--json] [--] [ARGS ...]"
    )
    parser.add_argument(
        "--arg",
        required=True,
        metavar="NAME",
        help="what to vary: an option of the script's (batch_size stands for --batch-size), or a "
        "number that it assigns at its top level (BATCH_SIZE = 8)",
    )
    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        metavar="GPU",
        help="the GPU, such as h100-80gb or 2xa100-40gb (default: h100-80gb)",
    )
    parser.add_argument(
        "--min", type=_positive, default=1, metavar="N", help="smallest value (default: 1)"
    )
    parser.add_argument(
        "--max", type=_positive, default=65536, metavar="N", help="largest value (default: 65536)"
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
    parser.add_argument(
        "--no-suggestions", action="store_true", help="only search; estimate no changes to the run"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="do not say what is being tried")
    parser.add_argument("script", nargs="?", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS")


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.virtual import fit_program
    from gpuprobe.reporters.json import fit as fit_json
    from gpuprobe.reporters.sections.plans import fit_sections
    from gpuprobe.reporters.text import draw as text

    if args.script is None:
        raise UsageError("nothing to run", hint="gpuprobe fit SCRIPT --gpu GPU --arg batch_size")

    def notify(message: str) -> None:
        if not args.quiet:
            talk.say(f"gpuprobe: {message}")

    found = fit_program(
        args.script,
        args.arg,
        args.args,
        gpu=args.gpu,
        least=args.min,
        most=args.max,
        steps=args.steps,
        compute=args.compute,
        conf=args.conf,
        ranks=args.ranks,
        suggest=not args.no_suggestions,
        notify=notify,
    )
    if args.json:
        fit_json.write(found, sys.stdout)
    else:
        text.write(fit_sections(found), sys.stdout, cwd=str(Path.cwd()))
    return exit_codes.OK if found.largest is not None else exit_codes.FINDINGS


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, found {text!r}")
    return number
