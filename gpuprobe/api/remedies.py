"""Remedies that were tried: the program runs with an edit or a setting, and its peak is measured.

Nothing of the user's changes: the program runs in a copy of its project (`gpuprobe.gate.trials`),
and the kernel refuses what it would write elsewhere (`gpuprobe.gate.confinement`).
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from gpuprobe.api.trials import Trials
from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.gate.plan import plan
from gpuprobe.gate.project import ProjectSettings, read_project
from gpuprobe.gate.sources import MOST_PYTHON, below
from gpuprobe.model.io.files import read_regular
from gpuprobe.model.values import Bytes
from gpuprobe.remedies.edits import Edit, apply
from gpuprobe.remedies.output import OutputComparison, compared
from gpuprobe.remedies.setting import AllocatorSetting
from gpuprobe.remedies.text import Refusal, Refused, parsed

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpuprobe.gate.trials import TrialFigures


@dataclass(frozen=True)
class RemedyOptions:
    """How programs are tried: the simulated ``gpu``, ``compute`` as for `virtual_gpu`, and the
    training steps after which their first ``epoch`` is ended (see `gpuprobe.planning.first_epoch`),
    0 for the whole program. ``endless``: the GPU never runs out of memory. ``environment``:
    variables that are set for the programs.
    """

    gpu: str = "h100-80gb"
    compute: str = "auto"
    epoch: int = 0
    endless: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RemedyRequest:
    """Edits of the program's files, by path (absolute, or relative to the working directory), and a
    setting."""

    edits: Mapping[str, Sequence[Edit]] = field(default_factory=dict)
    setting: AllocatorSetting | None = None


@dataclass(frozen=True)
class PreparedRemedy:
    """A remedy's edits made: ``texts`` of the project's files, by name, variables of the
    ``environment``, the ``patch`` for ``git apply`` in the project's folder, and the ``command``
    that runs the program with the setting ("" without one).
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    patch: bytes = b""
    command: str = ""


@dataclass(frozen=True)
class TriedRemedy:
    """A remedy with which the program ran to its end. The peaks are those of the whole run, in
    bytes; those ``before`` were measured with the unchanged one. ``seconds``: of the run.
    """

    peak_allocated: Bytes
    peak_reserved: Bytes
    before_allocated: Bytes
    before_reserved: Bytes
    seconds: float
    output: OutputComparison
    remedy: PreparedRemedy

    @property
    def helps(self) -> bool:
        """Whether the program needs less memory and prints the same."""
        less = (
            self.peak_allocated < self.before_allocated or self.peak_reserved < self.before_reserved
        )
        return less and self.output is not OutputComparison.DIFFERENT


@dataclass(frozen=True)
class FailedRemedy:
    """A remedy with which the program fails, though it runs without. ``reason``: its error, its
    exit code, or the time limit."""

    reason: str
    seconds: float
    remedy: PreparedRemedy


@dataclass(frozen=True)
class UntriedRemedy:
    """A remedy that was not run. ``refused``: the edit that does not apply."""

    reason: str
    refused: Refused | None = None


RemedyResult: TypeAlias = TriedRemedy | FailedRemedy | UntriedRemedy


class RemedyTrials:
    """Trials of remedies for one program, a context manager. The first trial also runs the
    unchanged program, for its peak and its output.

    The project's folder is that of ``pyproject.toml`` with settings of gpuprobe, otherwise the
    deepest one with the working directory and the script.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: RemedyOptions | None = None,
        *,
        module: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``command``: a script, or with ``module`` a module, and its arguments. ``progress`` gets
        a line before each run. Raises ConfigError for invalid settings of the project.
        """
        self._options = options = options or RemedyOptions()
        self._plan = plan(
            command,
            module=module,
            gpu=options.gpu,
            steps=None,
            hazards=False,
            compute=options.compute,
            project=ProjectSettings(),
        )
        self._here = os.path.realpath(Path.cwd())
        script = self._here if module else os.path.realpath(Path(command[0]).parent)
        self.root = read_project().root or os.path.commonpath([self._here, script])
        self._line = shlex.join(["python", *(["-m"] if module else []), *command])
        self._progress = progress
        self._stack = ExitStack()
        self._trials: dict[frozenset[tuple[str, str]], Trials] = {}
        self._unchanged: list[TrialFigures] = []
        self._unchanged_run: Future[TrialFigures] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unchanged_run is not None:
            wait([self._unchanged_run])
        self._stack.close()

    def begin(self, seconds: float) -> None:
        """Run the unchanged program for the first trial now, while the caller does something
        else, for at most ``seconds``. Only before the first trial.
        """
        executor = self._stack.enter_context(ThreadPoolExecutor(1))
        deadline = time.monotonic() + seconds
        self._unchanged_run = executor.submit(self._run, PreparedRemedy(), deadline)

    def prepared(self, remedy: RemedyRequest) -> PreparedRemedy | Refused:
        """A remedy's edits made. Raises OSError for a file that cannot be read."""
        texts: dict[str, str] = {}
        patch = b""
        for path, edits in remedy.edits.items():
            whole = os.path.realpath(Path(self._here, path))
            name = below(whole, self.root)
            if name is None:
                return Refused(Refusal.ELSEWHERE, path)
            text = parsed(name, read_regular(Path(whole), most=MOST_PYTHON))
            if isinstance(text, Refused):
                return text
            changed = apply(text, edits)
            if isinstance(changed, Refused):
                return changed
            texts[name] = changed.data.decode("utf-8", "surrogateescape")
            patch += text.patch(changed)
        if remedy.setting is None:
            return PreparedRemedy(texts, {}, patch)
        environment = remedy.setting.environment(os.environ)
        if isinstance(environment, Refused):
            return environment
        words = (f"{name}={shlex.quote(value)}" for name, value in environment.items())
        return PreparedRemedy(texts, environment, patch, " ".join((*words, self._line)))

    def try_remedy(self, remedy: RemedyRequest, seconds: float) -> RemedyResult:
        """Run the program with a remedy. ``seconds``: the limit of all runs that this takes."""
        deadline = time.monotonic() + seconds
        try:
            made = self.prepared(remedy)
        except OSError as error:
            return UntriedRemedy(f"{error.filename}: {error.strerror}")
        if isinstance(made, Refused):
            return UntriedRemedy(str(made), made)
        try:
            before = self._before(deadline)
            if before.failed:
                return UntriedRemedy(f"the unchanged program cannot be measured: {before.failed}")
            self._progress(f"trying a remedy, {max(0.0, deadline - time.monotonic()):.0f} s left")
            figures = self._run(made, deadline)
        except EnvironmentUnavailable as error:
            return UntriedRemedy(str(error))
        if figures.failed:
            return FailedRemedy(figures.failed, figures.seconds, made)
        return TriedRemedy(
            Bytes(figures.metrics["peak_allocated"]),
            Bytes(figures.metrics["peak_reserved"]),
            Bytes(before.metrics["peak_allocated"]),
            Bytes(before.metrics["peak_reserved"]),
            figures.seconds,
            self._output(before, figures, deadline),
            made,
        )

    def _before(self, deadline: float) -> TrialFigures:
        """The figures of the unchanged program."""
        if not self._unchanged and self._unchanged_run is not None:
            self._unchanged.append(self._unchanged_run.result())
        if not self._unchanged:
            self._progress("running the unchanged program in a copy of the project")
            self._unchanged.append(self._run(PreparedRemedy(), deadline))
        return self._unchanged[0]

    def _output(
        self, before: TrialFigures, figures: TrialFigures, deadline: float
    ) -> OutputComparison:
        """The comparison of outputs. If they differ, the unchanged program runs again, to find the
        numbers that vary."""
        found = compared(before.output, figures.output, figures.memory)
        if found is not OutputComparison.DIFFERENT:
            return found
        if len(self._unchanged) < 2:
            self._progress("the output differs: running the unchanged program again")
            self._unchanged.append(self._run(PreparedRemedy(), deadline))
        again = self._unchanged[1]
        if again.failed:
            return found
        return compared(before.output, figures.output, figures.memory, again.output)

    def _run(self, made: PreparedRemedy, deadline: float) -> TrialFigures:
        """Run the program. Raises EnvironmentUnavailable if that is impossible here."""
        key = frozenset(made.environment.items())
        trials = self._trials.get(key)
        if trials is None:
            trials = Trials(
                self._plan,
                self.root,
                self._options.gpu,
                confined=True,
                environment={**self._options.environment, **made.environment},
                epoch=self._options.epoch,
                endless=self._options.endless,
            )
            self._trials[key] = self._stack.enter_context(trials)
        left = deadline - time.monotonic()
        if left <= 0:
            raise EnvironmentUnavailable("the time for trials is over")
        figures = trials.run(made.texts, left)
        if figures.outside:
            reason = f"it writes {figures.outside}, which is outside the project"
            return replace(figures, failed=f"{reason}; a trial does not")
        return figures
