"""Show a live dashboard of the GPUs, their processes and the host.

Reads NVML and creates no CUDA context. Press ? for the keys. Piped, or with --once, prints
the output of ``gpuprobe info``, and exits with 3 without a driver.
"""

from __future__ import annotations

import argparse
import gc
import sys

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_demo, add_json, format_of, positive
from gpuprobe.cli.screen import can_show, columns
from gpuprobe.errors import UsageError
from gpuprobe.model.machine.selection import Selection
from gpuprobe.model.text import visible

EXAMPLES = {
    "gpuprobe top": "watch this machine's GPUs",
    "gpuprobe top --only 0,1 --user $USER": "two GPUs, and your processes only",
    "gpuprobe top --demo": "try it with a simulated fleet",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print text and exit")
    add_json(parser, "print the readings once, as gpuprobe info --json does")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between readings"
    )
    add_demo(parser)
    parser.add_argument(
        "--user",
        action="append",
        default=[],
        metavar="NAME",
        help="only processes of this user (repeatable)",
    )
    parser.add_argument(
        "--pid",
        action="append",
        default=[],
        type=positive,
        metavar="PID",
        help="only this process (repeatable)",
    )
    parser.add_argument(
        "--only",
        metavar="GPUS",
        help="only these GPUs: NVML numbers, UUIDs or PCI addresses, with commas",
    )
    parser.add_argument(
        "--log", metavar="FILE", help="write every reading to a new file, for --replay"
    )
    parser.add_argument("--replay", metavar="FILE", help="replay the readings of such a file")
    parser.add_argument(
        "--readonly",
        action="store_true",
        help="no kills, files or saved settings",
    )


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.devices import inventory
    from gpuprobe.testing import fleets

    if not 0.05 <= args.interval <= 3600:
        raise UsageError("--interval takes 0.05 to 3600 seconds")
    if args.demo is not None and args.demo not in fleets():
        raise UsageError(f"no such fleet: {args.demo}", hint=f"fleets: {', '.join(fleets())}")
    if args.replay is not None and (args.demo is not None or args.log is not None):
        raise UsageError("--replay cannot be combined with --demo or --log")
    if args.readonly and args.log is not None:
        raise UsageError("--readonly cannot be combined with --log")
    selection = Selection(
        tuple(args.user), tuple(args.pid), tuple(filter(None, (args.only or "").split(",")))
    )
    if args.only is not None and not selection.gpus:
        raise UsageError("--only requires at least one GPU", hint="for example --only 0,2")
    if args.once or args.json or not can_show():
        if args.log is not None:
            raise UsageError("--log needs a terminal", hint="gpuprobe info --json prints a reading")
        if args.replay is not None:
            from gpuprobe.recording.monitor_log import last_moment

            found = last_moment(args.replay).inventory
        else:
            found = inventory(("nvml",), args.demo, detail="full" if args.json else "table")
        unknown = selection.unknown_gpus(found)
        if unknown and found.devices:
            raise UsageError(
                f"no such GPU: {', '.join(map(visible, unknown))}",
                hint="gpuprobe info lists the GPUs with their NVML numbers",
            )
        from gpuprobe.api.render import render

        render(selection.of(found), format_of(args), sys.stdout, columns=columns(0))
        if any(source.available for source in found.sources):
            return exit_codes.OK
        stderr.note("no GPU is available: is there an NVIDIA driver on this machine?")
        stderr.print_line("  hint: gpuprobe top --demo shows a simulated fleet")
        return exit_codes.ENVIRONMENT

    # The imports leave no garbage: without collections the first paint is a tenth faster. The
    # screen enables the collector again after it.
    gc.disable()
    try:
        from gpuprobe.tui.monitor.app import show  # 150 ms: Textual

        return show(args, selection) or exit_codes.OK
    finally:
        gc.enable()
