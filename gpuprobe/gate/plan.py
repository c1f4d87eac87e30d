"""The plan of a check: its settings, and the source of each.

Four sources may set how a run is measured and compared, in this order of precedence:

1. the command line (or the call's arguments);
2. the baseline, because the same run must be measured to be comparable;
3. ``[tool.gpuprobe]`` in ``pyproject.toml``;
4. the defaults.

When a baseline is rewritten, ``pyproject.toml`` takes precedence over the old baseline: it has the
project's settings from now on.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from gpuprobe.errors import ConfigError, UsageError
from gpuprobe.gate.files import run_names
from gpuprobe.gate.project import ProjectSettings, tolerance_of
from gpuprobe.model.io.files import open_regular

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline.model import Baseline, Setting, Tolerance

CALL: Final = "command line"
BASELINE: Final = "baseline"
PROJECT: Final = "pyproject.toml"
DEFAULT: Final = "default"

_OWN = "this machine's"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Sourced(Generic[T]):
    """The value of a setting, and its source. ``needed``: it is from the call, and the value would
    be another one without it.
    """

    value: T
    source: str
    needed: bool = False


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The settings of one run of a check.

    ``target`` and ``arguments``: a recording, a script, or (``module``) a module. ``test``: the
    node id of a test of pytest, whose options are ``arguments`` then. ``gpu`` is a simulated GPU,
    None for the machine's own; ``steps`` is None for the whole program. ``compute`` is that of a
    simulated GPU. ``settings`` describe the settings for the report, with their
    sources. ``root``: the project's folder. ``folder``: the working directory of the run, "" for
    the current one; a command from the project's settings runs in the project's folder.
    ``command``: the command as stored in a baseline, with the script relative to the project; empty
    for a recording. ``name``: the run's name, if there are several. ``accept_environment``: a
    different environment is only a caution. ``repeat``: how often the program runs; None: once, and
    again if memory grew. ``given``: the words of a command line for what neither the baseline
    nor the project has. ``project_baseline``: the baseline that the project names, "" for none.
    """

    target: str
    arguments: tuple[str, ...]
    module: bool
    gpu: str | None
    steps: int | None
    hazards: bool
    tolerances: Mapping[str, tuple[Tolerance, str]]
    settings: tuple[Setting, ...]
    root: str = ""
    folder: str = ""
    command: tuple[str, ...] = ()
    accept_environment: bool = False
    repeat: int | None = None
    compute: str = "auto"
    name: str = ""
    test: str = ""
    given: tuple[str, ...] = ()
    project_baseline: str = ""

    @property
    def recorded(self) -> bool:
        """Whether ``target`` is the recording of a command that was run for this plan."""
        return self.command[:1] == ("--",)

    def commands(self, baseline: str) -> tuple[str, str]:
        """The command that replaces ``baseline``, a path, with this run, and the shortest one that
        makes this comparison: settings that the baseline or the project has are not repeated.
        """
        options = ["--run", self.name] if self.name else []
        if not self._is_projects(baseline):
            options += ["--baseline", os.path.relpath(baseline)]
        checked = [*options, "--blame-budget", "0"]
        if self.accept_environment:
            checked.append("--accept-environment")
        for name, (tolerance, source) in self.tolerances.items():
            if source == CALL:
                checked += ["--tolerance", f"{name}={tolerance.exact_text()}"]
        return (
            shlex.join(["gpuprobe", "baseline", "update", *options, *self.given]),
            shlex.join(["gpuprobe", "check", *checked, *self.given]),
        )

    def baseline_setting(self, baseline: str) -> Setting:
        """Where ``baseline``, a path, is, and who named it."""
        from gpuprobe.analysis.baseline.model import Setting

        source = PROJECT if self._is_projects(baseline) else CALL
        return Setting("baseline", os.path.relpath(baseline), source)

    def _is_projects(self, baseline: str) -> bool:
        named = self.project_baseline
        return bool(named) and os.path.realpath(named) == os.path.realpath(baseline)


def chosen_runs(
    requested: Sequence[str], has_command: bool, baseline: Path | None, project: ProjectSettings
) -> list[str]:
    """The names of the runs to check or to write: the requested ones, otherwise the project's,
    otherwise those in the file ``baseline``; "" for a single, unnamed run. ``has_command``: the
    command line has a command, which is one run. Raises UsageError if several runs are requested
    then, and for an invalid name."""
    names = list(dict.fromkeys(requested))
    if has_command and len(names) > 1:
        raise UsageError(
            f"one script is one run, and these are {len(names)}: {', '.join(names)}",
            hint="name one with --run, or leave the script to the baselines",
        )
    if has_command or names:
        wrong = next((name for name in names if not _is_name(name)), None)
        if wrong is not None:
            raise UsageError(
                f"{wrong!r:.80} is no name of a run",
                hint="use letters, digits, '_', '-' and '.', at most 64",
            )
        return names or [""]
    path = baseline if baseline is not None else project.baseline
    return list(project.runs) or (run_names(path) if path is not None else []) or [""]


def _is_name(name: str) -> bool:
    from gpuprobe.analysis.baseline.text import NAME

    return NAME.fullmatch(name) is not None


def baseline_path(given: Path | None, project: ProjectSettings) -> Path:
    """The file to compare with. Raises UsageError if neither the call nor the project names one."""
    found = given if given is not None else project.baseline
    if found is None:
        raise UsageError(
            "no baseline given",
            hint=f'--baseline FILE, or baseline = "memory.json" in [tool.gpuprobe] of {PROJECT}',
        )
    return found


def plan(
    command: Sequence[str],
    *,
    module: bool = False,
    more: Sequence[str] = (),
    gpu: str | None = None,
    steps: int | None = None,
    hazards: bool | None = None,
    compute: str | None = None,
    accepted: Mapping[str, Tolerance] | None = None,
    before: Baseline | None = None,
    project: ProjectSettings | None = None,
    writing: bool = False,
    accept_environment: bool = False,
    repeat: int | None = None,
    name: str = "",
    recorded: Sequence[str] = (),
) -> CheckPlan:
    """Merge all settings into a plan. ``command`` is the target and its arguments, empty for the
    project's own command or, if it has none, the baseline's; ``more`` arguments are appended.
    ``name``: the run's name, if there are several, whose settings in the project are used.
    ``writing``: the baseline ``before`` is rewritten, so the project takes precedence over it.
    ``recorded``: ``--`` and the words of the command that made the recording ``command``.

    Raises UsageError if the baseline belongs to a different script, and if there is no command.
    """
    from gpuprobe.analysis.baseline.model import SIMULATED, Setting

    project = project or ProjectSettings()
    project = project.runs.get(name, project)
    if more and not command and project.run is None:
        command, more = more, ()
    target, arguments, module, source = _command(command, module, project, before)
    arguments = (*arguments, *more)
    measured = _measured(before)

    def first(call: T | None, baseline: T | None, project: T | None, default: T) -> _Sourced[T]:
        sources = [_Sourced(baseline, BASELINE), _Sourced(project, PROJECT)]
        if writing:
            sources.reverse()
        known = [value for value in (baseline, project) if value is not None] or [default]
        for found in (_Sourced(call, CALL), *sources):
            if found.value is not None:
                needed = found.source == CALL and any(call != value for value in known)
                return _Sourced(found.value, found.source, needed)
        return _Sourced(default, DEFAULT)

    line = recorded or [*(["-m"] if module else []), target, *arguments]
    settings = [Setting("run", " ".join(line), f"{source}, {CALL}" if more else source)]
    is_given = source == CALL and not module and is_recorded(target) and not recorded
    folder = project.root if source in (PROJECT, BASELINE) else ""
    is_read = not module and is_recorded(os.path.join(folder, target))  # noqa: PTH118
    stored = tuple(recorded)
    if not is_read:
        stored = _stored_command(target, arguments, module, folder, project.root)
    if before is not None and before.command and stored and not writing:
        _ensure_same(before.command, stored)
    device = first(gpu, measured.gpu, project.gpu, None)
    limit = first(steps, measured.steps, project.steps, None)
    counted = first(hazards, measured.hazards, project.hazards, False)
    computed = first(compute, measured.compute, project.compute, "auto")
    if not is_given:
        settings += [
            Setting("gpu", SIMULATED + device.value if device.value else _OWN, device.source),
            Setting("steps", str(limit.value or "all"), limit.source),
            Setting("hazards", "counted" if counted.value else "not counted", counted.source),
        ]
        if computed.value != "auto":
            settings.append(Setting("compute", computed.value, computed.source))
    given = _given({"--gpu": device, "--stop-after": limit, "--compute": computed}, counted)
    if source != CALL:
        given += _separated(more)
    elif before is None or not stored or before.command != stored or project.path is not None:
        given += recorded or [*(["-m"] if module else []), target, *_separated(arguments)]
    return CheckPlan(
        target=target,
        arguments=arguments,
        module=module,
        gpu=device.value,
        steps=limit.value,
        hazards=counted.value,
        compute=computed.value,
        tolerances=_tolerances(accepted or {}, before, project),
        settings=tuple(settings),
        root=project.root,
        folder=folder,
        command=stored,
        accept_environment=accept_environment,
        repeat=repeat,
        name=name,
        given=tuple(given),
        project_baseline="" if project.baseline is None else str(project.baseline),
    )


def own_command(before: Baseline | None, project: ProjectSettings, name: str) -> tuple[str, ...]:
    """The words after ``--`` of the command that the project names for a run, or its baseline was
    measured with; empty if that is a script or a module.
    """
    words = project.runs.get(name, project).run
    if words is None and before is not None:
        words = before.command
    return tuple(words[1:]) if words and words[0] == "--" else ()


def gpu_of(before: Baseline | None, project: ProjectSettings, name: str) -> str | None:
    """The GPU that a command is run with, if the call names none."""
    return _measured(before).gpu or project.runs.get(name, project).gpu


def _given(options: Mapping[str, _Sourced[Any]], hazards: _Sourced[bool]) -> list[str]:
    """The settings that only the call has, as options."""
    found = [w for option, one in options.items() if one.needed for w in (option, str(one.value))]
    if hazards.needed:
        found.append("--hazards" if hazards.value else "--no-hazards")
    return found


def _separated(arguments: Sequence[str]) -> list[str]:
    """Arguments of the script, after ``--``."""
    return ["--", *arguments] if arguments else []


def is_recorded(target: str) -> bool:
    """Whether a target is read instead of run: a recording (a directory), or a memory snapshot:
    ``.pickle``, or a file that begins like a pickle of protocol 2 and later, as no source text can.
    """
    path = Path(target)
    if path.is_dir() or path.suffix == ".pickle":
        return True
    try:
        with open_regular(path) as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False  # running it reports the error


def _stored_command(
    target: str, arguments: tuple[str, ...], module: bool, folder: str, root: str
) -> tuple[str, ...]:
    """The command as stored in a baseline: a script is relative to the project's folder, so that it
    does not depend on the location of that folder."""
    if module:
        return ("-m", target, *arguments)
    script = os.path.relpath(os.path.join(folder, target), root or None)  # noqa: PTH118
    return (script.replace(os.sep, "/"), *arguments)


def _ensure_same(before: Sequence[str], now: Sequence[str]) -> None:
    """Raise UsageError if a baseline belongs to a different script or module."""
    length = 2 if {"-m", "--"} & {before[0], now[0]} else 1
    ours, theirs = before[:length], now[:length]
    if ours != theirs:
        raise UsageError(
            f"the baseline is of {shlex.join(ours)}, not of {shlex.join(theirs)}",
            hint="choose another baseline with --baseline FILE or --run NAME; if the script was "
            "renamed, run gpuprobe baseline update",
        )


def _measured(before: Baseline | None) -> ProjectSettings:
    """The settings that a baseline was measured with, as far as it has them."""
    if before is None:
        return ProjectSettings()
    from gpuprobe.analysis.baseline.model import simulated_gpu

    counted = "races" in before.metrics or "implicit_syncs_per_step" in before.metrics
    return ProjectSettings(
        gpu=simulated_gpu(before.environment.get("device", "")),
        steps=before.stopped_after,
        hazards=True if counted else None,
        compute=before.environment.get("compute"),
    )


def _command(
    command: Sequence[str], module: bool, project: ProjectSettings, before: Baseline | None
) -> tuple[str, tuple[str, ...], bool, str]:
    if command:
        return command[0], tuple(command[1:]), module, CALL
    if module:
        raise UsageError("-m needs the name of a module")
    words, source = project.run, PROJECT
    if words is None and before is not None and before.command:
        words, source = before.command, BASELINE
    if words is None:
        raise UsageError(
            "nothing to check",
            hint=f'give a recording or script, or run = "train.py" in [tool.gpuprobe] of {PROJECT}',
        )
    if words[0] == "-m":
        return words[1], words[2:], True, source
    return words[0], words[1:], False, source


def _tolerances(
    accepted: Mapping[str, Tolerance], before: Baseline | None, project: ProjectSettings
) -> dict[str, tuple[Tolerance, str]]:
    found = {name: (tolerance, PROJECT) for name, tolerance in project.tolerances.items()}
    if before is not None:
        found.update({n: (t, BASELINE) for n, t in (before.tolerances or {}).items()})
    found.update({name: (tolerance, CALL) for name, tolerance in accepted.items()})
    return found


def tolerances(texts: Sequence[str]) -> dict[str, Tolerance]:
    """Parse ``peak_allocated=2%``, ``peak_reserved=64MiB``, or both amounts, ``=2%,64MiB``.

    Raises ConfigError for an unknown metric or an invalid amount.
    """
    import difflib

    from gpuprobe.analysis.baseline.model import METRICS

    found = {}
    for text in texts:
        name, equals, amount = text.partition("=")
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            raise ConfigError(
                f"unknown metric {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(METRICS)}",
            )
        found[name] = tolerance_of(name, amount if equals else "")
    return found
