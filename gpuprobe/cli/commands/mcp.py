"""Serve gpuprobe's tools to agents over the Model Context Protocol, on stdin and stdout.

An agent's client starts this command. The tools are info, doctor, estimate, fit, report, diff,
replay and hazards. They use files of the working folder only; estimate, fit and hazards execute the
script that they get, which is not limited.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import positive, seconds
from gpuprobe.errors import MissingExtra, UsageError

EXAMPLES = {
    "gpuprobe mcp": "what an agent's client starts; the tools use files of the working folder",
    "gpuprobe mcp --allow /data/recordings": "and those of another folder",
    "gpuprobe mcp --timeout 120": "end a call after two minutes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow",
        metavar="PATH",
        action="append",
        default=[],
        help="a folder whose files the tools may use, in addition to the working folder "
        "(repeatable)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="the longest time for one call of a tool (default: 600)",
    )
    parser.add_argument(
        "--max-output",
        type=positive,
        default=100_000,
        metavar="BYTES",
        help="the largest result of a tool; the longest lists of larger ones are cut at their end "
        "(default: 100000)",
    )


def run(args: argparse.Namespace) -> int:
    if not args.timeout:
        raise UsageError("--timeout needs more than 0 seconds")
    _require_sdk()
    from gpuprobe.agents.folders import Folders

    folders = Folders.of(str(Path.cwd()), args.allow)
    # 0.9 s, most of it the SDK
    from gpuprobe.agents.process import CallLimits
    from gpuprobe.agents.server import serve

    if sys.stdin is not None and sys.stdin.isatty():
        stderr.note("serving an agent on stdin and stdout (end with Ctrl-D)")
    serve(folders, CallLimits(args.timeout, args.max_output))
    return exit_codes.OK


def _require_sdk() -> None:
    """Raises MissingExtra without version 2 of the SDK or a later one."""
    if find_spec("mcp") is None:
        raise MissingExtra("mcp", "mcp", why="the SDK of the Model Context Protocol")
    if find_spec("mcp_types") is None:  # a distribution that version 2 brought
        raise MissingExtra("mcp 2.0", "mcp", why="an older version is installed")
