"""Check a training run's memory against a baseline; a regression is exit code 1.

TARGET is a recording, or a script that is run and recorded. gpuprobe's options stand before or
after it; what follows -- is the script's own. What is not given comes from the baseline, then
from [tool.gpuprobe] in pyproject.toml: run, gpu, steps, hazards, baseline and tolerance. Without
TARGET, what follows -- is added to what the project runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from gpuprobe.cli import annotate, exit_codes
from gpuprobe.cli.after_script import PROJECTS_OWN
from gpuprobe.cli.options import add_gpu, add_program, answering, positive

OPTIONS_AFTER_SCRIPT = True
SUPERVISED = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "gpuprobe check [RECORDING | SCRIPT | -m MODULE] [--baseline FILE] [--virtual GPU] "
        "[--stop-after N] [--hazards] [--tolerance METRIC=AMOUNT] [--repeat N] "
        "[--json | --markdown] [--] [ARGS ...]"
    )
    add_target(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="also write SARIF 2.1.0")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write JUnit XML")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page")
    parser.add_argument(
        "--repeat",
        type=positive,
        metavar="N",
        help="run the script N times, and compare what all runs need (default: once, and once more "
        "where memory grew)",
    )
    parser.add_argument(
        "--accept-environment",
        action="store_true",
        help="compare with a baseline of another GPU, torch or allocator setting all the same",
    )
    annotate.add_option(parser, "--annotations")
    add_script(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """What `check` and `baseline` have in common."""
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="the baseline (JSON, kept in the repository)",
    )
    add_gpu(parser, "--virtual", "simulate this GPU: no real one is needed (list: those known)")
    parser.add_argument(
        "--compute",
        choices=("real", "shapes"),
        help="what the virtual GPU does: shapes computes no values, and large models cost little",
    )
    parser.add_argument(
        "--stop-after",
        type=positive,
        metavar="N",
        help="end the script after so many optimizer steps (default: its own end)",
    )
    parser.add_argument(
        "--hazards",
        action=argparse.BooleanOptionalAction,
        help="also count races and implicit synchronisations",
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="METRIC=AMOUNT",
        help="accept this much more, such as peak_allocated=2%% or peak_reserved=64MiB",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(projects_own=True)
    add_program(parser, "target")


def planned(args: argparse.Namespace, *, before: Any, project: Any, **more: Any) -> Any:
    """What is to be run or read, from the options, the baseline and the project's file."""
    from gpuprobe.api.check import plan

    own = args.target == PROJECTS_OWN
    command = [] if args.target is None or own else [args.target, *args.args]
    return plan(
        args.module if args.module is not None else command,
        more=args.args if own else (),
        module=args.module is not None,
        gpu=args.virtual,
        steps=args.stop_after,
        hazards=args.hazards,
        compute=args.compute,
        before=before,
        project=project,
        **more,
    )


def measured(plan: Any) -> Any:
    """Run or read what is to be compared. What a script prints goes to stderr."""
    from gpuprobe.api.check import measure_as_planned

    with answering():
        return measure_as_planned(plan)


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.check import (
        baseline_path,
        compare_as_planned,
        ensure_writable,
        measure_apart,
        read_baseline,
        read_project,
        tolerances,
    )

    accepted = tolerances(args.tolerance)
    project = read_project()
    path = baseline_path(args.baseline, project)
    before = read_baseline(path)
    plan = planned(
        args,
        before=before,
        project=project,
        accepted=accepted,
        accept_environment=args.accept_environment,
        repeat=args.repeat,
    )
    ensure_writable(args.sarif, args.junit, args.html)
    result = compare_as_planned(before, measured(plan), plan, measure_apart, path)
    from gpuprobe.reporters.ci import junit, sarif
    from gpuprobe.reporters.ci.annotations import checkout
    from gpuprobe.reporters.json import check as check_json
    from gpuprobe.reporters.sections.check import check_sections, job_summary
    from gpuprobe.reporters.text import draw as text

    found = check_json.findings(result)
    root = project.root or str(Path.cwd())
    if args.sarif is not None:
        with args.sarif.open("w", encoding="utf-8") as stream:
            sarif.write(
                found,
                stream,
                root,
                elsewhere=str(path.absolute()),
                repository=checkout(os.environ, root),
            )
    if args.junit is not None:
        every = (*result.metrics, *result.phases)
        passed = [metric.name for metric in every if not metric.regressed]
        with args.junit.open("w", encoding="utf-8") as stream:
            junit.write(found, stream, suite="memory", passed=passed)
    if args.html is not None:
        from gpuprobe.api.views import write_check

        write_check(result, args.html, title=args.target or args.html.name)
    if args.annotations is not None:
        args.annotations.write(found, str(path.absolute()), project=project.root)
    if args.json:
        check_json.write(result, sys.stdout)
    elif args.markdown:
        from gpuprobe.reporters import markdown

        markdown.write(job_summary(result), sys.stdout)
    else:
        text.write(check_sections(result), sys.stdout)
    if result.mismatches:
        return exit_codes.USAGE
    return exit_codes.OK if result.ok else exit_codes.FINDINGS
