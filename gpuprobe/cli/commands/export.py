"""Export the metrics of GPUs and runs: for Prometheus to scrape, or for node_exporter's textfile
collector.

Runs until Ctrl-C or SIGTERM, or exports once with --once. Reads NVML and creates no CUDA context.
Values that cannot be read are omitted. --once exits with 3 if there is neither a driver nor a run.
"""

from __future__ import annotations

import argparse
import sys

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_demo
from gpuprobe.errors import UsageError

_LISTEN = "127.0.0.1:9400"


EXAMPLES = {
    "gpuprobe export --prometheus": "serve metrics on http://127.0.0.1:9400/metrics",
    "gpuprobe export --textfile gpuprobe.prom": "write them for node_exporter",
    "gpuprobe export --prometheus --once": "print them once",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prometheus", action="store_true", help="serve the metrics in Prometheus' text format"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help=f"address to serve them on (default: {_LISTEN})"
    )
    parser.add_argument(
        "--textfile", metavar="FILE.prom", help="write them to a file, for node_exporter"
    )
    parser.add_argument("--once", action="store_true", help="read and export once, then exit")
    parser.add_argument(
        "--interval",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="minimum time between two readings (default: 10)",
    )
    parser.add_argument(
        "--runs",
        metavar="PATH",
        nargs="+",
        default=[],
        help="also export these recordings, or directories of recordings, while they are written "
        "(default: those written by this user's processes; for root, by all)",
    )
    parser.add_argument(
        "--no-discovery", action="store_true", help="export only the runs given by --runs"
    )
    parser.add_argument(
        "--max-runs", type=int, default=16, metavar="N", help="export at most N runs (default: 16)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="also export the memory of the N largest processes of each GPU (default: 0)",
    )
    add_demo(parser)


def run(args: argparse.Namespace) -> int:
    from gpuprobe.exporter.export import export, export_once
    from gpuprobe.exporter.readings import ExportSettings

    if not (args.prometheus or args.textfile):
        raise UsageError(
            "nothing to export to",
            hint="gpuprobe export --prometheus or --textfile FILE.prom",
        )
    if args.listen is not None and (args.once or not args.prometheus):
        raise UsageError("--listen requires --prometheus without --once")
    if not 0.1 <= args.interval <= 3600:
        raise UsageError("--interval takes 0.1 to 3600 seconds")
    if not 0 <= args.processes <= 100:
        raise UsageError("--processes takes 0 to 100")
    if not 1 <= args.max_runs <= 100:
        raise UsageError("--max-runs takes 1 to 100")
    settings = ExportSettings(
        runs=tuple(args.runs),
        discover=not args.no_discovery,
        max_runs=args.max_runs,
        processes=args.processes,
        interval=args.interval,
        demo=args.demo,
    )
    if args.once:
        done = export_once(
            settings,
            stream=sys.stdout if args.prometheus else None,
            textfile=args.textfile,
        )
        for message in done.messages:
            stderr.warning(message)
        return exit_codes.OK if done.anything else exit_codes.ENVIRONMENT
    try:
        export(
            settings,
            listen=(args.listen or _LISTEN) if args.prometheus else None,
            textfile=args.textfile,
            notify=stderr.note,
            warn=stderr.warning,
        )
    except KeyboardInterrupt:  # how it ends: no error
        return exit_codes.INTERRUPTED
    return exit_codes.OK
