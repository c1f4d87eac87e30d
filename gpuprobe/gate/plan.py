"""What a check is to do, and where each setting comes from.

Four places may set how a run is measured and compared. The nearest to the user goes first:

1. the command line (or the call's arguments);
2. the baseline, which must be compared with the same thing measured again;
3. ``[tool.gpuprobe]`` in ``pyproject.toml``;
4. the defaults.

Where a baseline is written anew, what it held before goes after ``pyproject.toml``: there the
project states what it wants from now on.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuprobe.errors import ConfigError, UsageError
from gpuprobe.gate.files import run_names
from gpuprobe.gate.project import ProjectSettings, tolerance_of
from gpuprobe.model.io.files import open_regular

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline import Baseline, Setting, Tolerance

CALL: Final = "command line"
BASELINE: Final = "baseline"
PROJECT: Final = "pyproject.toml"
DEFAULT: Final = "default"

_VIRTUAL = "virtual "
_OWN = "this machine's"


class _Sourced(NamedTuple):
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """``target`` and ``arguments``: a recording, a script, or (``module``) a module. ``gpu`` is a
    virtual GPU, None for the machine's own; ``steps`` None for the whole program. ``settings``
    are the same in words, with the place each was found in. ``root``: the project's folder.
    ``folder``: where it is run, "" for the working directory; what a project names to run is run in
    the project's folder. ``command``: what a baseline of it keeps, with the script relative to the
    project; empty of a recording.
    ``name``: of the run, where there are several.
    ``accept_environment``: another environment is a caution. ``repeat``: how often the program is
    run; None: once, and again where memory grew. ``compute``: what a virtual GPU does; ``engine``:
    what it is. ``test``: the node id of a test of pytest, whose options ``arguments`` are then.
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
    compute: str = "real"
    engine: str = "auto"
    name: str = ""
    test: str = ""


def chosen_runs(
    asked: Sequence[str], given: bool, baseline: Path | None, project: ProjectSettings
) -> list[str]:
    """The names of the runs to check or to write: those ``asked`` for, else the project's, else
    those that the file ``baseline`` has; "" for the only one. ``given``: what to run is on the
    command line, which is one run. Raises UsageError where that is to be several."""
    names = list(dict.fromkeys(asked))
    if given and len(names) > 1:
        raise UsageError(
            f"one script is one run, and these are {len(names)}: {', '.join(names)}",
            hint="name one with --run, or leave the script to the baselines",
        )
    if given or names:
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
    from gpuprobe.analysis.baseline import NAME

    return NAME.fullmatch(name) is not None


def baseline_path(given: Path | None, project: ProjectSettings) -> Path:
    """The file to compare with. Raises UsageError where nothing names one."""
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
    engine: str | None = None,
    accepted: Mapping[str, Tolerance] | None = None,
    before: Baseline | None = None,
    project: ProjectSettings | None = None,
    writing: bool = False,
    accept_environment: bool = False,
    repeat: int | None = None,
    name: str = "",
) -> CheckPlan:
    """Settle what is to be done. ``command`` is the target and its arguments, empty where the
    project's own is to be taken, with ``more`` arguments; ``writing`` a baseline puts the project
    before it.

    ``name``: of the run, where there are several: the project's own settings of it are taken.
    Where nothing else names what to run, it is what the baseline is of. Raises UsageError where the
    baseline is of another script, and where nothing names what to run.
    """
    from gpuprobe.analysis.baseline import Setting

    project = project or ProjectSettings()
    project = project.runs.get(name, project)
    if more and not command and project.run is None:
        command, more = more, ()
    target, arguments, module, source = _command(command, module, project, before)
    arguments = (*arguments, *more)
    ours = _of_baseline(before)

    def first(name: str, given: Any, from_project: Any, default: Any) -> _Sourced:
        places = [_Sourced(ours.get(name), BASELINE), _Sourced(from_project, PROJECT)]
        if writing:
            places.reverse()
        for found in (_Sourced(given, CALL), *places):
            if found.value is not None:
                return found
        return _Sourced(default, DEFAULT)

    line = [*(["-m"] if module else []), target, *arguments]
    settings = [Setting("run", " ".join(line), f"{source}, {CALL}" if more else source)]
    recorded = source == CALL and not module and is_recorded(target)
    folder = project.root if source in (PROJECT, BASELINE) else ""
    is_read = not module and is_recorded(os.path.join(folder, target))  # noqa: PTH118
    kept = () if is_read else _kept(target, arguments, module, folder, project.root)
    if before is not None and before.command and kept and not writing:
        _ensure_same(before.command, kept)
    chosen = {
        "gpu": first("gpu", gpu, project.gpu, None),
        "steps": first("steps", steps, project.steps, None),
        "hazards": first("hazards", hazards, project.hazards, False),
        "compute": first("compute", compute, project.compute, "real"),
        "engine": first("engine", engine, project.engine, "auto"),
    }
    if not recorded:
        words = {
            "gpu": f"virtual {chosen['gpu'].value}" if chosen["gpu"].value else _OWN,
            "steps": str(chosen["steps"].value or "all"),
            "hazards": "counted" if chosen["hazards"].value else "not counted",
        }
        if chosen["compute"].value != "real":
            words["compute"] = str(chosen["compute"].value)
        if chosen["engine"].value != "auto":
            words["engine"] = str(chosen["engine"].value)
        settings += [Setting(name, words[name], chosen[name].source) for name in words]
    return CheckPlan(
        target=target,
        arguments=arguments,
        module=module,
        gpu=chosen["gpu"].value,
        steps=chosen["steps"].value,
        hazards=bool(chosen["hazards"].value),
        compute=str(chosen["compute"].value),
        engine=str(chosen["engine"].value),
        tolerances=_tolerances(accepted or {}, before, project),
        settings=tuple(settings),
        root=project.root,
        folder=folder,
        command=kept,
        accept_environment=accept_environment,
        repeat=repeat,
        name=name,
    )


def is_recorded(target: str) -> bool:
    """Whether this is read, not run: a recording (a directory), or a memory snapshot: ``.pickle``,
    or what begins as a pickle of protocol 2 and up does, and no source text can.
    """
    path = Path(target)
    if path.is_dir() or path.suffix == ".pickle":
        return True
    try:
        with open_regular(path) as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False  # whoever runs it says what is wrong


def _kept(
    target: str, arguments: tuple[str, ...], module: bool, folder: str, root: str
) -> tuple[str, ...]:
    """What a baseline keeps of a command: a script is relative to the project's folder, so that it
    is the same wherever that lies."""
    if module:
        return ("-m", target, *arguments)
    script = os.path.relpath(os.path.join(folder, target), root or None)  # noqa: PTH118
    return (script.replace(os.sep, "/"), *arguments)


def _ensure_same(before: Sequence[str], now: Sequence[str]) -> None:
    """Raises UsageError where a baseline is of another script or module."""
    length = 2 if "-m" in (before[0], now[0]) else 1
    ours, theirs = before[:length], now[:length]
    if ours != theirs:
        raise UsageError(
            f"the baseline is of {shlex.join(ours)}, not of {shlex.join(theirs)}",
            hint="choose another baseline with --baseline FILE or --run NAME; if the script was "
            "renamed, run gpuprobe baseline update",
        )


def _of_baseline(before: Baseline | None) -> dict[str, Any]:
    """How a baseline was measured, as far as it records that."""
    if before is None:
        return {}
    device = before.environment.get("device", "")
    counted = "races" in before.metrics or "implicit_syncs_per_step" in before.metrics
    return {
        "gpu": device[len(_VIRTUAL) :] if device.startswith(_VIRTUAL) else None,
        "steps": before.stopped_after,
        "hazards": True if counted else None,
        "compute": before.environment.get("compute"),
        "engine": before.environment.get("engine"),
    }


def _command(
    command: Sequence[str], module: bool, project: ProjectSettings, before: Baseline | None
) -> tuple[str, tuple[str, ...], bool, str]:
    if command:
        return command[0], tuple(command[1:]), module, CALL
    if module:
        raise UsageError("-m needs the name of a module")
    if project.run is None and before is not None and before.command:
        kept = before.command
        return (
            (kept[1], kept[2:], True, BASELINE)
            if kept[0] == "-m"
            else (kept[0], kept[1:], False, BASELINE)
        )
    if project.run is None:
        raise UsageError(
            "nothing to check",
            hint=f'give a recording or script, or run = "train.py" in [tool.gpuprobe] of {PROJECT}',
        )
    if project.run[0] == "-m":
        return project.run[1], project.run[2:], True, PROJECT
    return project.run[0], project.run[1:], False, PROJECT


def _tolerances(
    accepted: Mapping[str, Tolerance], before: Baseline | None, project: ProjectSettings
) -> dict[str, tuple[Tolerance, str]]:
    found = {name: (tolerance, PROJECT) for name, tolerance in project.tolerances.items()}
    if before is not None:
        found.update({n: (t, BASELINE) for n, t in (before.tolerances or {}).items()})
    found.update({name: (tolerance, CALL) for name, tolerance in accepted.items()})
    return found


def tolerances(texts: Sequence[str]) -> dict[str, Tolerance]:
    """``peak_allocated=2%`` or ``peak_reserved=64MiB`` or both, ``=2%,64MiB``.

    Raises ConfigError for an unknown metric or amount.
    """
    import difflib

    from gpuprobe.analysis.baseline import METRICS

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
