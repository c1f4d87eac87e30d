"""Runs of a program with parts of a change reverted, each in a copy of the project."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from gpuprobe.errors import EnvironmentUnavailable

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpuprobe.gate.plan import CheckPlan
    from gpuprobe.gate.trials import TrialFigures, TrialRequest

OVER_LIMITS: Final = "GPU memory: "
"""The beginning of a failed test's message if it needs more memory than its limit."""

COMPILER: Final = "torch._dynamo"
"""The module of torch's compiler. The trials import it in advance if the check's program did."""

_MOST_OUTPUT: Final = 8 << 20  # bytes of a program's output that are compared

_PATIENCE: Final = 10.0
"""Seconds that the process of the trials has to end."""


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
    ) -> None:
        """``gpu``: the simulated GPU of the programs; ``""`` for the machine's own. ``confined``:
        the programs write in their copies only, and their output is recorded. ``environment``:
        variables that are set for them.
        """
        self._confined = confined
        self._environment = dict(environment or {})
        self._plan = plan
        self._root = root
        self._gpu = gpu
        self._folder = ""
        self._server: subprocess.Popen[bytes] | None = None
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _require_inside(self) -> None:
        """Raises EnvironmentUnavailable for a program outside the project's folder."""
        folder = self._plan.folder or str(Path.cwd())
        for what, path in (
            ("the working folder", folder),
            ("the script", "" if self._plan.module else os.path.join(folder, self._plan.target)),  # noqa: PTH118
        ):
            if path and _inside(path, self._root) is None:
                raise EnvironmentUnavailable(f"{what} is outside the project's folder")

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
            target=plan.target,
            arguments=list(plan.arguments),
            module=plan.module,
            gpu=plan.gpu,
            hazards=plan.hazards,
            steps=plan.steps,
            compute=plan.compute,
            seconds=seconds,
            result=str(base / "figures.json"),
            test=plan.test,
            confined=str(base) if self._confined else "",
            output=str(base / "output") if self._confined else "",
        )
        try:
            failed = self._response(request.line(), seconds)
            if failed:
                figures = TrialFigures({}, {}, failed)
            else:
                text = Path(request.result).read_text(encoding="utf-8")
                figures = TrialFigures(**json.loads(text))
            return replace(figures, output=_output(request)) if self._confined else figures
        finally:
            shutil.rmtree(base, ignore_errors=True)

    def _response(self, line: str, seconds: float) -> str:
        """Why the run failed, "" if it did not."""
        server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(line.encode("utf-8", "surrogateescape") + b"\n")
            server.stdin.flush()
            response = server.stdout.readline()
        except OSError:
            response = b""
        if not response:
            self._stop()
            return "the process of the trials ended"
        return str(json.loads(response)["failed"])

    def _start(self) -> subprocess.Popen[bytes]:
        used = [COMPILER] if COMPILER in sys.modules else []
        self._server = subprocess.Popen(
            [sys.executable, "-m", "gpuprobe.api.trial_server", self._folder, self._gpu, *used],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the check, which ends this process
            env={**os.environ, **self._environment},
        )
        return self._server

    def _stop(self) -> None:
        """End the process and the program that it runs: it exits at the end of its stdin."""
        server, self._server = self._server, None
        if server is None:
            return
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            server.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # it still imports torch, from a slow disk
            server.kill()
            server.wait()


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
