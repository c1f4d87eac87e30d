"""Write the baseline that `gpuprobe check` compares with."""

from __future__ import annotations

import argparse
import os

from gpuprobe.cli import exit_codes, stderr
from gpuprobe.cli.commands import check
from gpuprobe.cli.options import add_json, render_written
from gpuprobe.errors import UsageError

SUPERVISED = True

_USAGE = "gpuprobe baseline update [OPTIONS] [RECORDING | SCRIPT | -m MODULE] [--] [ARGS ...]"

_UPDATE = (
    "Run a script or read a recording, and write the baseline for gpuprobe check. Missing "
    "options come from [tool.gpuprobe] in pyproject.toml, then from the old baseline. Commit the "
    "file: it is small and sorted, so that its changes can be reviewed."
)


EXAMPLES = {
    "gpuprobe baseline update": "accept this project's memory as it is now",
    "gpuprobe baseline update train.py --gpu h100-80gb --stop-after 3": "write the first baseline",
    "gpuprobe baseline update train.gpuprobe --baseline memory.json": "from a recording",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = _USAGE
    # The subcommand's options and the script's are parsed in a second pass. One argument, because
    # a second one would consume a --.
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="update ...",
        help="create or update the baseline; options as for gpuprobe check",
    )


def update_parser() -> argparse.ArgumentParser:
    """The parser of what follows ``update``."""
    from gpuprobe.cli.parser import Parser

    parser = Parser(prog="gpuprobe baseline update", usage=_USAGE, description=_UPDATE)
    check.add_target(parser)
    check.add_script(parser)
    parser.add_argument(
        "--no-sources",
        action="store_true",
        help="store digests of the program's files only, not their text: the cause of a change is "
        "then found only in a git repository that has the baseline's commit",
    )
    add_json(parser)
    parser.add_argument("--no-notes", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace) -> int:
    from gpuprobe.api.check import without_ignored, without_texts
    from gpuprobe.cli.parser import own_options_first
    from gpuprobe.gate.files import ensure_writable, replaced_baseline, write_runs
    from gpuprobe.gate.plan import baseline_path, chosen_runs, tolerances
    from gpuprobe.gate.project import read_project

    if not args.words:
        raise UsageError("missing subcommand: update", hint="gpuprobe baseline update")
    action, *rest = args.words
    if action != "update":
        raise UsageError(f"invalid choice: {action!r}", hint="gpuprobe baseline --help")
    parser = update_parser()
    options = parser.parse_args(own_options_first(parser, rest))
    accepted = tolerances(options.tolerance)
    project = read_project()
    names = chosen_runs(options.run, check.is_given(options), options.baseline, project)
    paths, plans = {}, {}
    for name in names:
        paths[name] = path = baseline_path(options.baseline, project.runs.get(name, project))
        before, _ = replaced_baseline(path, name)
        ensure_writable(path)
        plans[name] = check.planned(
            options, before=before, project=project, name=name, writing=True
        )
    alone = len(names) == 1
    found = {name: check.measured(plan, alone=alone) for name, plan in plans.items()}
    found = {name: without_ignored(found[name], plan.root) for name, plan in plans.items()}
    if options.no_sources:
        found = {name: without_texts(baseline) for name, baseline in found.items()}
    files = list(dict.fromkeys(paths.values()))
    for path in files:
        write_runs({name: found[name] for name in names if paths[name] == path}, path, accepted)
    render_written(options, files)
    if options.no_notes:
        return exit_codes.OK
    for name, plan in plans.items():
        of = f"{name}: " if name else ""
        for setting in plan.settings:
            stderr.note(f"{of}{setting.name}: {setting.value} ({setting.source})")
    for path in files:
        stderr.note(f"baseline written: {os.path.relpath(path)}")
    return exit_codes.OK
