"""Install the build of torch with CUDA that the native engine runs, next to one without.

`gpuprobe native install` downloads it once (0.5 GB), into the cache: the environment is not
modified. It needs neither a GPU nor NVIDIA's packages. `gpuprobe native status` shows what
--engine native would run, `gpuprobe native remove` deletes it. Options after install are passed to
pip.
"""

from __future__ import annotations

import argparse
import sys

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.errors import UsageError

EXAMPLES = {
    "gpuprobe native status": "what --engine native runs here",
    "gpuprobe native install": "download a build of torch with CUDA, once (0.5 GB)",
    "gpuprobe native remove": "delete it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuprobe native (install [PIP OPTIONS ...] | status | remove)"
    parser.add_argument("action", choices=("install", "status", "remove"))
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="PIP OPTIONS")


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api import native

    if args.options and args.action != "install":
        raise UsageError(f"{args.action} takes no options", hint="gpuprobe native --help")
    if args.action == "install":
        stderr.note(f"installed: torch {native.install(args.options)}")
        return exit_codes.OK
    if args.action == "remove":
        stderr.note("removed" if native.remove() else "there is nothing to remove")
        return exit_codes.OK
    found = native.status()
    sys.stdout.write(f"{found.text}\n")
    return exit_codes.OK if found.ready else exit_codes.ENVIRONMENT
