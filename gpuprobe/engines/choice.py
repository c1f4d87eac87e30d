"""The choice of the engine that a program runs on."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from gpuprobe.engines.base import ENGINES, EngineOptions, EngineSession, Measurement, SimulatedRank
from gpuprobe.errors import EnvironmentUnavailable, GpuprobeError, UsageError


def choose(engine: str, options: EngineOptions) -> str:
    """The engine for a value of ``--engine``: ``"native"`` or ``"virtual"``.

    ``auto`` is native if torch is a build with CUDA that is not imported yet, and none of the
    options needs the virtual GPU. Raises UsageError for an unknown engine.
    """
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}", hint=f"one of: {', '.join(ENGINES)}")
    if engine != "auto":
        return engine
    return "virtual" if why_not_native(options) else "native"


def why_not_native(options: EngineOptions) -> str:
    """The reason why ``auto`` selects the virtual GPU; ``""`` if it selects the native engine."""
    from gpuprobe.native import process
    from gpuprobe.native.libraries import SUPPORTED_MAJORS, core, torch_build

    if options.torch:
        return "another version of torch is simulated"
    if options.random != "host":
        return "the GPU's random numbers are simulated"
    build = torch_build()
    if build is None or not build.cuda:
        return "torch is a build without CUDA"
    if build.major not in SUPPORTED_MAJORS:
        return f"torch is built for CUDA {build.cuda}"
    if not process.can_load():
        return "torch was imported before"
    try:
        core()
    except EnvironmentUnavailable as error:
        return str(error)
    return ""


def current() -> EngineSession | None:
    """The session of this process; None outside a session."""
    virtual = sys.modules.get("gpuprobe.virtual.session")
    found: EngineSession | None = None if virtual is None else virtual.current()
    if found is None:
        from gpuprobe.native.process import loaded

        if loaded() is not None:
            from gpuprobe.engines import native

            found = native.current()
    return found


def session(engine: str, options: EngineOptions) -> AbstractContextManager[EngineSession]:
    """A context manager that gives this process simulated GPUs; see the engines' modules."""
    if choose(engine, options) == "native":
        from gpuprobe.engines import native

        return native.session(options)
    from gpuprobe.engines import virtual

    return virtual.session(options)


def prepare(engine: str, options: EngineOptions) -> str:
    """`choose`, and prepare this process before torch is imported. A process for estimates
    (`EngineOptions.endless`) imports torch's compiler only if the program uses it.
    """
    chosen = choose(engine, options)
    if chosen == "native":
        from gpuprobe.catalogue.gpus import parse_spec
        from gpuprobe.engines.native import refuse
        from gpuprobe.native import process
        from gpuprobe.torch_support.eager import defer_compiler

        refuse(options)
        if options.endless:
            defer_compiler()
        process.load(parse_spec(options.gpu), endless=options.endless)
    return chosen


def measurement(
    engine: str, options: EngineOptions, job: SimulatedRank, *, bounded: bool = False
) -> Measurement:
    """An estimated run on the engine that `prepare` returned."""
    if engine == "native":
        from gpuprobe.engines.native import NativeMeasurement

        return NativeMeasurement(options, job, bounded=bounded)
    from gpuprobe.engines.virtual import VirtualMeasurement

    return VirtualMeasurement(options, job, bounded=bounded)


def explained(error: BaseException) -> GpuprobeError | None:
    """The error as a gpuprobe error if the engine of this process caused it, else None."""
    virtual = sys.modules.get("gpuprobe.virtual.session")
    if virtual is None or virtual.current() is None:
        return None
    from gpuprobe.virtual.boundary import explained as of_virtual

    return of_virtual(error)
