"""The process of the trials: it runs programs, each in a fork of itself.

Importing torch takes as long as many programs of a check: here it happens once. When the check has
ended, and with it the requests (`gpuprobe.processes.serve`), the folder of the trials is removed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any, Final

from gpuprobe.api.trials import COMPILER, ENDLESS, OVER_LIMITS
from gpuprobe.gate.trials import TrialFigures, TrialRequest, moved, moved_all
from gpuprobe.model.text import visible
from gpuprobe.processes import Channel, serve, to_null

_WAITING: Final = "OMP_WAIT_POLICY"


def main(folder: str, gpu: str, *options: str) -> None:
    """Run requests until they end, then remove ``folder``. ``gpu``: the simulated GPU of the
    programs; ``""`` for the machine's own. ``options``: `COMPILER`, if the programs use it, and
    `ENDLESS`.
    """
    channel = Channel()
    _warm_up(gpu, compiler=COMPILER in options, endless=ENDLESS in options)
    try:
        serve(channel, _reply)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reply(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one program, in a fork for it."""
    try:
        figures = _program(TrialRequest(**plain))
    except BaseException as error:  # noqa: BLE001 - it ends the process
        figures = TrialFigures({}, {}, _reason(error))
    return asdict(figures)


def _warm_up(gpu: str, *, compiler: bool, endless: bool) -> None:
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

            load_gpu(gpu, endless=endless)
        import torch
        import torch.optim

        if compiler:
            import torch._dynamo

        import gpuprobe.api.check
        import gpuprobe.api.recordings
        import gpuprobe.api.watch
        import gpuprobe.recording.load
        import gpuprobe.recording.writer
        import gpuprobe.sampler.hooks.per_step
        import gpuprobe.sampler.hooks.precision
        import gpuprobe.sampler.hooks.torch_hooks
        import gpuprobe.sampler.recorder
        import gpuprobe.sampler.tracing.cuda
        import gpuprobe.torch_support.snapshots

        if gpu:
            import gpuprobe.native.jobs.groups
            import gpuprobe.native.session
            import gpuprobe.native.values.session  # noqa: F401
            from gpuprobe.native.values.budget import flop_formulas

            flop_formulas()

        torch.optim.SGD([torch.zeros(())], lr=0.1)  # imports modules of the first optimizer
    if own:
        del os.environ[_WAITING]


def _reason(error: BaseException) -> str:
    """Why a program was not measured, in one line."""
    text = f"{type(error).__name__}: {error}".removeprefix("ProgramFailed: the program failed: ")
    return visible(text)[:300]


def _program(request: TrialRequest) -> TrialFigures:
    """Run the program in its copy of the project, in this process; its figures."""
    began = time.monotonic()
    to_null(1, 2)
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
        return _confined_figures(request, began)
    return _test_figures(request) if request.test else _figures(request)


def _confined_figures(request: TrialRequest, began: float) -> TrialFigures:
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
    return replace(
        figures,
        seconds=time.monotonic() - began,
        memory=tuple(memory.figures),
        outside=confinement.outside,
    )


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
        epoch=request.epoch,
        endless=request.endless,
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
    main(*sys.argv[1:])
