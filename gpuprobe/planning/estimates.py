"""Estimates of the memory that programs need on a GPU that this machine lacks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpuprobe.errors import (
    CostMeasured,
    EnvironmentUnavailable,
    MissingExtra,
    ProgramFailed,
    TooLarge,
    UsageError,
    ValueNeeded,
)
from gpuprobe.model.plans.request import EstimateRequest, PriceList

if TYPE_CHECKING:
    from gpuprobe.model.plans.estimate import Estimate
    from gpuprobe.model.plans.gpu_table import GpuTable
    from gpuprobe.planning.estimated_run import Attempt
    from gpuprobe.planning.program import ProgramStart
    from gpuprobe.planning.suggestions import Provider
    from gpuprobe.sampler.program import Program

COMPUTE: Final = ("auto", "shapes", "real")

_REQUESTED: Final = "as requested"
_AT_ONCE: Final = "they take seconds"
SUFFICIENT: Final = "no line of the script decides by them"
"""Why it is enough to compute some values."""


def estimate(
    step: Callable[[], Any],
    gpu: str = "h100-80gb",
    *,
    steps: int = 3,
    compute: str = "auto",
    conf: str | None = None,
    ranks: int = 1,
    rank: int = 0,
    assume: Sequence[str] = (),
    network: float = 0.0,
    per_node: int = 0,
) -> Estimate:
    """Estimate the memory of ``step`` on a GPU, without that GPU.

    ``step`` is called on a simulated GPU (see `virtual_gpu`). It builds its model there and
    trains: either one function that does both, or one that returns the function for a single
    step, which is then called ``steps`` times::

        def build():
            import torch  # not before: the simulated GPU has to be loaded first
            model = Model().cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            def step():
                loss = model(torch.randn(32, 1024, device="cuda")).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return step

        gpuprobe.estimate(build, gpu="a100-40gb")

    ``compute``, ``conf``, ``assume``: as for `virtual_gpu`; with ``"auto"``, ``step`` is called
    again with all values computed if it decided by one that was not and that is affordable.
    ``ranks``: simulate one of this many processes; ``rank``: which one, from 0. ``per_node``:
    ranks on each node (default: the number of GPUs); ``network``: GB/s of each GPU's network
    adapter, without which the time of communication between nodes is not predicted.

    Raises what `virtual_gpu` raises, DataError if nothing was allocated on the device, and
    what ``step`` raises; `ValueNeeded` if it failed after a decision by a value that was not
    computed.
    """
    request = EstimateRequest(
        gpu=gpu,
        steps=steps,
        compute=compute,
        conf=conf,
        assume=tuple(assume),
        ranks=ranks,
        rank=rank,
        network=network,
        per_node=per_node,
    )
    return _estimate_function(request, step)


def estimate_cell(cell: Callable[[], Any], gpu: str) -> Estimate:
    """Estimate the memory of a notebook's cell, which is called once: its training steps are
    detected. Raises what `estimate` raises.
    """
    return _estimate_function(EstimateRequest(gpu=gpu), cell, once=True)


def _estimate_function(
    request: EstimateRequest, step: Callable[[], Any], *, once: bool = False
) -> Estimate:
    request.check()
    load_simulated(request.gpu)
    from gpuprobe.planning.estimated_run import EstimatedCell, EstimatedFunction, measure
    from gpuprobe.planning.peers import Job

    request = _with_nodes(request)
    kind = EstimatedCell if once else EstimatedFunction

    def attempt(request: EstimateRequest) -> Attempt:
        job = Job(request.one_rank, request.ranks) if request.ranks > 1 else None
        return measure(kind(step, request.steps), request, job)

    return estimate_with(request, attempt, lambda request, seconds: attempt(request).estimate)


def estimate_program(
    request: EstimateRequest,
    program: Program | None = None,
    *,
    alternatives: Provider | None = None,
    notify: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, str], None] | None = None,
) -> Estimate:
    """The requested estimate of a whole program, which is loaded from the request, or is
    ``program``. The program is stopped after the requested optimizer steps; the result's
    assumptions name this, since later code may need more memory.

    With ``compute="auto"`` a second run has a separate process, and ``notify`` gets a line before
    it. Decisions by values that were not computed are assumptions of the result. Of several ranks
    each is estimated in a separate process, in parallel; the result is that of the rank that needs
    most, with a row for each (`Estimate.by_rank`). Of distinct ranks, one of each group that
    behaves alike is estimated: each stage of a pipeline, each shape of shards.

    With ``request.suggest``, if it does not fit, the program is run again with changes that need
    less memory, and the smallest GPUs that hold it are found (`Estimate.suggestions`).
    ``alternatives`` yields the changes, by default those of any script. ``progress`` is called with
    the number of the step and its phase when that changes.

    Raises what `load_simulated` raises, UsageError for an invalid request, DataError if nothing was
    allocated on the device, ProgramFailed if the program raises an exception, `ValueNeeded` if a
    value that was not computed may have caused it, or the lack of any training step.
    """
    request.check()
    request.prices.check([request.gpu])
    program = program or _loaded(request)
    load_simulated(request.gpu)
    from gpuprobe.planning.program import ProgramStart

    start, began = ProgramStart(), time.monotonic()
    request = _with_nodes(_with_output(request))
    run = replace(request, suggest=False, prices=PriceList())
    if isinstance(run.rank, int):
        found = _of_rank(run, run.rank, program, start, notify, progress)
    else:
        from gpuprobe.planning.ranks import estimate_ranks

        found = estimate_ranks(run, start, notify)
    if request.price:
        from gpuprobe.model.plans.estimate import priced

        found = priced(found, request.price, request.prices.date)
    if found.fits or not request.suggest:
        return found
    return _suggested(found, request, start, alternatives, notify, _left(request, began))


def _left(request: EstimateRequest, began: float) -> float:
    """The seconds that the estimate may still take."""
    return began + request.max_seconds - time.monotonic() if request.max_seconds else math.inf


def _of_rank(
    request: EstimateRequest,
    rank: int,
    program: Program,
    start: ProgramStart,
    notify: Callable[[str], None],
    progress: Callable[[int, str], None] | None,
) -> Estimate:
    """The estimate of one rank, in this process."""
    from gpuprobe.planning.estimated_run import EstimatedProgram, measure

    began = time.monotonic()
    shared = request if request.recorded else replace(request, output="")
    if request.recorded and rank not in request.recorded:
        request = replace(request, output="")

    def attempt(request: EstimateRequest) -> Attempt:
        run = EstimatedProgram(program, request)
        if request.ranks == 1:
            return measure(run, request, None, progress)
        from gpuprobe.planning.peers import Job, Peers

        peers = Peers(rank, replace(shared, compute=request.compute), start)
        with Job(rank, request.ranks, peers) as job:
            return measure(run, request, job, progress)

    def again(request: EstimateRequest, seconds: float | None) -> Estimate:
        expected = "" if seconds is None else f" (about {max(1, round(seconds))} s)"
        notify(f"running the program a second time{expected}: {request.why}")
        from gpuprobe.planning.trials import NO_TIME, second_run

        left = _left(request, began)
        if left <= 0:
            raise TooLarge(NO_TIME)
        return second_run(request, start, seconds, left)

    if request.why:  # the process that started this one handles a run that is too large
        return attempt(request).estimate
    return estimate_with(request, attempt, again)


def estimate_with(
    request: EstimateRequest,
    attempt: Callable[[EstimateRequest], Attempt],
    again: Callable[[EstimateRequest, float | None], Estimate],
) -> Estimate:
    """Estimate a run with the requested ``compute``. ``"auto"`` computes all values while they cost
    seconds; if they cost more and the program decides by one, the run is repeated with all values,
    if that is affordable by the cost of the first run.

    ``attempt`` makes an estimate. ``again`` makes one with all values, for the reason in its
    request, from the state before the first attempt, and raises `TooLarge` if the run is too large
    for that. It gets the seconds that this should take, None if no other estimate exists.

    Raises UsageError for an unknown ``compute``, EnvironmentUnavailable if this machine cannot
    compute the requested values, and the errors of both functions.
    """
    compute = request.compute
    if compute not in COMPUTE:
        raise UsageError(f"unknown compute {compute!r}", hint=f"one of: {', '.join(COMPUTE)}")

    def exact(why: str, seconds: float | None = None) -> Estimate:
        return again(replace(request, compute="real", why=why), seconds)

    if compute != "auto":
        return _requested(request, attempt, exact)
    try:
        first = attempt(request)
    except ValueNeeded as error:
        needed = error.with_traceback(None)  # its frames would keep the first run's tensors alive
        needed.__context__ = None
    else:
        found = first.estimate
        if found.compute == "real":
            return replace(found, compute_why=_AT_ONCE)
        if first.place:
            return _exact(first, exact)
        return replace(found, compute_why=SUFFICIENT)
    place = needed.place or "the program"
    try:
        return exact(f"{place} needs a value, and the run is small enough to compute all values")
    except TooLarge as large:
        reason = str(large)
    raise ValueNeeded(
        f"{needed}; too large to compute all values with --compute auto: {reason}",
        hint=needed.hint,
        place=needed.place,
    ) from needed.__cause__


def _requested(
    request: EstimateRequest,
    attempt: Callable[[EstimateRequest], Attempt],
    exact: Callable[[str], Estimate],
) -> Estimate:
    """The estimate with exactly the values that were requested."""
    try:
        return replace(attempt(request).estimate, compute_why=_REQUESTED)
    except TooLarge as large:
        reason = str(large)
    except CostMeasured:
        try:
            return exact(_REQUESTED)
        except TooLarge as large:
            reason = str(large)
    raise EnvironmentUnavailable(f"--compute {request.compute}: {reason}", hint="--compute auto")


def _exact(first: Attempt, exact: Callable[[str, float], Estimate]) -> Estimate:
    """The estimate with all values, or the first one if that run is too large or fails: some
    programs cannot run twice in one folder.
    """
    place, why = first.place, first.too_large
    if not why:
        try:
            reason = f"{place} decides by a value, and the run is small enough"
            return exact(reason, first.seconds)
        except TooLarge as large:
            why = f"with all values {large}"
        except ProgramFailed as failed:
            why = f"a second run failed: {failed}"
    return replace(first.estimate, compute_why=f"{place} decides by one, see Assumed; {why}")


def estimate_on_gpus(
    request: EstimateRequest, notify: Callable[[str], None] = lambda text: None
) -> GpuTable:
    """`estimate_program` on each of the GPUs that the request names, in one table. A GPU on which
    there is no estimate has a row with the reason.

    Raises ConfigError for an unknown GPU, UsageError for a price of one that is not among them,
    and for a program that does not exist.
    """
    request.check()
    _loaded(request)
    require_torch()
    from gpuprobe.planning.gpu_table import estimate_table

    return estimate_table(request, notify)


def _suggested(
    found: Estimate,
    request: EstimateRequest,
    start: ProgramStart,
    alternatives: Provider | None,
    notify: Callable[[str], None],
    left: float,
) -> Estimate:
    """An estimate with what would make the run fit, for which ``left`` seconds are left."""
    from gpuprobe.planning.alternatives import script_changes
    from gpuprobe.planning.suggestions import MOST_SECONDS, suggest
    from gpuprobe.planning.trials import EstimateServer, varied

    varying = varied(request, compute=found.compute, change="")
    with EstimateServer(start) as server:
        suggested = suggest(
            found,
            varying,
            alternatives or script_changes,
            server,
            limit=min(MOST_SECONDS, left),
            notify=notify,
        )
    return suggested.added_to(found)


# -- preparation


def load_simulated(gpu: str) -> None:
    """Load the simulated ``gpu``, whose memory is endless, into this process, before anything
    imports torch.

    Raises MissingExtra without torch, ConfigError for an unknown GPU, UsageError if torch is
    imported already, and EnvironmentUnavailable if torch is a build without CUDA or the machine
    does not run its CUDA code.
    """
    require_torch()
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec(gpu), endless=True)


def require_torch() -> None:
    """Raises MissingExtra without torch."""
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="an estimate runs the training step")


def _loaded(request: EstimateRequest) -> Program:
    """The requested program. Python imports the packages that contain a module, and they may import
    torch.
    """
    from gpuprobe.planning.program import program_of

    if request.module and not request.gpus:
        load_simulated(request.gpu)
    return program_of(request)


def _with_nodes(request: EstimateRequest) -> EstimateRequest:
    """The request with its number of ranks on each node."""
    from gpuprobe.catalogue.gpus import parse_spec

    return replace(request, per_node=request.per_node or len(parse_spec(request.gpu)))


def _with_output(request: EstimateRequest) -> EstimateRequest:
    """The request with an absolute path for its recording. Raises UsageError if that exists and is
    not one that a process of the same estimate has begun.
    """
    path = request.output
    if not path:
        return request
    if Path(path).exists() and not (request.meeting or request.why):
        raise UsageError(
            f"the recording {path} exists already", hint="choose another name, or delete it"
        )
    return replace(request, output=str(Path(path).absolute()))
