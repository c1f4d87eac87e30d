"""Compare a training run's memory with a baseline; a regression exits with 1, an incomplete
recording with 4.

TARGET is a recording, or a script to run and record. Options of gpuprobe may also follow it, unless
the script has options of the same name; arguments after -- are passed to the script. Missing
options come from the baseline, then from [tool.gpuprobe] in pyproject.toml. Without TARGET,
options after -- are added to the project's command; a command after -- is run and recorded.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.cli import annotate, exit_codes, stderr
from gpuprobe.cli.after_script import PROJECTS_OWN
from gpuprobe.cli.options import (
    add_formats,
    add_gpu,
    add_program,
    format_of,
    machine_for,
    output_to_stderr,
    positive,
    seconds,
)
from gpuprobe.cli.status_line import StatusLine
from gpuprobe.errors import EnvironmentUnavailable, ProgramFailed, UsageError

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline.model import Baseline, CheckResult
    from gpuprobe.gate.plan import CheckPlan
    from gpuprobe.gate.project import ProjectSettings

OPTIONS_AFTER_SCRIPT = True
SUPERVISED = True


EXAMPLES = {
    "gpuprobe check": "this project's run, from pyproject.toml, with its baseline",
    "gpuprobe check train.py --gpu h100-80gb --stop-after 3": "three steps, without a GPU",
    "gpuprobe check train.py --tolerance peak_allocated=2%": "accept 2% more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuprobe check [OPTIONS] [RECORDING | SCRIPT | -m MODULE] [--] [ARGS ...]"
    add_target(parser)
    add_formats(parser, "markdown")
    parser.add_argument("-v", "--verbose", action="store_true", help="show everything")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="also write SARIF 2.1.0")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write JUnit XML")
    parser.add_argument(
        "--repeat",
        type=positive,
        metavar="N",
        help="run the script N times and compare the memory common to all runs (default: once, "
        "and again if memory grew)",
    )
    parser.add_argument(
        "--accept-environment",
        action="store_true",
        help="compare even if the baseline has a different GPU, torch or allocator setting",
    )
    parser.add_argument(
        "--blame-budget",
        type=seconds,
        metavar="SECONDS",
        help="if memory grew, search for the cause, by runs with parts of the change reverted, for "
        "at most this long (default: twice the time of the check; 0: rank the changes by rules)",
    )
    annotate.add_option(parser, "--annotations")
    parser.add_argument(
        "--comment",
        action="store_true",
        help="in a job of GitHub or GitLab, also write the report as one comment of the pull or "
        "merge request, in place of that of an earlier run",
    )
    add_script(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check` and `baseline` share."""
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="the baseline (JSON, kept in the repository)",
    )
    add_gpu(parser, "simulate this GPU (list: print the supported ones)")
    parser.add_argument(
        "--compute",
        choices=("auto", "real", "shapes"),
        help="with --gpu, values to compute: real: all; shapes: those of small tensors; auto "
        "(default): all while they cost seconds, then as shapes",
    )
    parser.add_argument(
        "--stop-after",
        type=positive,
        metavar="N",
        help="stop the script after N optimizer steps (default: run to the end)",
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
        help="accepted increase, such as peak_allocated=2%% or peak_reserved=64MiB",
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="NAME",
        help="one of several runs of the project (repeatable; default: all)",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(projects_own=True)
    add_program(parser, "target")


def is_given(args: argparse.Namespace) -> bool:
    """Whether the command line names a program or a recording."""
    return args.module is not None or args.target not in (None, PROJECTS_OWN)


def planned(
    args: argparse.Namespace, *, before: Baseline | None, project: ProjectSettings, **more: Any
) -> CheckPlan:
    """The plan of a run, from the options, the baseline and pyproject.toml."""
    from gpuprobe.gate.plan import gpu_of, own_command, plan
    from gpuprobe.planning.commands import is_command

    own = args.target == PROJECTS_OWN
    command = [] if args.target is None or own else [args.target, *args.args]
    name = more.get("name", "")
    if own and args.args and not args.args[0].startswith("-") and is_command(args.args[0]):
        words = tuple(args.args)
    elif args.module is None and not command and not args.args:
        words = own_command(before, project, name)
    else:
        words = ()
    if words:
        gpu = args.gpu or gpu_of(before, project, name)
        return plan(
            [_recorded(args, words, gpu)],
            before=before,
            project=project,
            recorded=("--", *words),
            gpu=gpu,
            **more,
        )
    return plan(
        args.module if args.module is not None else command,
        more=args.args if own else (),
        module=args.module is not None,
        gpu=args.gpu,
        steps=args.stop_after,
        hazards=args.hazards,
        compute=args.compute,
        before=before,
        project=project,
        **more,
    )


def _recorded(args: argparse.Namespace, words: Sequence[str], gpu: str | None) -> str:
    """Run a command, and return its recording, which exists as long as this process."""
    import atexit
    import shutil
    import tempfile

    from gpuprobe.api.commands import failed_ranks, run_command

    if args.stop_after or args.hazards:
        raise UsageError("--stop-after and --hazards need a script, not a command")
    if gpu is not None:
        gpu = machine_for(words, gpu)
    folder = tempfile.mkdtemp(prefix="gpuprobe-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    output = Path(folder) / "command.gpuprobe"
    with output_to_stderr():
        result = run_command(
            words,
            output,
            level="trace",
            trace_steps="all",
            gpu=gpu,
            compute=args.compute or "real",
        )
    if result.code or not result.recordings:
        why = failed_ranks(result) or f"it exited with code {result.code}"
        raise ProgramFailed(
            f"{words[0]}: {why if result.code else 'no process used a GPU through torch'}"
        )
    return str(result.recordings[0])


def measured(plan: CheckPlan, *, alone: bool = True) -> Baseline:
    """Measure a run. Output of the script goes to stderr. Each of several runs has its own process,
    without the imports and device memory of the others."""
    from gpuprobe.api.check import measure_apart, measure_as_planned

    if not alone:
        return measure_apart(plan, shown=True)
    with output_to_stderr():
        return measure_as_planned(plan, stderr.note, StatusLine().step)


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.blame import BlameOptions
    from gpuprobe.api.check import compare_as_planned, measure_apart, pull_request_comment
    from gpuprobe.gate.files import ensure_writable, read_baseline
    from gpuprobe.gate.plan import baseline_path, chosen_runs, tolerances
    from gpuprobe.gate.project import read_project

    accepted = tolerances(args.tolerance)
    project = read_project()
    names = chosen_runs(args.run, is_given(args), args.baseline, project)
    paths, plans = {}, {}
    for name in names:
        paths[name] = path = baseline_path(args.baseline, project.runs.get(name, project))
        before = read_baseline(path, name)
        plans[name] = (
            before,
            planned(
                args,
                before=before,
                project=project,
                name=name,
                accepted=accepted,
                accept_environment=args.accept_environment,
                repeat=args.repeat,
            ),
        )
    ensure_writable(args.sarif, args.junit)
    comment = pull_request_comment() if args.comment else None
    alone = len(names) == 1
    results = []
    for name, (before, plan) in plans.items():
        blame = BlameOptions(budget=args.blame_budget, progress=_progress())
        after = measured(plan, alone=alone)
        results.append(
            compare_as_planned(before, after, plan, measure_apart, paths[name], blame=blame)
        )
    _report(args, results, project.root, str(paths[names[0]].absolute()))
    if comment is not None:
        _comment(comment, results, paths[names[0]])
    missing = [text for result in results for text in result.incomplete]
    if missing:
        stderr.error(f"the recording is incomplete: {missing[0]}")
        return exit_codes.BAD_DATA
    if any(result.mismatches for result in results):
        return exit_codes.USAGE
    return exit_codes.OK if all(result.ok for result in results) else exit_codes.FINDINGS


def _comment(
    comment: Callable[[str, str], None], results: list[CheckResult], baseline: Path
) -> None:
    """Write the comment; a service that does not take it does not change how the check ends."""
    from gpuprobe.api.render import CheckResults, render

    text = io.StringIO()
    render(CheckResults(results), "markdown", text)
    try:
        comment(text.getvalue(), baseline.name)
    except EnvironmentUnavailable as error:
        stderr.note(str(error))


def _progress() -> Callable[[str], None]:
    """A function that prints progress of the search for a cause, on a terminal only."""
    stream = sys.stderr
    return stderr.note if stream is not None and stream.isatty() else lambda text: None


def _report(
    args: argparse.Namespace, results: list[CheckResult], project: str, baseline: str
) -> None:
    from gpuprobe.api.check import write_findings
    from gpuprobe.api.render import CheckResults, render

    root = project or str(Path.cwd())
    found = write_findings(results, root, baseline, sarif=args.sarif, junit=args.junit)
    if args.annotations is not None:
        args.annotations.write(found, baseline, project=project)
    render(CheckResults(results), format_of(args), sys.stdout, full=args.verbose)
