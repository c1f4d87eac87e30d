"""Install the build of torch with CUDA that simulated GPUs run, next to one without.

`gpuprobe cuda-torch install` downloads it once (0.5 GB), into the cache: the environment is not
modified. It needs neither a GPU nor NVIDIA's packages. `gpuprobe cuda-torch status` shows which
torch a simulated GPU would run here, `gpuprobe cuda-torch remove` deletes the installed one.
Options after install are passed to pip.
"""

from __future__ import annotations

import argparse
import sys

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_json
from gpuprobe.errors import UsageError

EXAMPLES = {
    "gpuprobe cuda-torch status": "can simulated GPUs run here, and with which torch?",
    "gpuprobe cuda-torch install": "download a build of torch with CUDA, once (0.5 GB)",
    "gpuprobe cuda-torch remove": "delete it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuprobe cuda-torch (install [PIP OPTIONS ...] | status | remove) [--json]"
    add_json(parser, "print the status as JSON, after other actions too")
    parser.add_argument("action", choices=("install", "status", "remove"))
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="PIP OPTIONS")


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api import cuda_torch

    options = [option for option in args.options if option != "--json"]  # pip has no such option
    args.json = args.json or len(options) < len(args.options)
    if options and args.action != "install":
        raise UsageError(f"{args.action} takes no options", hint="gpuprobe cuda-torch --help")
    if args.action == "install":
        stderr.note(f"installed: torch {cuda_torch.install(options)}")
    elif args.action == "remove":
        stderr.note("removed" if cuda_torch.remove() else "there is nothing to remove")
    if args.action != "status" and not args.json:
        return exit_codes.OK
    found = cuda_torch.status()
    if args.json:
        from gpuprobe.api.render import render

        render(found, "json", sys.stdout)
    else:
        sys.stdout.write(f"{found.text}\n")
    return exit_codes.OK if found.ready or args.action != "status" else exit_codes.ENVIRONMENT
