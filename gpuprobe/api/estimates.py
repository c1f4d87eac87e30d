"""Estimates of the memory that programs need on a GPU, and the search for the largest that fits."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.api.simulated_gpu import load_gpu, require_torch
from gpuprobe.errors import (
    GpuprobeError,
    ProgramFailed,
    TooLarge,
    UnknownValue,
    UsageError,
    ValueNeeded,
)

if TYPE_CHECKING:
    from gpuprobe.model.plans.estimate import Estimate
    from gpuprobe.model.plans.fit import Fit
    from gpuprobe.model.plans.gpu_table import GpuTable
    from gpuprobe.model.plans.links import Links
    from gpuprobe.native.session import EngineOptions, NativeMeasurement
    from gpuprobe.planning.peers import Job
    from gpuprobe.planning.processes import OtherProcesses
    from gpuprobe.planning.suggestions import Provider
    from gpuprobe.planning.trials import Attempt, ProgramStart
    from gpuprobe.sampler.program import Program


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
    link: str = "",
    per_node: int = 0,
) -> Estimate:
    """Estimate the memory of ``step`` on a GPU, without that GPU.

    ``step`` is called on a simulated GPU (see `virtual_gpu`). It builds its model there and
    trains: either one function that does both, or one that returns the function for a single
    step, which is then called ``steps`` times::

        def build():
            model = Model().cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            def step():
                loss = model(torch.randn(32, 1024, device="cuda")).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return step

        gpuprobe.estimate(build, gpu="a100-40gb")

    ``compute``: ``"shapes"`` computes only integers, masks and small tensors, ``"real"`` all
    values, ``"auto"`` all while they take no more than 256 MiB and about five seconds, then as
    shapes; if ``step`` decides by a value that was not computed, it is called again on a new device
    that computes all, unless that takes more than 16 GiB (or half of this machine's available
    memory) or 2e13 floating-point operations.
    ``assume``: values for lines that read them, as ``"FILE:LINE=VALUE"``
    (``"train.py:12=false"``). ``conf``: allocator settings as in ``PYTORCH_CUDA_ALLOC_CONF``.
    ``ranks``: simulate one of this many processes; ``rank``: which one, from 0. ``link``: the links
    between them, such as ``"nvlink:h100,ib:ndr"``, for a model of the time of communication, with
    ``per_node`` ranks on each node (default: the number of GPUs).

    Raises what `virtual_gpu` raises, UsageError if nothing was allocated on the device, and
    what ``step`` raises; `ValueNeeded` if it failed after a decision by a value that was not
    computed.
    """
    require_torch("an estimate runs the training step")
    load_gpu(gpu, endless=True)
    from gpuprobe.planning.peers import Job
    from gpuprobe.planning.trials import estimate_with

    if steps < 1:
        raise UsageError("at least one step is needed")
    Job(rank, ranks)
    links = _links(link, gpu, ranks, per_node)

    def run(measured: NativeMeasurement, recorder: Any) -> int:
        done = 0
        current = step
        while done < steps:
            with recorder.step():
                answer = current()
            if callable(answer) and current is step and not done:
                current = answer
                answer = None
                continue
            del answer
            done += 1
        return done

    unused = "build the model inside the function, on the device: Model().cuda()"

    def attempt(how: str, why: str, *, bounded: bool = False) -> Attempt:
        options = _endless(gpu, how, conf, assume, measure=not bounded)
        return _estimate(run, options, why, Job(rank, ranks), unused, bounded, *links)

    def again(why: str) -> Estimate:
        return attempt("real", why, bounded=True).estimate

    return estimate_with(compute, attempt, again)


def estimate_program(
    program: Program,
    gpu: str = "h100-80gb",
    *,
    steps: int = 3,
    compute: str = "auto",
    conf: str | None = None,
    ranks: int = 1,
    rank: int | Sequence[int] | str = 0,
    assume: Sequence[str] = (),
    within: str = "",
    meeting: str = "",
    link: str = "",
    per_node: int = 0,
    output: str = "",
    recorded: Sequence[int] = (),
    suggest: bool = False,
    alternatives: Provider | None = None,
    notify: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, str], None] | None = None,
) -> Estimate:
    """`estimate` for a whole program. The program is stopped after ``steps`` optimizer steps; the
    result's assumptions name this, since later code may need more memory.

    With ``compute="auto"`` a second run has a separate process, and ``notify`` gets a line before
    it. Decisions by values that were not computed are assumptions of the result. Of several
    ``rank`` each is estimated in a separate process, in parallel; the result is that of the rank
    that needs most, with a row for each (`Estimate.by_rank`). ``rank="distinct"`` estimates one
    rank of each group of ranks that behave alike: each stage of a pipeline, each shape of shards.
    ``link`` and ``per_node`` are as in `estimate`. ``output``: keep the recording of the estimated
    ranks at this path.

    ``suggest``: if it does not fit, run the program again with changes that need less memory, and
    find the smallest GPUs that hold it (`Estimate.suggestions`). ``alternatives`` yields the
    changes, by default those of any script. ``progress`` is called with the number of the step and
    its phase when that changes.

    For processes that this function starts: ``within``, the reason of a second run, which keeps the
    bounds of ``"auto"``; ``meeting``, the rendezvous of the ranks (`gpuprobe.planning.peers`);
    ``recorded``, the ranks to keep, if not all.

    Raises ProgramFailed if the program raises an exception, `ValueNeeded` if a value that was not
    computed may have caused it, or the lack of any training step.
    """
    if steps < 1:
        raise UsageError("at least one step is needed")

    require_torch("an estimate runs the training step")
    load_gpu(gpu, endless=True)
    from gpuprobe.planning.adapts import handler_of
    from gpuprobe.planning.peers import Job
    from gpuprobe.planning.trials import ProgramStart, estimate_with

    run = _ProgramRun(program, steps, bounded=bool(within))
    unused = (
        "the program ran on the CPU: move model and data to the GPU if "
        "torch.cuda.is_available(), or with an option of the script (after --)"
    )
    start = ProgramStart(program)
    links = _links(link, gpu, ranks, per_node)
    order = {"gpu": gpu, "steps": steps, "conf": conf, "ranks": ranks, "assume": [*assume]}
    order.update(link=link, per_node=per_node)
    kept = str(Path(output).absolute()) if output else ""
    if kept and Path(kept).exists() and not (meeting or within):
        raise UsageError(
            f"the recording {output} exists already", hint="choose another name, or delete it"
        )
    if not isinstance(rank, int):
        from gpuprobe.planning.ranks import estimate_ranks

        order.update(output=kept, recorded=[] if isinstance(rank, str) else [*rank])
        found = estimate_ranks(rank, ranks, start.peers, {**order, "compute": compute}, notify)
        return _suggested(found, start, {**order, "rank": rank}, alternatives, notify, suggest)
    Job(rank, ranks)
    if recorded and rank not in recorded:
        kept = ""

    def attempt(how: str, why: str) -> Attempt:
        peers = start.peers(rank, meeting, **order, compute=how) if ranks > 1 else None
        job = Job(rank, ranks, peers)
        with job:
            words = within or why
            gpus = _endless(gpu, how, conf, assume, measure=not within)
            return _estimate(
                run,
                gpus,
                words,
                job,
                unused,
                bool(within),
                *links,
                kept,
                lambda: (run.others, run.waits),
                progress,
                lambda: run.collected,
                handler_of(program.argv[0]),
            )

    def again(why: str) -> Estimate:
        notify(f"running the program a second time: {why}")
        return start.again(why, **{**order, "output": kept}, compute="real", rank=rank)

    if within:  # the process that started this one handles a run that is too large
        return attempt(compute, within).estimate
    found = estimate_with(compute, attempt, again)
    return _suggested(found, start, {**order, "rank": rank}, alternatives, notify, suggest)


def estimate_on_gpus(
    program: Program,
    gpus: str,
    *,
    prices: Mapping[str, float] = {},
    steps: int = 3,
    compute: str = "auto",
    conf: str | None = None,
    ranks: int = 1,
    rank: int | Sequence[int] | str = 0,
    assume: Sequence[str] = (),
    link: str = "",
    per_node: int = 0,
    notify: Callable[[str], None] = lambda text: None,
) -> GpuTable:
    """`estimate_program` on each of several GPUs, in one table: names separated by commas, or
    ``"all"`` of the catalogue. ``prices``: of an hour, by the GPU's name; under ``""`` that of all
    others. A GPU on which there is no estimate has a row with the reason.

    Raises ConfigError for an unknown GPU, UsageError for a price of one that is not among them.
    """
    require_torch("an estimate runs the training step")
    from gpuprobe.planning.gpu_table import estimate_table

    order = {"steps": steps, "compute": compute, "conf": conf, "ranks": ranks, "rank": rank}
    order.update(assume=[*assume], link=link, per_node=per_node)
    return estimate_table(program, gpus, prices, order, notify)


def _suggested(
    found: Estimate,
    start: ProgramStart,
    order: Mapping[str, Any],
    alternatives: Provider | None,
    notify: Callable[[str], None],
    suggest: bool,
) -> Estimate:
    """An estimate with suggestions, if it does not fit and they are requested."""
    if found.fits or not suggest:
        return found
    from gpuprobe.planning import suggestions
    from gpuprobe.planning.alternatives import script_changes
    from gpuprobe.planning.trials import EstimateServer

    request = {**start.request(), **order, "compute": found.compute, "change": ""}
    for key in ("output", "recorded", "link", "per_node"):
        request.pop(key, None)
    with EstimateServer(start) as estimate_one:
        suggested = suggestions.suggest(
            found, request, alternatives or script_changes, estimate_one, notify=notify
        )
    return suggested.added_to(found)


class _ProgramRun:
    """Runs a program on the measured GPUs, until it ends or has made ``steps`` optimizer steps.

    ``bounded``: raise `TooLarge` if this machine's memory is too small for its tensors. After the
    run, ``others`` is the memory of processes that the program started, by the GPU's number in the
    machine; ``waits``: the program was stopped while it waited for one of them.
    """

    def __init__(self, program: Program, steps: int, *, bounded: bool) -> None:
        self._program = program
        self._steps = steps
        self._bounded = bounded
        self.others: dict[int, OtherProcesses] = {}
        self.waits = False
        self.collected: dict[int, int] = {}
        """What Python's collector freed of each GPU when the program was stopped, in bytes."""

    def _collect(self) -> None:
        """Run Python's collector, and note what it frees: nothing of the program runs after."""
        import gc

        import torch

        if not torch.cuda.is_initialized():
            return
        devices = range(torch.cuda.device_count())
        before = [torch.cuda.memory_allocated(device) for device in devices]
        gc.collect()
        self.collected = {
            device: max(0, was - torch.cuda.memory_allocated(device))
            for device, was in zip(devices, before, strict=True)
        }

    def __call__(self, measured: NativeMeasurement, recorder: Any) -> int:
        """Run the program; returns how many optimizer steps it made."""
        from gpuprobe.api.recordings import scratch_recording
        from gpuprobe.planning.processes import (
            ProcessRecorder,
            Stalled,
            assumption_text,
            interrupt_stalls,
            started_processes,
        )
        from gpuprobe.sampler.hooks.optimizer_steps import Enough, limit
        from gpuprobe.sampler.processes.children import following
        from gpuprobe.sampler.program import restored_if_it_fails, signals_restored
        from gpuprobe.torch_support.callers import beyond_any_gpu, of_host_memory, place_in

        steps = self._steps
        with (
            restored_if_it_fails(),
            limit(steps, self._collect) as count,
            scratch_recording() as scratch,
        ):
            folder = scratch.parent
            try:
                started = following(ProcessRecorder(folder, steps))
                with interrupt_stalls(folder), started, signals_restored():
                    self._program.run()
            except Enough as enough:
                where = f"after step {count()} (--steps)"
                self.waits = isinstance(enough, Stalled)
                if self.waits:
                    where = (
                        "where the program waited for a process that it had started, which was "
                        f"stopped after step {steps} (--steps)"
                    )
                measured.assume(
                    f"stopped {where}: later code, such as an evaluation "
                    "or a checkpoint, was not run and may need more"
                )
            except SystemExit as exit_:
                if exit_.code not in (None, 0):
                    text = f"the program ended with exit code {exit_.code}"
                    raise _failed(measured, text) from None
            except GpuprobeError:
                raise
            except Exception as error:
                if of_host_memory(error):
                    if self._bounded:
                        reason = "this machine does not have enough memory for its tensors"
                        raise TooLarge(reason) from None
                    text = (
                        f"this machine does not have enough memory for a tensor that the program "
                        f"creates on the CPU at {place_in(error)}: create it on the GPU (with "
                        "torch.device('cuda'))"
                    )
                    raise ProgramFailed(text) from None
                reason = str(error).strip().partition("\n")[0]
                size = beyond_any_gpu(error)
                if size:
                    raise ProgramFailed(
                        f"does not fit on any GPU: at {place_in(error)} the program asks for "
                        f"{size} at once, more than this machine has addresses for"
                    ) from None
                text = f"the program failed at {place_in(error)}: {type(error).__name__}: {reason}"
                raise _failed(measured, text) from error
            if not count():
                _refuse_untrained(measured)
            processes = started_processes(folder, measured.models())
            self.others = processes.needs
            if processes.used:
                measured.assume(assumption_text(processes.used))
            measured.include(processes.assumed, processes.unknown_reads)
        return count()


def _links(link: str, gpu: str, ranks: int, per_node: int) -> tuple[Links | None, int]:
    """The links of a description, and the number of ranks on each node. Raises UsageError for links
    that cannot connect the ranks.
    """
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.model.plans.links import parse_links

    per_node = per_node or len(parse_spec(gpu))
    if not link:
        return None, per_node
    found = parse_links(link)
    if ranks > per_node and not found.network:
        raise UsageError(
            f"{ranks} ranks are on several nodes of {per_node}, and --link has no ib",
            hint=f"--link {link},ib:ndr, or --per-node {ranks} if they are on one",
        )
    return found, per_node


def _failed(measured: NativeMeasurement, text: str) -> ProgramFailed:
    """The error for a program that failed: ValueNeeded if an unknown value may have caused it."""
    decided, bounded = measured.unknown_read()
    place = decided or bounded
    if not place:
        return ProgramFailed(text)
    what = "a value was assumed" if decided else "the largest size was assumed for one"
    return ValueNeeded(
        f"{text}; {what} that was not computed ({place}), which it may need",
        hint="compute the values: --compute real, compute='real'",
        place=place,
    )


def _refuse_untrained(measured: NativeMeasurement) -> None:
    """Raise ValueNeeded if a program has an optimizer and made no step, after it decided by a value
    that was not computed: its figures are not those of training.
    """
    decided, bounded = measured.unknown_read()
    torch: Any = sys.modules.get("torch")
    if not (decided or bounded) or torch is None:
        return
    kinds = [torch.optim.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # torch marks the method of a class as the first optimizer of that class is made.
    if any(getattr(vars(kind).get("step"), "hooked", False) for kind in kinds):
        place = decided or bounded
        raise ValueNeeded(
            f"no training step was made, after {place} decided by a value that was not computed",
            hint="compute the values: --compute real, compute='real'",
            place=place,
        )


def _endless(
    gpu: str,
    compute: str,
    conf: str | None,
    assume: Sequence[str],
    *,
    measure: bool = False,
) -> EngineOptions:
    """The options for GPUs that never run out of memory."""
    from gpuprobe.native.session import EngineOptions

    return EngineOptions(gpu, compute, conf, tuple(assume), endless=True, measure=measure)


def _estimate(
    run: Callable[[NativeMeasurement, Any], int],
    options: EngineOptions,
    why: str,
    job: Job,
    unused: str,
    bounded: bool,
    links: Links | None,
    per_node: int,
    output: str = "",
    started: Callable[[], tuple[Mapping[int, OtherProcesses], bool]] = lambda: ({}, False),
    progress: Callable[[int, str], None] | None = None,
    collected: Callable[[], Mapping[int, int]] = dict,
    handler: str = "",
) -> Attempt:
    """The estimate of ``run`` on the GPUs of ``options``, and the first line that depends on a
    value which was not computed.

    ``why``: why these values are computed. ``unused``: the hint if nothing is allocated on
    the device. ``bounded``: raise `TooLarge` beyond the limits of ``--compute auto``. ``output``:
    the path to keep the recording at. ``started`` returns the memory of processes that the program
    started, by the GPU's number in the machine, and whether the program waited for a stopped one.
    ``collected``: what Python's collector freed at the end, in bytes by GPU. ``handler``: where the
    program handles an out-of-memory error.
    """
    from gpuprobe.api.recordings import load, scratch_recording
    from gpuprobe.api.summary import summarize
    from gpuprobe.api.watch import record
    from gpuprobe.native.session import NativeMeasurement
    from gpuprobe.planning.figures import device_fit, device_rows, estimate_of, fullest
    from gpuprobe.planning.processes import NO_PROCESSES
    from gpuprobe.planning.trials import Attempt
    from gpuprobe.sampler.environment import as_rank
    from gpuprobe.step_time.recorded import step_time_of

    measured = NativeMeasurement(options, job, bounded=bounded)
    rank = (job.rank, job.rank % measured.count, job.ranks, job.environment(measured.count))
    with nullcontext(Path(output)) if output else scratch_recording() as path:
        with as_rank(*rank):  # a second run replaces the recording of the first
            recorder = record(
                path, level="trace", warn=lambda text: None, trace_steps="all", force=bounded
            )
        recorder.progress = progress
        measured.recorded(recorder.now_ns)
        measured.session.assume_unknown()
        measured.session.start()
        try:
            with as_rank(*rank), recorder:
                steps = run(measured, recorder)
            refused = measured.refused()
            if refused is not None:  # and the program caught it
                raise refused
        except UnknownValue as unknown:
            raise unknown.error from None
        finally:
            measured.session.stop()
        others, waits = started()
        recording = load(path)  # other ranks may be writing their parts
        ranks = tuple(one for one in recording.ranks if one.session.rank == job.rank)
        mine = replace(recording, ranks=ranks)
        outcome = measured.run(mine)
        if not outcome.count:
            raise UsageError("the program hides all GPUs", hint="it sets CUDA_VISIBLE_DEVICES")
        if not outcome.devices and others:
            raise UsageError(
                "only processes that the program starts use the GPU, not the program itself"
                + (" before it waits for one that was stopped (--steps)" if waits else ""),
                hint="estimate what one of them runs, as a script; of a job with --ranks N"
                + ("; or more --steps than they make" if waits else ""),
            )
        if not outcome.devices:
            raise UsageError("nothing was allocated on the GPU", hint=unused)
        fits = {
            device.index: device_fit(outcome, device, others.get(device.number, NO_PROCESSES))
            for device in outcome.devices
        }
        worst = fullest(outcome, fits)
        about = f"cuda:{worst.index}" if len(outcome.devices) > 1 else ""
        report = summarize(mine, top=1_000_000, device=about)
        time = step_time_of(
            ranks[0],
            worst.model.name,
            per_node=per_node,
            network=links.network if links is not None else 0.0,
        )
        rows = device_rows(outcome, fits, mine)
    found = estimate_of(
        outcome,
        worst,
        fits[worst.index],
        report,
        steps,
        why,
        rows,
        links,
        per_node,
        collected(),
        handler,
        time,
    )
    decided, largest = measured.unknown_read()
    return Attempt(found, decided or largest, measured.too_large())


def fit_program(
    script: str,
    argument: str,
    arguments: Sequence[str] = (),
    *,
    gpu: str = "h100-80gb",
    least: int = 1,
    most: int = 65536,
    steps: int = 3,
    compute: str = "auto",
    conf: str | None = None,
    ranks: int | Sequence[int] = 1,
    rank: int | Sequence[int] | str = 0,
    assume: Sequence[str] = (),
    suggest: bool = False,
    max_seconds: float = 600.0,
    notify: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Search for the largest value of ``argument`` with which the script fits.

    The search starts at the script's value and covers ``least`` to ``most``: it doubles until a
    value does not fit, or halves until one does, then bisects. With ``compute="auto"`` the first
    value is estimated as `estimate_program` does, the others without large values if no line has
    decided by one. ``suggest`` also estimates changes to the run.
    ``gpu`` may name several GPUs, separated by commas, or ``"all"`` of the catalogue (then changes
    are not estimated), and ``ranks`` several numbers: the result is that of the combination in
    which most fits on all ranks (`Fit.choices`). ``rank`` is as in `estimate_program`. ``notify``
    gets a line about every estimate. Ctrl-C or ``max_seconds`` end the search: the result has the
    values tried so far, and is ``interrupted`` or ``out_of_time``. Raises what `estimate_program`
    raises.
    """
    from gpuprobe.planning.fit import fit_script

    require_torch("an estimate runs the training step")
    return fit_script(
        script,
        argument,
        arguments,
        gpu=gpu,
        least=least,
        most=most,
        steps=steps,
        compute=compute,
        conf=conf,
        ranks=[ranks] if isinstance(ranks, int) else ranks,
        rank=rank,
        assume=assume,
        suggest=suggest,
        seconds=max_seconds,
        notify=notify,
    )


def fit(
    build: Callable[[int], Callable[[], Any]],
    gpu: str = "h100-80gb",
    *,
    least: int = 1,
    most: int = 65536,
    steps: int = 3,
    compute: str = "auto",
    conf: str | None = None,
    assume: Sequence[str] = (),
) -> Fit:
    """Like ``gpuprobe fit``, for a function: ``build(value)`` builds a model for that value on the
    device and returns the function for one step (see `estimate`). Runs in this process, without
    suggestions. Raises what `estimate` raises at ``least``.
    """
    from gpuprobe.model.plans.fit import Trial
    from gpuprobe.model.values import Bytes
    from gpuprobe.planning.fit import check_bounds, fit_of, search

    check_bounds(least, most)
    of_gpu: dict[str, Any] = {}

    def trial(value: int) -> Trial:
        found = estimate(
            lambda: build(value),
            gpu,
            steps=steps,
            compute=compute,
            conf=conf,
            assume=assume,
        )
        of_gpu.update(gpu=found.gpu, capacity=found.capacity)
        return Trial(
            value, found.verdict, found.peak_allocated, Bytes(found.total_high), found.capacity
        )

    tried = search(trial, least, most)
    return fit_of(
        tried,
        **of_gpu,
        argument="value",
        applied="as build(value)",
        compute=compute,
        least=least,
        most=most,
        suggestions=(),
        not_tried=("changes to the run: `gpuprobe fit` tries them on scripts",),
    )


def trial() -> None:
    """Make one estimate in this process. The first command-line argument is its order, as JSON; see
    `gpuprobe.planning.trials`.
    """
    import json

    from gpuprobe.planning.trials import run_request

    run_request(json.loads(sys.argv[1]), estimate_program)


def serve_trials() -> None:
    """Serve the estimates of `fit_program`, each in a process: see `gpuprobe.planning.trials`."""
    from gpuprobe.planning.trials import run_request, serve

    def warm_up() -> None:  # CUDA is initialised in the children: it does not survive a fork
        load_gpu("h100-80gb", endless=True)
        import torch  # noqa: F401 - for the children

    serve(warm_up, functools.partial(run_request, estimate=estimate_program))
