"""The process of the trials: it runs programs, each in a fork of itself.

Importing torch takes as long as many programs of a check: here it happens once. The check writes
one request per line (JSON) to stdin and reads one result per line from stdout. Each program has a
process group, which is killed at its time limit and at the end of stdin, when the check has ended.
The folder of the trials is then removed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from gpuprobe.api.trials import COMPILER, OVER_LIMITS
from gpuprobe.gate.trials import TrialFigures, TrialRequest, moved, moved_all
from gpuprobe.model.text import visible

_WAITING: Final = "OMP_WAIT_POLICY"


def serve(folder: str, gpu: str, *, compiler: bool) -> None:
    """Run requests until stdin ends, then remove ``folder``. ``gpu``: the simulated GPU of the
    programs; ``""`` for the machine's own. ``compiler``: the programs use torch's compiler.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the check handles it and closes stdin
    _warm_up(gpu, compiler=compiler)
    wake, alarm = os.pipe()
    os.set_blocking(alarm, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    results = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    rest = b""
    try:
        while True:
            while b"\n" not in rest:
                more = os.read(0, 1 << 16)
                if not more:
                    return
                rest += more
            line, _, rest = rest.partition(b"\n")
            request = TrialRequest(**json.loads(line))
            failed = _run(request, wake, (wake, alarm, results))
            if failed is None:
                return
            os.write(results, json.dumps({"failed": failed}).encode() + b"\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _warm_up(gpu: str, *, compiler: bool) -> None:
    """Import the modules that nearly all programs of a check import, torch with the simulated
    ``gpu``. CUDA is initialised in the forks: it does not survive one. Without ``compiler``, an
    optimizer does not import torch's compiler (1.2 s of processor time).

    OpenMP's threads wait passively here: on a busy machine, or one with fewer processors than it
    reports, a run takes a third of the processor time. OpenMP reads the variable when it is loaded;
    it is removed before the program runs.
    """
    own = _WAITING not in os.environ
    if own:
        os.environ[_WAITING] = "PASSIVE"
    with contextlib.suppress(Exception):  # the program fails with the same error
        if not compiler and not gpu:
            from gpuprobe.torch_support.eager import defer_compiler

            defer_compiler()
        if gpu:
            from gpuprobe.api.simulated_gpu import load_gpu

            load_gpu(gpu)
        import torch
        import torch.optim

        if compiler:
            import torch._dynamo

        import gpuprobe.api.check
        import gpuprobe.api.recordings
        import gpuprobe.api.watch
        import gpuprobe.recording.load
        import gpuprobe.recording.snapshot.load
        import gpuprobe.recording.writer
        import gpuprobe.sampler.hooks.per_step
        import gpuprobe.sampler.hooks.precision
        import gpuprobe.sampler.hooks.torch_hooks
        import gpuprobe.sampler.recorder
        import gpuprobe.sampler.tracing.cuda

        if gpu:
            import gpuprobe.native.jobs.groups
            import gpuprobe.native.session
            import gpuprobe.native.values.session  # noqa: F401
            from gpuprobe.native.values.budget import flop_formulas

            flop_formulas()

        torch.optim.SGD([torch.zeros(())], lr=0.1)  # imports modules of the first optimizer
    if own:
        del os.environ[_WAITING]
    gc.collect()
    gc.freeze()  # the pages stay shared with the forks


def _run(request: TrialRequest, wake: int, own: Sequence[int]) -> str | None:
    """Run one program. Returns why it failed, "" if it did not, None if the check has ended.
    ``own``: the descriptors of this process that the program does not get.
    """
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for descriptor in own:
                os.close(descriptor)
            _program(request)
        except BaseException as error:  # noqa: BLE001 - it ends the process below
            with contextlib.suppress(OSError):
                _write_figures(request, TrialFigures({}, {}, _reason(error)))
        finally:
            os._exit(0)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    deadline = time.monotonic() + request.seconds
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                return "it did not end in time"
            ready = select.select([0, wake], [], [], left)[0]
            if wake in ready:
                os.read(wake, 1 << 10)
            elif 0 in ready:
                return None  # stdin has ended: no request comes while a program runs
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # and its child processes
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return "" if Path(request.result).exists() else "it ended the process"


def _reason(error: BaseException) -> str:
    """Why a program was not measured, in one line."""
    text = f"{type(error).__name__}: {error}".removeprefix("ProgramFailed: the program failed: ")
    return visible(text)[:300]


def _program(request: TrialRequest) -> None:
    """Run the program in its copy of the project, in this process, and write its figures."""
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    os.dup2(1, 0)  # the null device, to read and write
    if request.output:
        output = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.close(output)
    os.chdir(request.folder)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    for name in ("PYTHONPATH", "PWD"):
        if name in os.environ:
            os.environ[name] = moved(os.environ[name], request.root, request.tree)
    sys.path[:] = ["", *moved_all(sys.path[1:], request.root, request.tree)]
    sys.meta_path.insert(0, _InCopy(request.root, request.tree))
    sys.path_importer_cache.clear()
    if request.confined:
        _run_confined(request, began)
        return
    if request.test:
        _write_figures(request, _test_figures(request))
        return
    _write_figures(request, _figures(request))


def _run_confined(request: TrialRequest, began: float) -> None:
    """Run the program while it can only write in the folder of its trial."""
    from gpuprobe.gate.confinement import Confinement

    confinement = Confinement(request.confined, request.tree)
    confinement.start()
    torch: Any = sys.modules.get("torch")
    if torch is not None:  # equal numbers in all runs, so that their outputs can be compared
        torch.default_generator.manual_seed(0)
    memory = _MemoryQueries()
    try:
        figures = _figures(request)
    except Exception as error:  # noqa: BLE001 - it is the result
        figures = TrialFigures({}, {}, _reason(error))
    sys.stdout.flush()
    figures = replace(
        figures,
        seconds=time.monotonic() - began,
        memory=tuple(memory.figures),
        outside=confinement.outside,
    )
    _write_figures(request, figures)


class _MemoryQueries:
    """Records the figures in bytes that the program queries from torch, from now on."""

    def __init__(self) -> None:
        self.figures: dict[int, None] = {}
        self._inside = False
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        for name in _QUERIES:
            function = getattr(torch.cuda.memory, name, None)
            if function is not None:
                wrapped = self._recording(function)
                setattr(torch.cuda.memory, name, wrapped)
                setattr(torch.cuda, name, wrapped)

    def _recording(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def query(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside = True
            try:
                found = function(*arguments, **options)
            finally:
                self._inside = False
            if isinstance(found, dict):
                values = [
                    size for name, size in found.items() if ".all." in name and "bytes" in name
                ]
            else:
                values = [*found] if isinstance(found, tuple) else [found]
            self.figures.update(dict.fromkeys(values))
            return found

        return query


_QUERIES: Final = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_stats",
    "mem_get_info",
    "device_memory_used",
)


def _figures(request: TrialRequest) -> TrialFigures:
    from gpuprobe.api.check import measure

    found = measure(
        moved(request.target, request.root, request.tree),
        moved_all(request.arguments, request.root, request.tree),
        gpu=request.gpu,
        hazards=request.hazards,
        module=request.module,
        steps=request.steps,
        root=request.tree,
        compute=request.compute,
        figures_only=True,
    )
    return TrialFigures(dict(found.metrics), dict(found.phases))


def _test_figures(request: TrialRequest) -> TrialFigures:
    """The figures of a test, which pytest runs in this process with gpuprobe's plugin."""
    import pytest

    arguments = moved_all(request.arguments, request.root, request.tree)
    reports = _Reports()
    pytest.main([request.test, *arguments, "--gpuprobe-blame", "0"], plugins=[reports])
    if reports.failed:
        return TrialFigures({}, {}, visible(reports.failed)[:300])
    if reports.figures is None:
        return TrialFigures({}, {}, "the test was not measured")
    return TrialFigures({name: reports.figures[name] for name in _TEST_METRICS}, {})


_TEST_METRICS: Final = ("peak_allocated", "peak_reserved")


class _Reports:
    """A pytest plugin that keeps the figures of the one test that runs. ``failed``: why the test
    failed, if not because of its memory."""

    def __init__(self) -> None:
        self.figures: dict[str, int] | None = None
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "teardown" and not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr) if crash is None else crash.message
            if not text.removeprefix("Failed: ").startswith(OVER_LIMITS):
                self.failed = text or report.outcome
        for name, value in report.user_properties:
            if name == "gpuprobe" and report.when == "call":
                self.figures = dict(value)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = str(report.longrepr).strip().rpartition("\n")[2]


def _write_figures(request: TrialRequest, figures: TrialFigures) -> None:
    Path(request.result).write_text(json.dumps(asdict(figures)), encoding="utf-8")


class _InCopy(importlib.abc.MetaPathFinder):
    """A finder that returns the copy of a module which other finders (an editable install) find in
    the project."""

    def __init__(self, root: str, tree: str) -> None:
        self._roots = tuple(dict.fromkeys((root, os.path.realpath(root))))
        self._tree = tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # The finders before this one were called already, and may call it.
        behind = sys.meta_path.index(self) + 1
        for finder in sys.meta_path[behind:]:
            spec: Any = finder.find_spec(fullname, path, target)
            if spec is not None:
                return self._moved(spec)
        return None

    def _moved(self, spec: importlib.machinery.ModuleSpec) -> importlib.machinery.ModuleSpec:
        for root in self._roots:
            inside = spec.origin is not None and spec.origin.startswith(root + os.sep)
            if not inside or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                continue
            assert spec.origin is not None
            copy = self._tree + spec.origin[len(root) :]
            if os.path.exists(copy):  # noqa: PTH110 - called for each import
                folders = spec.submodule_search_locations
                moved_folders = None if folders is None else moved_all(folders, root, self._tree)
                found = importlib.util.spec_from_file_location(
                    spec.name, copy, submodule_search_locations=moved_folders
                )
                return found if found is not None else spec
        return spec


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], compiler=COMPILER in sys.argv[3:])
