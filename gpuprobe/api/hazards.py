"""Stream hazards: `detect_hazards` around code, and the files of findings."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.errors import MissingExtra, UsageError
from gpuprobe.model.plans.request import DEFAULT_GPU
from gpuprobe.patching import open_at_exit

if TYPE_CHECKING:
    from gpuprobe.hazard_watch.results import FindingsSoFar
    from gpuprobe.hazard_watch.source import EventSource
    from gpuprobe.hazards.findings.code import Patch
    from gpuprobe.hazards.findings.results import Hazards

_source: EventSource | None = None  # of the check in progress


@open_at_exit
@contextmanager
def detect_hazards(gpu: str | None = None) -> Iterator[Hazards]:
    """Detect races between CUDA streams and implicit synchronisations.

    ::

        with gpuprobe.detect_hazards() as h:
            from train import train_step  # which imports torch
            train_step()
        for finding in h.findings:
            print(finding.kind, finding.message, finding.location)

    The code runs on CUDA if torch has a device; otherwise, or if ``gpu`` names one from the
    catalogue, on a simulated GPU (default: ``h100-80gb``), which has to be loaded before torch.
    Synchronisation is checked, not timing, so a race is found even if the results of this run are
    right. Findings are available when the context ends; nothing is aborted, and nothing stays
    enabled. Functions that ``torch.compile`` compiled before are compiled again.

    Raises MissingExtra without torch, UsageError inside another `detect_hazards`, and what
    `virtual_gpu` raises if a simulated GPU is needed.
    """
    global _source
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="checking for hazards needs torch")
    if _source is not None:
        raise UsageError("already checking for hazards", hint="exit that one first")
    from gpuprobe.bytecode import write_whole
    from gpuprobe.hazards.findings.results import Hazards, ending
    from gpuprobe.patching import Patches
    from gpuprobe.program_warnings import follow

    write_whole()
    found, patches = Hazards(), Patches()
    with _on_a_gpu(gpu):
        follow(patches)
        from gpuprobe.hazard_watch.hooks import install  # it imports torch
        from gpuprobe.hazard_watch.results import fill
        from gpuprobe.hazard_watch.source import EventSource

        _source = source = EventSource()
        try:
            install(source, patches)
            yield found
        except BaseException as error:
            found.failed = ending(error)
            raise
        finally:
            _source = None
            patches.undo()
            fill(found, source)


def _on_a_gpu(gpu: str | None) -> AbstractContextManager[object]:
    """A context in which torch has a GPU."""
    from gpuprobe.api.simulated_gpu import has_gpu
    from gpuprobe.native.session import EngineOptions, current, session

    if current() is None and (gpu is not None or not has_gpu()):
        return session(EngineOptions(gpu or DEFAULT_GPU))
    return nullcontext()


def findings_so_far() -> FindingsSoFar:
    """The findings of the check in progress. Raises UsageError without one."""
    from gpuprobe.hazard_watch.results import FindingsSoFar

    if _source is None:
        raise UsageError("not checking for hazards")
    return FindingsSoFar(_source)


@contextmanager
def allow_sync(reason: str = "") -> Iterator[None]:
    """Implicit synchronisations in this context are intended: they are counted, not reported.

    ``reason`` documents the code. Does nothing outside a hazard check.
    """
    source = _source
    if source is None:
        yield
        return
    source.allowed += 1
    try:
        yield
    finally:
        source.allowed -= 1


def declare_access(
    reads: Any = (), writes: Any = (), stream: Any = None, *, host: bool = False
) -> None:
    """Declare the memory that a kernel launched outside torch reads and writes, at its launch.

    ``reads`` and ``writes`` are tensors or lists of them, ``stream`` a ``torch.cuda.Stream``
    (None: the current one). ``host``: the access is host code on pinned tensors instead of a
    kernel, such as C code that fills their array. Does nothing outside a hazard check.
    """
    if _source is None:
        return
    if host:
        _source.declared_on_host(reads, writes)
    else:
        _source.declared(reads, writes, stream)


def write_hazards(
    found: Hazards,
    elsewhere: str,
    *,
    sarif: Path | None = None,
    junit: Path | None = None,
    json: Path | None = None,
    patch: Path | None = None,
) -> Patch | None:
    """Write findings to these files, each atomically: all ranks write the same files. Places are
    relative to the working directory; findings without a place are at ``elsewhere``. ``patch`` gets
    the changes that the findings suggest, as one unified diff for ``git apply``, which is returned.
    """
    from gpuprobe.hazards.findings.code import patch_of
    from gpuprobe.model.io.document import write as write_document
    from gpuprobe.model.io.files import new_file
    from gpuprobe.reporters.ci.annotations import checkout
    from gpuprobe.reporters.ci.junit import write as write_junit
    from gpuprobe.reporters.ci.sarif import write as write_sarif
    from gpuprobe.reporters.json.hazards import document

    root = str(Path.cwd())

    def sarif_to(stream: io.StringIO) -> None:
        repository = checkout(os.environ, root)
        where = {"root": root, "elsewhere": elsewhere, "repository": repository}
        write_sarif(found.findings, stream, failed=found.failed, **where)

    def junit_to(stream: io.StringIO) -> None:
        write_junit(found.races, stream, suite="hazards", failed=found.failed)

    def json_to(stream: io.StringIO) -> None:
        write_document(document(found), stream)

    for path, write in ((sarif, sarif_to), (junit, junit_to), (json, json_to)):
        if path is not None:
            text = io.StringIO()
            write(text)
            with new_file(path, force=True) as file:
                file.write(text.getvalue().encode("utf-8"))
    if patch is None:
        return None
    changes = patch_of([*found.races, *found.latent], Path.cwd())  # a host wait has no fix as code
    with new_file(patch, force=True) as file:
        file.write(changes.text.encode("utf-8", "surrogateescape"))
    return changes
