"""Find the largest batch size (or another number) with which a script fits on a GPU, or how long
a context and how many sequences a vLLM server takes.

Every figure is an estimate from running the script on a simulated GPU; see gpuprobe estimate.
Options of gpuprobe may also follow the script, unless the script has options of the same name;
arguments after -- are passed to the script.
A command of vLLM goes after --, and is started for each figure:
gpuprobe fit --gpu l4,h100-80gb --input-len 2000 --output-len 500 -- vllm serve MODEL
With --model, gpuprobe writes the script: gpuprobe fit --model llama-3.1-8b --gpu a100-40gb
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.model_options import add_model, check_model_options, model_script_of
from gpuprobe.cli.options import (
    Target,
    add_estimated_run,
    add_formats,
    add_program,
    estimate_request,
    format_of,
    positive,
    program_of,
)
from gpuprobe.errors import UsageError

OPTIONS_AFTER_SCRIPT = True


EXAMPLES = {
    "gpuprobe fit train.py --arg batch_size --gpu a100-40gb": "the largest batch that fits",
    "gpuprobe fit train.py --arg batch_size --gpu t4,l4,a10g": "the same for each of three GPUs",
    "gpuprobe fit --model llama-3.1-8b --method lora --gpu a100-40gb": "a model, without a script",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "gpuprobe fit [OPTIONS] (SCRIPT --arg NAME | --model NAME | -- vllm serve MODEL) [ARGS ...]"
    )
    parser.add_argument(
        "--arg",
        metavar="NAME",
        help="the value to vary: an option of the script (batch_size means --batch-size), or a "
        "number assigned at its top level (BATCH_SIZE = 8); with --model the default is batch_size",
    )
    parser.add_argument(
        "--min", type=positive, default=1, metavar="N", help="smallest value (default: 1)"
    )
    parser.add_argument(
        "--max", type=positive, default=65536, metavar="N", help="largest value (default: 65536)"
    )
    for name in ("input", "output"):
        parser.add_argument(
            f"--{name}-len",
            type=positive,
            default=0,
            metavar="N",
            help=f"for vLLM: the {name} tokens of a sequence (default: the longest context in all)",
        )
    add_estimated_run(parser, several=True)
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="also estimate changes that save memory, and the largest value with each",
    )
    parser.add_argument(
        "--max-seconds",
        type=positive,
        default=600,
        metavar="S",
        help="end the search after this time, with the largest value that fits so far (default: "
        "600; not for vLLM)",
    )
    add_formats(parser)
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    add_model(parser)
    add_program(parser, modules=False)


def run(args: argparse.Namespace) -> int:
    if check_model_options(args):
        if len(args.ranks) > 1:
            raise UsageError(
                "--model writes a script for one number of ranks", hint="one run for each --ranks N"
            )
        with model_script_of(args) as model:
            return _fit(args, Target(model.path, (), False), args.arg or "batch_size")
    target = program_of(args, "gpuprobe fit SCRIPT --gpu GPU --arg batch_size, or --model NAME")
    if args.arg is None:
        return _serving(args, [target.target, *target.arguments])
    return _fit(args, target, args.arg)


def _notify(args: argparse.Namespace) -> Callable[[str], None]:
    return (lambda message: None) if args.quiet else stderr.note


def _fit(args: argparse.Namespace, target: Target, name: str) -> int:
    """Search for the largest value and print the result; returns the exit code."""
    from gpuprobe.api.render import render
    from gpuprobe.planning.fit import fit_program

    found = fit_program(
        estimate_request(args, target, ranks=1, suggest=args.suggest),
        name,
        ranks=args.ranks,
        least=args.min,
        most=args.max,
        max_seconds=args.max_seconds,
        notify=_notify(args),
    )
    render(found, format_of(args), sys.stdout, cwd=str(Path.cwd()))
    if found.interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.OK if found.largest is not None else exit_codes.FINDINGS


def _serving(args: argparse.Namespace, words: list[str]) -> int:
    from gpuprobe.api.render import render
    from gpuprobe.api.serving import fit_serving
    from gpuprobe.planning.commands import serving_command

    if args.price.by_gpu and serving_command(words) is not None:
        raise UsageError("--price: the time of serving is not predicted")
    found = fit_serving(
        words,
        args.gpu,
        input_len=args.input_len,
        output_len=args.output_len,
        suggest=args.suggest,
        notify=_notify(args),
    )
    if found is None:
        raise UsageError(
            "--arg is missing: the value to vary", hint="gpuprobe fit SCRIPT --arg batch_size"
        )
    render(found, format_of(args), sys.stdout, cwd=str(Path.cwd()))
    return exit_codes.OK if found.found is not None else exit_codes.FINDINGS
