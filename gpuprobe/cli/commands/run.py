"""Run a training script (or a module, with -m) like python, and record its memory.

Options for gpuprobe come before the script; everything after it is the script's own. In place of
the script, any command: what it starts is recorded, the ranks of a job as one recording.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gpuprobe.cli import annotate, exit_codes, stderr
from gpuprobe.cli.after_script import misplaced_options
from gpuprobe.cli.options import (
    Target,
    add_gpu,
    add_json,
    add_program,
    machine_for,
    output_to_stderr,
    program_of,
    seconds,
)
from gpuprobe.cli.output import flush_streams
from gpuprobe.cli.status_line import StatusLine
from gpuprobe.errors import CostMeasured, GpuprobeError, UsageError
from gpuprobe.model.outcomes import ProgramRun
from gpuprobe.model.text import human_ns, plural, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuprobe.api.commands import CommandResult
    from gpuprobe.api.watch import RunResult
    from gpuprobe.hazards.findings.code import Patch
    from gpuprobe.hazards.findings.results import Hazards
    from gpuprobe.model.needs import UsesCost
    from gpuprobe.planning.first_epoch import EpochLimit

_FILES = ("hazards_json", "hazards_sarif", "hazards_junit", "hazards_patch")


EXAMPLES = {
    "gpuprobe run --level trace train.py": "record every allocation with its line",
    "gpuprobe run --gpu 4xh100-80gb -- torchrun --nproc-per-node 4 train.py": "any command: a job",
    "gpuprobe run --gpu h100-80gb --hazards train.py": "without a GPU, and find races",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuprobe run [OPTIONS] (SCRIPT | -m MODULE | [--] COMMAND) [ARGS ...]"
    parser.add_argument(
        "--level",
        choices=("counters", "trace"),
        default="counters",
        help="counters: almost no overhead (default); trace: every allocation, with its line",
    )
    parser.add_argument(
        "--trace-steps",
        default="",
        metavar="STEPS",
        help="trace these steps, counted from 0: 3,100-102 or all (implies --level trace)",
    )
    parser.add_argument(
        "--uses",
        action="store_true",
        help="also note what each block is used for (implies --level trace); always on a "
        "simulated GPU, and on a real one the cost is printed",
    )
    add_gpu(
        parser,
        "simulate a GPU, such as h100-80gb or 2xa100-40gb (list: print the supported ones)",
    )
    parser.add_argument(
        "--compute",
        choices=("auto", "real", "shapes"),
        default="auto",
        help="with --gpu, values to compute: real: all; shapes: those of small tensors; auto "
        "(default): all while they cost seconds, then as shapes",
    )
    parser.add_argument(
        "--endless",
        action="store_true",
        help="with --gpu: the simulated GPU never runs out of memory",
    )
    parser.add_argument(
        "--first-epoch",
        type=_epoch_limit,
        metavar="STEPS[,SECONDS]",
        help="end the first epoch after so many steps that have taken so many seconds of "
        "processor time, and the program after the evaluation that follows",
    )
    parser.add_argument(
        "--hazards",
        action="store_true",
        help="detect races between CUDA streams and implicit synchronisations (without CUDA, on "
        "a simulated H100)",
    )
    for name, what in (("sarif", "SARIF 2.1.0"), ("junit", "JUnit XML"), ("json", "JSON")):
        parser.add_argument(
            f"--hazards-{name}",
            metavar="FILE",
            type=Path,
            help=f"write the findings as {what} (implies --hazards)",
        )
    parser.add_argument(
        "--hazards-patch",
        metavar="FILE",
        type=Path,
        help="write the changes that fix the findings as one patch for git apply (implies "
        "--hazards)",
    )
    annotate.add_option(parser, "--hazards-annotations", " (implies --hazards)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        help="the recording to write (default: SCRIPT.gpuprobe in the current directory)",
    )
    parser.add_argument("--force", action="store_true", help="replace the recording if it exists")
    parser.add_argument("-q", "--quiet", action="store_true", help="no status line, and no summary")
    add_json(
        parser,
        "print how the program ended and where its recordings are as JSON; the program's own "
        "output goes to stderr then",
    )
    add_program(parser)


def run(args: argparse.Namespace) -> int:
    from gpuprobe.planning.commands import is_command

    target = program_of(args, "gpuprobe run SCRIPT, or gpuprobe run -m MODULE")
    _require_gpu(args)
    if not target.module and is_command(target.target):
        return _run_command(args, [target.target, *target.arguments])
    return _run_program(args, target)


def _run_program(args: argparse.Namespace, target: Target) -> int:
    """Run a script or a module in this process."""
    from gpuprobe.api import watch

    hazards = args.hazards or any(getattr(args, name) for name in (*_FILES, "hazards_annotations"))
    if hazards:
        _fix_files(args)
    if args.gpu is not None and target.module:
        from gpuprobe.api.simulated_gpu import load_gpu

        load_gpu(args.gpu, endless=args.endless)
    program = watch.program(*target)
    output = args.output or watch.default_output(
        target.target, module=target.module, replace=args.force
    )
    where = output.absolute()  # the program may change the working directory

    silent = args.quiet or watch.rank_count() > 1  # ranks share a terminal
    folder = Path.cwd()
    try:
        with output_to_stderr() if args.json else contextlib.nullcontext():
            result = watch.run(
                program,
                output,
                level=args.level,
                force=args.force,
                warn=stderr.warning,
                gpu=args.gpu,
                compute=args.compute,
                hazards=hazards,
                trace_steps=args.trace_steps,
                on_step=None if silent else StatusLine().step,
                measure=os.environ.pop(_MEASURED, None) is None,
                endless=args.endless,
                uses=args.uses,
                epoch=args.first_epoch,
            )
    except CostMeasured as cost:
        _start_again(str(cost), folder)

    code = _exit_code(result)
    try:
        source = partial(watch.source_of, program)
        code = _after(args, result, source, output, where, code)
    except GpuprobeError:
        raise
    except Exception as error:  # noqa: BLE001 - the exit code is the program's
        stderr.warning(f"gpuprobe failed after the program: {type(error).__name__}: {error}")
    if args.json:
        _print_outcome(
            ProgramRun(
                exit_code=result.exit_code,
                failed=_one_line(result.error),
                recordings=tuple(str(path) for path in (where, *result.spawned) if path.exists()),
                hazards=None if result.hazards is None else len(result.hazards.races),
                assumed=result.assumed,
                unrecorded={},
            )
        )
    return code


def _one_line(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _print_outcome(outcome: ProgramRun) -> None:
    from gpuprobe.api.render import render

    render(outcome, "json", sys.stdout)


def _after(
    args: argparse.Namespace,
    result: RunResult,
    source: Callable[[], str],
    output: Path,
    where: Path,
    code: int,
) -> int:
    """What follows the program, whose text ``source`` returns; returns the exit code."""
    from gpuprobe.api import watch

    target = program_of(args, "")
    words = target.arguments
    misplaced = misplaced_options(_parser(), words, source, code) if words else []
    if misplaced:
        before = f"-m {target.target}" if target.module else target.target
        what = "belongs", "it is the program's own argument"
        if len(misplaced) > 1:
            what = "belong", "they are the program's own arguments"
        stderr.note(f"{', '.join(misplaced)} {what[0]} before {before}: after it, {what[1]}")
    if args.output is None and result.hazards is None and watch.discard_empty(result, output):
        return code
    if not args.quiet:
        if args.gpu is None and _needs_gpu(result.error):
            words = [*(["-m"] if target.module else []), target.target, *target.arguments]
            simulate = f"gpuprobe run --gpu h100-80gb {shlex.join(words)}"
            stderr.note("torch finds no GPU here; to run the program on a simulated one:")
            stderr.note(f"  {simulate}")
        if watch.lacks_launcher(result):
            gpus = [] if args.gpu is None else ["--gpu", args.gpu]
            words = [*(["-m"] if target.module else []), target.target, *target.arguments]
            torchrun = ["torchrun", "--nproc-per-node", "gpu"]
            launch = shlex.join(["gpuprobe", "run", *gpus, "--", *torchrun, *words])
            stderr.note("its launcher sets that variable; to record all ranks of the job:")
            stderr.note(f"  {launch}")
        _summarize(where, args.gpu or "")
        if result.uses_cost is not None:
            stderr.note(_cost_of_uses(result.uses_cost))
        for path in result.spawned:
            shown = os.path.relpath(path)
            stderr.note(f"recording of the spawned processes: {shown}   (gpuprobe report {shown})")
        _show_assumed(result.assumed)
        if result.decided:
            stderr.note(
                f"it may have failed by a value that was not computed: {result.decided} decided by "
                "one; --compute real computes all"
            )
    if result.hazards is not None:
        code = _report_hazards(args, result.hazards, code)
    return code


def _cost_of_uses(cost: UsesCost) -> str:
    whole = human_ns(cost.operators * cost.each_ns)
    return (
        f"--uses: about {human_ns(cost.each_ns)} of the host for each of {cost.operators:,} "
        f"operators, {whole} in all"
    )


_MEASURED = "GPUPROBE_MEASURED"
"""In the environment of a process that runs a program again: its first step was measured."""


def _start_again(cost: str, folder: Path) -> NoReturn:
    """Replace this process by one that runs the program from its start and computes all values."""
    stderr.note(f"--compute real needs {cost}, run without values to know that: starting again")
    flush_streams()
    os.chdir(folder)
    os.environ[_MEASURED] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _run_command(args: argparse.Namespace, words: list[str]) -> int:
    """Run a command that is not a Python file, and show the summary of what it ran."""
    from gpuprobe.api import watch
    from gpuprobe.api.commands import failed_ranks, run_command
    from gpuprobe.planning.commands import name_of

    for name in ("endless", "first_epoch"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} needs a script or a module, and {words[0]} is a command")
    if args.hazards or any(getattr(args, name) for name in (*_FILES, "hazards_annotations")):
        raise UsageError(
            f"--hazards needs a script or a module, and {words[0]} is a command",
            hint=f"{words[0]} … $(which gpuprobe) run --hazards SCRIPT records each rank",
        )
    name, module = name_of(words)
    output = args.output or watch.default_output(name, module=module, replace=args.force)
    if args.gpu is not None:
        args.gpu = machine_for(words, args.gpu)
    with output_to_stderr() if args.json else contextlib.nullcontext():
        result = run_command(
            words,
            output,
            level=args.level,
            trace_steps=args.trace_steps,
            force=args.force,
            gpu=args.gpu,
            compute=args.compute,
            uses=args.uses,
        )
    why = failed_ranks(result) if result.code and not result.interrupted else ""
    if result.interrupted:
        stderr.error(f"{words[0]} was interrupted")
    elif result.code:
        how = f"exited with code {result.code}"
        if result.code < 0:
            how = f"was ended by {signal.Signals(-result.code).name}"
        stderr.error(f"{words[0]} {how}" + (f"; {why}" if why else ""))
    if not args.quiet:
        _show_command(args, result, output, words)
    if args.json:
        _print_outcome(
            ProgramRun(
                exit_code=result.code,
                failed="interrupted" if result.interrupted else why or None,
                recordings=tuple(map(str, result.recordings)),
                hazards=None,
                assumed=result.assumed,
                unrecorded=dict(result.unrecorded),
            )
        )
    if result.interrupted:
        return exit_codes.INTERRUPTED
    # Python's own code for an exception is 1, which is a finding among gpuprobe's.
    return exit_codes.PROGRAM_FAILED if result.code < 0 or result.code == 1 else result.code


def _show_command(
    args: argparse.Namespace, result: CommandResult, output: Path, words: Sequence[str]
) -> None:
    from gpuprobe.planning.commands import is_launcher

    for reason, count in result.unrecorded.items():
        stderr.warning(f"not recorded: {plural(count, 'process')} with a GPU: {reason}")
    if not result.recordings:
        stderr.note("nothing was recorded: no process used a GPU through torch")
    elif result.recordings[0] == output.absolute():
        _summarize(output, args.gpu or "")
        if args.gpu is not None and not _is_traced(args) and is_launcher(words):
            command = shlex.join(["gpuprobe", "explain", "--gpu", args.gpu, "--", *words])
            stderr.note("what the memory is for, and what is not needed:")
            stderr.note(f"  {visible(command)}")
    for path in result.recordings[1:]:
        shown = os.path.relpath(path)
        stderr.note(f"recording of another job: {shown}   (gpuprobe report {shown})")
    _show_assumed(result.assumed)


def _is_traced(args: argparse.Namespace) -> bool:
    """Whether the options request a trace, from which a report names causes."""
    return args.level == "trace" or bool(args.trace_steps) or args.uses


def _epoch_limit(text: str) -> EpochLimit:
    """``"8"`` or ``"8,12.5"``. Raises ArgumentTypeError."""
    from gpuprobe.planning.first_epoch import EpochLimit

    steps, _, taken = text.partition(",")
    if not steps.isdecimal() or not int(steps):
        raise argparse.ArgumentTypeError(f"expected a number of steps from 1, found {text!r}")
    return EpochLimit(int(steps), seconds(taken or "0"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


def _require_gpu(args: argparse.Namespace) -> None:
    """Raises UsageError for options that only a simulated GPU has."""
    if args.gpu is not None:
        return
    if args.endless:
        raise UsageError("--endless needs --gpu GPU", hint="--gpu h100-80gb")
    if args.compute != "auto":
        raise UsageError(f"--compute {args.compute} needs --gpu GPU", hint="--gpu h100-80gb")


def _exit_code(result: RunResult) -> int:
    """The exit code of the program, before its hazards count. Shows its error."""
    code = result.exit_code
    flush_streams()
    if result.error is not None:
        code = _show_error(result.error)
        if isinstance(result.error, KeyboardInterrupt):
            return exit_codes.INTERRUPTED
        if code == 1:
            return exit_codes.PROGRAM_FAILED
    return code


_NO_GPU = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
)
"""How the errors begin that torch raises where it finds no GPU (``torch.cuda._lazy_init``)."""


def _needs_gpu(error: BaseException | None) -> bool:
    return isinstance(error, (AssertionError, RuntimeError)) and str(error).startswith(_NO_GPU)


def _show_error(error: BaseException) -> int:
    """Show the program's error as Python does; returns the exit code of Python."""
    from gpuprobe.api import watch

    code = watch.show_error(error)
    in_traceback = getattr(error, "__notes__", ())
    if isinstance(error, GpuprobeError) and error.hint and not in_traceback:
        stderr.print_line(f"  hint: {visible(error.hint)}")
    return code


def _report_hazards(args: argparse.Namespace, found: Hazards, code: int) -> int:
    from gpuprobe.api.hazards import write_hazards
    from gpuprobe.gate.files import merged_hazards

    files = _files(args)
    for whole in merged_hazards(found, files[0] if files else None):
        changes = write_hazards(
            whole,
            "" if args.module is not None else args.script,
            sarif=args.hazards_sarif,
            junit=args.hazards_junit,
            json=args.hazards_json,
            patch=args.hazards_patch,
        )
        if changes is not None and not args.quiet:
            _show_patch(args.hazards_patch, changes)
    _show_hazards(args, found)
    return exit_codes.FINDINGS if code == exit_codes.OK and found.races else code


def _fix_files(args: argparse.Namespace) -> None:
    """Make the names of the files to write absolute: the program may change the working directory.

    Raises UsageError for a file that cannot be written, before the program runs.
    """
    from gpuprobe.gate.files import clear_rank_file, ensure_writable

    for name in _FILES:
        path = getattr(args, name)
        if path is not None:
            ensure_writable(path)
            setattr(args, name, path.absolute())
    for path in _files(args)[:1]:
        clear_rank_file(path)


def _files(args: argparse.Namespace) -> list[Path]:
    """The regular files that findings are written to, without devices and pipes."""
    from gpuprobe.model.io.files import is_special

    given = [getattr(args, name) for name in _FILES]
    return [path for path in given if path is not None and not is_special(path)]


def _show_hazards(args: argparse.Namespace, found: Hazards) -> None:
    from gpuprobe.api.render import render

    cwd = ""
    if args.hazards_annotations is not None:
        # Every hazard has a place; one outside of the checkout is shown at the program.
        program = args.script if args.module is None else args.module[0].replace(".", "/") + ".py"
        args.hazards_annotations.write(found.findings, program, failed=found.failed)
    with contextlib.suppress(FileNotFoundError):  # the program has deleted it
        cwd = str(Path.cwd())
    render(found, "text", stderr.stream(), cwd=cwd)


def _show_patch(file: Path, changes: Patch) -> None:
    """Note where the patch is, how to apply it, and what it lacks."""
    shown = os.path.relpath(file)
    if changes.folder == Path.cwd():
        command = shlex.join(["git", "apply", shown])
    else:
        command = f"cd {shlex.quote(str(changes.folder))} && git apply {shlex.quote(str(file))}"
    if changes.text:
        stderr.note(f"patch: {shown}   ({command})")
    else:
        stderr.note(f"patch: {shown} is empty")
    if changes.left_out:
        stderr.note(
            f"not in the patch: {plural(changes.left_out, 'finding')} whose fix is no change of "
            "known lines, or of lines that another fix replaces"
        )


_ASSUMED = 8  # lines


def _show_assumed(texts: Sequence[str]) -> None:
    for text in texts[:_ASSUMED]:
        stderr.note(f"assumed: {text}")
    if len(texts) > _ASSUMED:
        stderr.note(f"assumed: ({len(texts) - _ASSUMED} more)")


def _summarize(output: Path, gpu: str) -> None:
    from gpuprobe.api import watch

    try:
        for line in watch.summary(output, gpu=gpu):
            stderr.note(f"{line}")
    except Exception as error:  # noqa: BLE001 - the exit code is still the program's
        stderr.warning(f"no summary of {output}: {type(error).__name__}: {error}")
