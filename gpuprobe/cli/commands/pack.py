"""Pack a recording of many ranks into one Parquet file."""

from __future__ import annotations

import argparse

from gpuprobe.api.recordings import pack
from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.options import add_formats, render_written
from gpuprobe.model.text import visible

EXAMPLES = {
    "gpuprobe pack train.gpuprobe": "write train.parquet",
    "gpuprobe pack train.gpuprobe -o /data/run-7.parquet": "write it elsewhere",
    "gpuprobe pack train.gpuprobe --force": "replace an earlier file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", help="a recording (directory)")
    parser.add_argument(
        "-o", "--output", metavar="FILE.parquet", help="default: the recording's name with .parquet"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    add_formats(parser, "WrittenFiles")


def run(args: argparse.Namespace) -> int:
    written = pack(args.recording, args.output, force=args.force)
    stderr.print_line(f"wrote {visible(str(written))}")
    render_written(args, [written])
    return exit_codes.OK
