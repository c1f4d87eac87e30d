"""Runs of a program with parts of a change reverted, each in a copy of the project."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.processes import Server, end_text

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpuprobe.gate.plan import CheckPlan
    from gpuprobe.gate.trials import TrialFigures, TrialRequest

OVER_LIMITS: Final = "GPU memory: "
"""The beginning of a failed test's message if it needs more memory than its limit."""

COMPILER: Final = "torch._dynamo"
"""The module of torch's compiler. The trials import it in advance if the check's program did."""

ENDLESS: Final = "endless"
"""The option of the trials' process whose simulated GPU never runs out of memory."""

_MOST_OUTPUT: Final = 8 << 20  # bytes of a program's output that are compared

TRIAL_SERVER: Final = "gpuprobe.api.trial_server"
"""The module of the process that runs them."""


class Trials:
    """The trials of one check, a context manager: on exit the process that runs them is ended, and
    the folder of their copies is removed."""

    def __init__(
        self,
        plan: CheckPlan,
        root: str,
        gpu: str,
        *,
        confined: bool = False,
        environment: Mapping[str, str] | None = None,
        epoch: int = 0,
        endless: bool = False,
    ) -> None:
        """``gpu``: the simulated GPU of the programs; ``""`` for the machine's own. ``confined``:
        the programs write in their copies only, and their output is recorded. ``environment``:
        variables that are set for them. ``epoch``: the training steps after which the first epoch
        is ended (`gpuprobe.planning.first_epoch`), 0 for the whole program. ``endless``: the GPU
        never runs out of memory.
        """
        self._epoch = epoch
        self._endless = endless
        self._confined = confined
        self._environment = dict(environment or {})
        self._plan = plan
        self._root = root
        self._gpu = gpu
        self._folder = ""
        self._server: Server | None = None
        self._stack = contextlib.ExitStack()
        self.runs = 0
        self.what = "test" if plan.test else "program"

    def __enter__(self) -> Self:
        """Raises EnvironmentUnavailable if the project cannot be copied."""
        if not hasattr(os, "fork"):
            raise EnvironmentUnavailable("trials need a system that can fork")
        if self._confined:
            from gpuprobe.gate.confinement import require_landlock

            require_landlock()
        self._require_inside()
        try:
            prefix = f"gpuprobe-trials-{Path(self._root).name[:40]}-"
            self._folder = os.path.realpath(tempfile.mkdtemp(prefix=prefix))
        except OSError as error:
            raise EnvironmentUnavailable(
                f"no temporary folder can be written: {error.strerror or error}"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _require_inside(self) -> None:
        """Raises EnvironmentUnavailable for a program outside the project's folder, or if that is
        the root of all files: not all of them can be copied.
        """
        folder = self._plan.folder or str(Path.cwd())
        if os.path.dirname(self._root) == self._root:  # noqa: PTH120
            raise EnvironmentUnavailable(
                "the script and the working folder are in no folder of a project: run it from the "
                "script's folder, or one above it"
            )
        for what, path in (
            ("the working folder", folder),
            ("the script", "" if self._plan.module else os.path.join(folder, self._plan.target)),  # noqa: PTH118
        ):
            if path and _inside(path, self._root) is None:
                raise EnvironmentUnavailable(f"{what} is outside the project's folder")

    def _target(self, tree: Path) -> str:
        """The program's name, in the copy also if it leads out of the working folder and back."""
        target = self._plan.target
        if self._plan.module or os.pardir not in Path(target).parts:
            return target
        inner = _inside(os.path.join(self._plan.folder or Path.cwd(), target), self._root)  # noqa: PTH118
        assert inner is not None
        return str(tree / inner)

    def run(self, texts: Mapping[str, str | None], seconds: float) -> TrialFigures:
        """Run the program for at most ``seconds`` with these texts of its files (None: deleted)."""
        from gpuprobe.gate.trials import TrialFigures, TrialRequest, make_tree

        self.runs += 1
        base = Path(self._folder, str(self.runs))
        tree = base / "project"
        plan = self._plan
        try:
            make_tree(tree, Path(self._root), texts)
        except OSError as error:
            return TrialFigures({}, {}, f"the copy cannot be written: {error.strerror or error}")
        inner = _inside(plan.folder or str(Path.cwd()), self._root)
        assert inner is not None
        request = TrialRequest(
            tree=str(tree),
            root=self._root,
            folder=str(tree / inner),
            target=self._target(tree),
            arguments=list(plan.arguments),
            module=plan.module,
            gpu=plan.gpu,
            hazards=plan.hazards,
            steps=plan.steps,
            epoch=self._epoch,
            endless=self._endless,
            compute=plan.compute,
            seconds=seconds,
            test=plan.test,
            confined=str(base) if self._confined else "",
            output=str(base / "output") if self._confined else "",
        )
        try:
            figures = self._figures(request)
            return replace(figures, output=_output(request)) if self._confined else figures
        finally:
            shutil.rmtree(base, ignore_errors=True)

    def _figures(self, request: TrialRequest) -> TrialFigures:
        from gpuprobe.gate.trials import TrialFigures

        server = self._server = self._server or self._start()
        reply = server.reply(asdict(request))
        if reply.document is not None:
            return TrialFigures(**reply.document)
        failed = "it ended the process"
        if reply.lost:
            failed = "the process of the trials ended"
        elif reply.late:
            failed = "it did not end in time"
        elif reply.code < 0:
            failed = f"it was ended {end_text(reply.code)}"
        return TrialFigures({}, {}, failed)

    def _start(self) -> Server:
        options = [COMPILER] if COMPILER in sys.modules else []
        options += [ENDLESS] if self._endless else []
        environment = {**os.environ, **self._environment}
        server = Server(TRIAL_SERVER, self._folder, self._gpu, *options, environment=environment)
        return self._stack.enter_context(server)


def _output(request: TrialRequest) -> str:
    """What a program has printed, with the project's paths in place of those of its copy."""
    try:
        with Path(request.output).open("rb") as file:
            text = file.read(_MOST_OUTPUT).decode("utf-8", "replace")
    except FileNotFoundError:  # it did not start
        return ""
    return text.replace(request.tree, request.root)


def _inside(path: str, root: str) -> str | None:
    """A path relative to the project's folder, None outside."""
    for whole in (os.path.abspath(path), os.path.realpath(path)):  # noqa: PTH100
        for folder in dict.fromkeys((root, os.path.realpath(root))):
            relative = os.path.relpath(whole, folder)
            if relative != os.pardir and not relative.startswith(os.pardir + os.sep):
                return relative
    return None


def clock() -> float:
    """Seconds of a monotonic clock."""
    return time.monotonic()
