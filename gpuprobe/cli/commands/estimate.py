"""Estimate the memory of a training script, or of a vLLM server, on a GPU, without that GPU.

The script runs on a simulated GPU, without computing values of large tensors, for a few optimizer
steps and the first evaluation after them. Options of gpuprobe may also follow the script, unless it
has options of the same name; arguments after -- are passed to the script.
A command of vLLM goes after --, and is run until its engine is up:
gpuprobe estimate --gpu h100-80gb -- vllm serve MODEL
So does a command of Python, torchrun, accelerate or deepspeed, whose ranks are simulated:
gpuprobe estimate --gpu 4xh100-80gb -- torchrun --nproc-per-node 4 train.py
With --model, gpuprobe writes the script: gpuprobe estimate --model llama-3.1-8b --gpu rtx4090
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.cli import exit_codes, status_line, stderr
from gpuprobe.cli.model_options import add_model, check_model_options, model_script_of
from gpuprobe.cli.options import (
    Target,
    add_estimated_run,
    add_formats,
    add_program,
    add_top,
    amount,
    estimate_request,
    format_of,
    output_to_stderr,
    positive,
    program_of,
    seconds,
)
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.request import DEFAULT_GPU, EstimateRequest

if TYPE_CHECKING:
    from gpuprobe.api.models import ModelScript

OPTIONS_AFTER_SCRIPT = True
SUPERVISED = True


EXAMPLES = {
    "gpuprobe estimate train.py --gpu rtx4090": "does it fit on 24 GB?",
    "gpuprobe estimate --model llama-3.1-8b --method lora --gpu rtx4090": "without a script",
    "gpuprobe estimate train.py --gpu a100-40gb -- --batch-size 16": "with an option of the script",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuprobe estimate [OPTIONS] (SCRIPT | -m MODULE | --model NAME) [--] [ARGS ...]"
    add_estimated_run(parser)
    parser.add_argument(
        "--per-node",
        type=positive,
        default=0,
        metavar="N",
        help="with --ranks: ranks on each node (default: the number of GPUs of --gpu)",
    )
    parser.add_argument(
        "--network",
        type=amount,
        default=0.0,
        metavar="GB/S",
        help="with --ranks: bandwidth of each GPU's network adapter, to predict the time of "
        "communication between nodes (InfiniBand NDR: 45, HDR: 22.5)",
    )
    parser.add_argument(
        "--gpus",
        default="",
        metavar="GPU,...",
        help="estimate on each of these GPUs, or on all of the catalogue (all), and print a table: "
        "which hold it, how fast it is there, what it costs",
    )
    parser.add_argument(
        "-o", "--output", metavar="NAME.gpuprobe", help="keep the recording of the simulated ranks"
    )
    parser.add_argument(
        "--no-suggestions",
        action="store_true",
        help="if it does not fit, do not run the script again with changes that save memory",
    )
    parser.add_argument(
        "--max-seconds",
        type=seconds,
        default=600.0,
        metavar="S",
        help="end the program after this time, with the estimate of the steps that it has made, "
        "two at least (default: 600)",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also the sources of a step's time"
    )
    add_formats(parser)
    add_top(parser, 8)
    add_model(parser)
    add_program(parser)


def _notify(text: str) -> None:
    """Print a note, and show it as what the command does."""
    stderr.note(text)
    if status_line.PROGRESS is not None:
        status_line.PROGRESS.report(text.partition(" (")[0])


def run(args: argparse.Namespace) -> int:
    if check_model_options(args):
        with model_script_of(args) as model:
            return _estimate(args, _request(args, Target(model.path, (), False)), model)
    from gpuprobe.planning.commands import is_command, launched_by, serving_command

    target = program_of(args, "gpuprobe estimate --gpu GPU SCRIPT, or --model NAME")
    words = [target.target, *target.arguments]
    if serving_command(words, module=target.module) is not None:
        return _estimate_serving(args, words, module=target.module)
    if not target.module and is_command(target.target):
        launched = launched_by(words, args.gpu)
        target = Target(launched.target, launched.arguments, launched.module)
        if args.ranks == 1:
            args.ranks = launched.ranks
    return _estimate(args, _request(args, target))


def _request(args: argparse.Namespace, target: Target) -> EstimateRequest:
    return estimate_request(
        args,
        target,
        ranks=args.ranks,
        network=args.network,
        per_node=args.per_node,
        output=args.output or "",
        suggest=not args.no_suggestions,
        max_seconds=args.max_seconds,
        gpus=args.gpus or ("all" if args.gpu == "all" else ""),
    )


def _estimate(
    args: argparse.Namespace, request: EstimateRequest, model: ModelScript | None = None
) -> int:
    """Make the requested estimate and print it; returns the exit code."""
    from dataclasses import replace

    from gpuprobe.api.render import render
    from gpuprobe.planning.estimates import estimate_program

    if request.gpus:
        return _print_table(args, request)
    progress = status_line.PROGRESS  # without one, the command was called from Python
    with output_to_stderr():
        estimate = estimate_program(
            request,
            alternatives=None if model is None else model.alternatives,
            notify=_notify,
            progress=None if progress is None else partial(progress.step, of=request.steps),
        )
    if model is not None:
        estimate = replace(estimate, model=model.choices)
    # A written script may be in a temporary folder, whose name is random.
    folder = Path.cwd() if model is None else Path(model.path).parent.absolute()
    out = sys.stdout
    render(estimate, format_of(args), out, full=args.verbose, top=args.top, cwd=str(folder))
    return exit_codes.OK if estimate.fits else exit_codes.FINDINGS


def _estimate_serving(args: argparse.Namespace, words: Sequence[str], *, module: bool) -> int:
    """Estimate a server and print the result; returns the exit code."""
    from gpuprobe.api.render import render
    from gpuprobe.api.serving import estimate_serving

    if args.price.by_gpu:
        raise UsageError("--price: the time of serving is not predicted")
    server = estimate_serving(words, args.gpu, module=module, notify=stderr.note)
    assert server is not None  # it is a command of vLLM
    render(server, format_of(args), sys.stdout, cwd=str(Path.cwd()))
    return exit_codes.OK if server.started else exit_codes.FINDINGS


def _print_table(args: argparse.Namespace, request: EstimateRequest) -> int:
    """Make the requested estimates on several GPUs and print a table; returns the exit code."""
    from gpuprobe.api.render import render
    from gpuprobe.planning.estimates import estimate_on_gpus

    if request.output:
        raise UsageError("--output keeps the recording of one GPU", hint="--gpu GPU without --gpus")
    if args.gpus and request.gpu not in (DEFAULT_GPU, "all"):
        raise UsageError(f"--gpu {request.gpu} and --gpus {args.gpus}: name all in --gpus")
    table = estimate_on_gpus(request, _notify)
    render(table, format_of(args), sys.stdout)
    return exit_codes.OK if any(row.fits for row in table.rows) else exit_codes.FINDINGS
