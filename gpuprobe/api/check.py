"""Memory baselines: write one, and check a run against it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.analysis.baseline.check import MeasuredRun, check_baseline, not_compared, with_repeats
from gpuprobe.analysis.baseline.measure import baseline_of, own_recording
from gpuprobe.analysis.baseline.model import SIMULATED, Baseline, CheckResult, KeptFile, Tolerance
from gpuprobe.errors import DataError, MissingExtra, ProgramFailed
from gpuprobe.gate.files import (
    read_baseline,
)
from gpuprobe.gate.history import BaselineHistory, history
from gpuprobe.gate.plan import CheckPlan, is_recorded
from gpuprobe.gate.sources import (
    OpenedFiles,
    below,
    ignored_by_git,
    kept_texts,
    own_modules,
    read_sources,
    with_text,
)

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline.measure import ReadSources
    from gpuprobe.api.blame import BlameOptions
    from gpuprobe.hazards.findings.results import Hazards
    from gpuprobe.model.findings import Finding
    from gpuprobe.model.run.recording import Recording
    from gpuprobe.model.run.session import Step
    from gpuprobe.sampler.hooks.precision import PrecisionWatch
    from gpuprobe.sampler.program import Runnable


def check(
    recording: Recording | str | os.PathLike[str],
    baseline: Baseline | str | os.PathLike[str],
    *,
    device: str = "",
    tolerance: Mapping[str, Tolerance] | None = None,
) -> CheckResult:
    """Compare a recording with a baseline: ``result.ok``, ``result.regressions``, what grew in
    ``result.rows``.

    ``device`` is the GPU's name, if the recording lacks it. Raises what `load` raises, and
    DataError for a damaged or invalid baseline.
    """
    from gpuprobe.api.recordings import load

    path = None if isinstance(baseline, Baseline) else baseline
    before = baseline if isinstance(baseline, Baseline) else read_baseline(baseline)
    found = recording if not isinstance(recording, (str, os.PathLike)) else load(recording)
    after = baseline_of(found, device=device, sources=_sources_of(found, ""))
    return compare(before, after, tolerance, path=path)


def recorded(
    path: str | os.PathLike[str],
    *,
    device: str = "",
    root: str = "",
    others: Mapping[str, Collection[int]] | None = None,
) -> Baseline:
    """The measurement of a recording. ``device`` is the GPU's name; ``root`` the project's folder,
    which file names are relative to; ``others``: addresses of blocks to exclude, by device
    (``cuda:0``). Raises what `load` raises.
    """
    from gpuprobe.api.recordings import load

    found = load(path)
    if others:
        found = own_recording(found, others)
    return baseline_of(found, device=device, root=root, sources=_sources_of(found, root))


def _sources_of(recording: Recording, root: str) -> ReadSources:
    """A function that reads the source files of a recording, unless they changed since it began."""
    session = recording.ranks[0].session if recording.ranks else None
    began = session.started_at if session is not None else None
    folder = root or (session.cwd if session is not None else "")
    return partial(read_sources, root=folder, not_after=began)


def measure(
    target: str,
    arguments: Sequence[str] = (),
    *,
    gpu: str | None = None,
    hazards: bool = False,
    module: bool = False,
    steps: int | None = None,
    epoch: int = 0,
    endless: bool = False,
    root: str = "",
    compute: str = "auto",
    figures_only: bool = False,
    notify: Callable[[str], None] = lambda text: None,
    on_step: Callable[[Step], None] | None = None,
) -> Baseline:
    """Measure a recording, or run a program and measure it.

    A directory is a recording, and a memory snapshot (``.pickle``) is read, never run; everything
    else is run and recorded at level ``trace``, on a simulated GPU if ``gpu`` names one.
    ``hazards`` also counts races and implicit synchronisations. ``steps``: stop the program after
    this many optimizer steps. ``epoch``: end its first epoch after so many training steps, and the
    program after the evaluation that follows. ``endless``: the simulated GPU never runs out of
    memory. ``root``: the project's folder, which file names are relative to (default: the working
    directory). ``compute`` is as for `virtual_gpu`.
    ``figures_only``: without explanations of the figures and the program's files.
    ``notify`` gets a line for each assumption of a simulated GPU, ``on_step`` every step's record.

    Raises ProgramFailed if the program fails; KeyboardInterrupt passes through.
    """
    from gpuprobe.api.recordings import load

    if not module and is_recorded(target):
        return recorded(target, root=root)
    from gpuprobe.api import watch
    from gpuprobe.model.plans.request import DEFAULT_GPU
    from gpuprobe.planning.first_epoch import EpochLimit
    from gpuprobe.recording.files import scratch_recording
    from gpuprobe.sampler.hooks.optimizer_steps import Limited

    if hazards and gpu is None and not _has_gpu():
        gpu = DEFAULT_GPU  # the default of detect_hazards, which the result then names

    program = watch.program(target, arguments, module=module)
    limited = program if steps is None else Limited(program, steps)
    began = time.time()
    with scratch_recording() as path:
        measured = _MeasuredProgram(limited)
        here = Path.cwd()
        opened = OpenedFiles()
        try:
            with opened.recording():
                result = watch.run(
                    measured,
                    path,
                    level="trace",
                    gpu=gpu,
                    compute=compute,
                    hazards=hazards,
                    trace_steps="all",
                    on_step=on_step,
                    holders=False,  # a check compares figures
                    epoch=EpochLimit(epoch) if epoch else None,
                    endless=endless,
                )
        finally:
            os.chdir(here)  # the program may have changed it
        for text in result.assumed:
            notify(f"assumed: {text}")
        precision = measured.precision
        _ensure_alone(measured.spawned, "torch.multiprocessing.spawn")
        if result.error is not None:
            if not isinstance(result.error, Exception):
                raise result.error  # it was interrupted
            raise ProgramFailed(
                f"the program failed: {type(result.error).__name__}: {result.error}",
                hint=_no_cuda(gpu),
            ) from result.error
        if result.exit_code:
            raise ProgramFailed(f"the program ended with exit code {result.exit_code}")
        _ensure_alone(result.children, "multiprocessing or os.fork")
        device = measured.device if gpu is None else SIMULATED + gpu
        found = baseline_of(
            load(path),
            device=device,
            syncs=None if result.hazards is None else _syncs(result.hazards),
            races=None if result.hazards is None else _races(result.hazards),
            precision=precision,
            root=root,
            sources=None
            if figures_only
            else partial(read_sources, root=root or str(here), not_after=began),
            figures_only=figures_only,
        )
        if compute != "auto":
            found = replace(found, environment={**found.environment, "compute": compute})
        if figures_only:
            if found.missing:
                raise DataError(f"the recording is incomplete: {found.missing[0]}")
            return found
        folder = root or str(here)
        names = opened.inside(folder) | own_modules(folder) | _script(target, module, here, folder)
        texts = kept_texts(names, folder, not_after=began)
        files = {name: KeptFile.of(text) for name, text in texts.items()}
        return replace(found, stopped_after=steps, files=files)


def _script(target: str, module: bool, here: Path, root: str) -> set[str]:
    """The name of the script, which is not among the imported modules."""
    name = None if module else below(str(here / target), root)
    return set() if name is None else {name}


def _ensure_alone(processes: int, started_by: str) -> None:
    """Raises ProgramFailed if other processes hold a part of the program's memory: a comparison
    without it would be meaningless."""
    if processes:
        raise ProgramFailed(
            f"the program uses the GPU in {processes} child process{'es' * (processes > 1)} "
            f"({started_by}), which {'are' if processes > 1 else 'is'} not measured",
            hint="check the code of one process, as a script",
        )


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="a check runs the program")
    from gpuprobe.api.simulated_gpu import has_gpu

    return has_gpu()


def _no_cuda(gpu: str | None) -> str:
    """A hint for a program that failed on a machine without a GPU."""
    torch = sys.modules.get("torch")
    if gpu is not None or torch is None or torch.cuda.is_available():
        return ""
    return "there is no GPU on this machine; --gpu h100-80gb simulates one"


class _MeasuredProgram:
    """A program that is run while its number formats and GPUs are recorded."""

    def __init__(self, program: Runnable) -> None:
        self._program = program
        self.argv = program.argv
        self.precision = ""
        self.device = ""
        self.spawned = 0

    def run(self) -> None:
        from gpuprobe.patching import when_imported

        precision: list[PrecisionWatch] = []
        patches = ExitStack()

        def start() -> None:
            from gpuprobe.sampler.hooks.precision import PrecisionWatch

            precision.append(PrecisionWatch())
            precision[0].start()
            patches.enter_context(self._refusing_spawn())

        when_imported("torch", start)
        try:
            self._program.run()
        finally:
            patches.close()
            for recorder in precision:
                recorder.stop()
                self.precision = recorder.text()
                self.device = recorder.devices()

    @contextmanager
    def _refusing_spawn(self) -> Iterator[None]:
        """Inside, end the program if it spawns processes to train in: their memory is not
        measured."""
        package: Any = import_module("torch.multiprocessing")
        module: Any = import_module("torch.multiprocessing.spawn")
        original = module.start_processes

        def refuse(
            fn: object, args: object = (), nprocs: int = 1, *more: object, **options: object
        ) -> None:
            self.spawned += nprocs
            raise SystemExit(1)

        module.start_processes = package.start_processes = refuse
        try:
            yield
        finally:
            module.start_processes = package.start_processes = original


def _syncs(hazards: Hazards) -> dict[str, int]:
    """Implicit synchronisations that the program does not allow, by place."""
    found: Counter[str] = Counter()
    for row in hazards.syncs:
        if not row.allowed:
            found[str(row.location) if row.location is not None else "(unknown)"] += row.count
    return dict(found)


def _races(hazards: Hazards) -> dict[str, int]:
    found = Counter(str(race.location or "(unknown)") for race in hazards.races)
    return dict(found)


def with_modules(baseline: Baseline, root: str) -> Baseline:
    """The baseline with the Python files of the project that this process has imported."""
    texts = kept_texts(own_modules(root), root)
    return replace(baseline, files={name: KeptFile.of(text) for name, text in texts.items()})


def without_ignored(baseline: Baseline, root: str) -> Baseline:
    """The baseline without files that git ignores: they may be private."""
    ignored = ignored_by_git(baseline.files, root or str(Path.cwd()))
    files = {name: kept for name, kept in baseline.files.items() if name not in ignored}
    return replace(baseline, files=files)


def without_texts(baseline: Baseline) -> Baseline:
    """The baseline with digests instead of the text of the program's files."""
    files = {name: replace(kept, text=None) for name, kept in baseline.files.items()}
    return replace(baseline, files=files)


def measure_as_planned(
    plan: CheckPlan,
    notify: Callable[[str], None] = lambda text: None,
    on_step: Callable[[Step], None] | None = None,
) -> Baseline:
    """`measure` the program or recording of a plan, in its folder."""
    here = Path.cwd()
    os.chdir(plan.folder or here)
    try:
        if plan.recorded:
            device = SIMULATED + plan.gpu if plan.gpu else ""
            return replace(
                recorded(plan.target, device=device, root=plan.root), command=plan.command
            )
        found = measure(
            plan.target,
            plan.arguments,
            gpu=plan.gpu,
            hazards=plan.hazards,
            module=plan.module,
            steps=plan.steps,
            root=plan.root,
            compute=plan.compute,
            notify=notify,
            on_step=on_step,
        )
    finally:
        os.chdir(here)
    return replace(found, command=plan.command)


def compare_as_planned(
    before: Baseline,
    after: Baseline,
    plan: CheckPlan,
    again: Callable[[CheckPlan], Baseline] | None = None,
    path: str | os.PathLike[str] | None = None,
    blame: BlameOptions | None = None,
) -> CheckResult:
    """`compare` with the tolerances of a plan; its settings are in the result. ``path``: the file
    that the baseline was read from.

    If memory grew, the program is measured ``again`` (`measure_apart`), as often as the plan
    requires: growth that is not in all runs is not a regression, and the result reports that the
    runs differ. With ``blame`` it also runs with parts of its change reverted, to find the cause.
    """
    result, found = _compare(
        before,
        after,
        partial(
            check_baseline,
            tolerances={name: tolerance for name, (tolerance, _) in plan.tolerances.items()},
            sources={name: source for name, (_, source) in plan.tolerances.items()},
            accept_environment=plan.accept_environment,
        ),
        path,
        plan.root,
    )
    compared = result

    def repeat(runs: Sequence[MeasuredRun]) -> CheckResult:
        times = plan.repeat if plan.repeat is not None else 1 + bool(compared.regressions)
        if again is None or not plan.command:
            return with_repeats(compared, runs)
        more = [again(plan) for _ in range(times - 1 - len(runs))]
        missing = tuple(text for one in more for text in one.missing)
        return not_compared(missing) if missing else with_repeats(compared, [*runs, *more])

    if result.incomplete:
        return result
    if result.regressions:
        from gpuprobe.api.blame import with_causes

        result = with_causes(result, before, after, plan, found, blame, repeat)
    else:
        result = repeat(())
    accept, reproduce = "", ""
    if result.regressions and path is not None and not plan.test:
        accept, reproduce = plan.commands(os.fspath(path))
    settings = plan.settings
    if path is not None:
        settings = (*settings, plan.baseline_setting(os.fspath(path)))
    return replace(result, settings=settings, run=plan.name, accept=accept, reproduce=reproduce)


def measure_apart(plan: CheckPlan, *, shown: bool = False) -> Baseline:
    """`measure_as_planned` in a separate process, which starts as the first one did. ``shown``: its
    stderr is shown, with the messages of errors.

    Raises ProgramFailed if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="gpuprobe-") as folder:
        path = Path(folder, "again.json")
        options = ["--no-notes", "--baseline", str(path)]
        options += ["--hazards" if plan.hazards else "--no-hazards"]
        if plan.gpu is not None:
            options += ["--gpu", plan.gpu]
        if plan.compute != "auto":
            options += ["--compute", plan.compute]
        if plan.steps is not None:
            options += ["--stop-after", str(plan.steps)]
        program = ["-m", plan.target] if plan.module else [plan.target]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "gpuprobe", "baseline", "update"),
                *options,
                *program,
                "--",
                *plan.arguments,
            ],
            cwd=plan.folder or None,
            stdout=subprocess.DEVNULL,
            stderr=None if shown else subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode and shown:
            name = f"the run {plan.name!r}" if plan.name else "the program"
            raise ProgramFailed(f"{name} was not measured: exit code {done.returncode}")
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise ProgramFailed(f"the program failed when it was repeated: {last}")
        found = read_baseline(path)
        sources = with_text(found.sources, plan.root or plan.folder)
        return replace(found, sources=sources, command=plan.command)


def compare(
    before: Baseline,
    after: Baseline,
    tolerance: Mapping[str, Tolerance] | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    root: str = "",
) -> CheckResult:
    """Compare two measurements. ``tolerance`` overrides the baseline's tolerances.

    ``path`` is the file that ``before`` was read from. If it is committed in a repository, the
    changes since that commit are compared as text; ``root`` is the project's folder (default: the
    working directory).
    """
    result, found = _compare(
        before, after, partial(check_baseline, tolerances=tolerance), path, root
    )
    if not result.regressions or not after.files:
        return result
    from gpuprobe.api.blame import change_of, without_trials

    change = change_of(before, after, root or str(Path.cwd()), found)
    return without_trials(result, change, "only gpuprobe check runs a program again")


def compare_test(
    before: Baseline,
    after: Baseline,
    tolerance: Mapping[str, Tolerance],
    plan: CheckPlan,
    *,
    path: str | os.PathLike[str],
    blame: BlameOptions,
) -> CheckResult:
    """Compare two measurements of a pytest test by the metrics in ``tolerance``. If it needs more
    memory, it runs again with parts of the change reverted, to find the cause."""
    check = partial(check_baseline, tolerances=tolerance)
    result, found = _compare(before, after, check, path, plan.root)
    metrics = tuple(metric for metric in result.metrics if metric.name in tolerance)
    result = replace(result, metrics=metrics, phases=())
    if not result.regressions:
        return result
    from gpuprobe.api.blame import with_causes

    return with_causes(result, before, after, plan, found, blame, partial(with_repeats, result))


def _compare(
    before: Baseline,
    after: Baseline,
    check: Callable[[Baseline, Baseline], CheckResult],
    path: str | os.PathLike[str] | None,
    root: str,
) -> tuple[CheckResult, BaselineHistory | None]:
    if after.missing:
        return not_compared(after.missing), None
    result = check(before, after)
    if path is None or not result.regressions:
        return result, None
    found = history(before, path, root)
    if found is None:
        return result, None
    result = check(found.baseline, after)
    if not found.settings:
        return result, found
    shown = ", ".join(found.settings[:_MOST_SETTINGS])
    more = len(found.settings) - _MOST_SETTINGS
    text = (
        f"not Python, and changed since the baseline was committed: {shown}"
        f"{f' and {more} more' if more > 0 else ''}"
    )
    return replace(result, cautions=(*result.cautions, text)), found


_MOST_SETTINGS = 5


def pull_request_comment() -> Callable[[str, str], None]:
    """What writes a report, in Markdown, as the one comment about a subject of the pull or merge
    request that this job is for. Raises EnvironmentUnavailable if the service does not accept it.

    Raises UsageError outside a job of GitHub or GitLab, and without a token.
    """
    from gpuprobe.reporters.ci.comment import comment, discussion_of

    return partial(comment, discussion_of(os.environ))


def write_findings(
    results: Sequence[CheckResult],
    root: str,
    baseline: str,
    *,
    sarif: Path | None = None,
    junit: Path | None = None,
) -> list[Finding]:
    """Write the findings of a check to these files and return them. Places are relative to
    ``root``; a finding without a place is at the ``baseline``. Raises OSError if a file cannot be
    written.
    """
    from gpuprobe.reporters.ci.annotations import checkout
    from gpuprobe.reporters.ci.junit import write as write_junit
    from gpuprobe.reporters.ci.sarif import write as write_sarif
    from gpuprobe.reporters.json import check as check_json

    found = check_json.findings(*results)
    if sarif is not None:
        with sarif.open("w", encoding="utf-8") as stream:
            repository = checkout(os.environ, root)
            write_sarif(found, stream, root, elsewhere=baseline, repository=repository)
    if junit is not None:
        with junit.open("w", encoding="utf-8") as stream:
            passed = check_json.passed(*results)
            write_junit(found, stream, suite="memory", passed=passed)
    return found
