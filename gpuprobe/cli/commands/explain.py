"""Explain the memory of a program: what it is for, what holds what is not needed, and the fix.

The program runs on a simulated GPU several times, from its start to its end. If its training takes
long, its first epoch is ended after some steps, and the program after the evaluation that follows.
Files that exist are kept: what it writes to them goes to copies. New files are written.
A command that starts ranks runs once, and no remedy is tried.
Options of gpuprobe may also follow the script, unless the script has options of the same name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import (
    add_formats,
    add_gpu,
    add_program,
    format_of,
    machine_for,
    program_of,
    seconds,
)

OPTIONS_AFTER_SCRIPT = True

EXAMPLES = {
    "gpuprobe explain train.py --steps 5": "why is its memory full?",
    "gpuprobe explain --max-seconds 300 train.py": "with more time for runs of the program",
    "gpuprobe explain --gpu 2xt4 -- torchrun --nproc-per-node 2 train.py": "a job of two ranks",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuprobe explain [OPTIONS] (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]"
    add_gpu(
        parser,
        "the GPU to simulate (default: h100-80gb; list: print the supported ones)",
        default="h100-80gb",
    )
    parser.add_argument(
        "--compute",
        choices=("auto", "real", "shapes"),
        default="auto",
        help="as for gpuprobe run (default: auto)",
    )
    parser.add_argument(
        "--max-seconds",
        type=seconds,
        default=120.0,
        metavar="S",
        help="the time for all runs of the program (default: 120)",
    )
    add_formats(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="show everything")
    add_program(parser)


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.explain import Subject, explain
    from gpuprobe.api.render import render
    from gpuprobe.api.watch import program
    from gpuprobe.planning.commands import is_command

    target = program_of(args, "gpuprobe explain SCRIPT, or gpuprobe explain -m MODULE")
    command = not target.module and is_command(target.target)
    if not target.module and not command:
        program(*target)  # raises an error for a script that does not exist, or is not Python
    gpu = machine_for([target.target, *target.arguments], args.gpu) if command else args.gpu
    subject = Subject(target.target, target.arguments, target.module, gpu, args.compute, command)
    explanation = explain(subject, budget=args.max_seconds, notify=stderr.note)
    render(explanation, format_of(args), sys.stdout, cwd=str(Path.cwd()), full=args.verbose)
    return exit_codes.FINDINGS if explanation.causes else exit_codes.OK
