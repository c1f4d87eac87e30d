"""What a training step would need on a GPU: run on a virtual one, through the allocator."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpuprobe.api.step_limit import Enough, limit
from gpuprobe.errors import GpuprobeError, MissingExtra, ProgramFailed, UsageError, ValueNeeded

if TYPE_CHECKING:
    from gpuprobe.model.plans.estimate import Estimate, Share
    from gpuprobe.model.report import Report, Table
    from gpuprobe.model.values import Unavailable
    from gpuprobe.sampler.program import Program
    from gpuprobe.virtual.session import Session

__all__ = ["estimate", "estimate_program"]

_NOT_MODELLED = (
    "workspaces that cuDNN picks for convolutions",
    "kernels outside torch's dispatcher: custom CUDA extensions, Triton, NCCL's buffers",
    "other processes on the same GPU",
)

_MARGIN = 0.02
"""Of the reserved memory: what the estimate may be off by where nothing else is known. Twice the
worst error that the project's accuracy goal allows."""


_WORTH_SAYING = 0.01
"""Of the highest end of a step: by how much the last one is above the one before."""


def estimate(
    step: Callable[[], Any],
    gpu: str = "h100-80gb",
    *,
    steps: int = 3,
    compute: str = "shapes",
    conf: str | None = None,
    ranks: int = 1,
) -> Estimate:
    """The memory that ``step`` would take on a GPU. None is needed.

    ``step`` is called on a virtual GPU (see `virtual_gpu`). It builds its model there and
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

    ``compute``: ``"shapes"`` computes no values, ``"real"`` all of them. ``conf``: allocator
    settings as in ``PYTORCH_CUDA_ALLOC_CONF``. ``ranks``: pretend to be one of so many processes.

    Raises what `virtual_gpu` raises, UsageError where nothing was allocated on the device, and
    what ``step`` raises; `ValueNeeded` where it needs a value that was not computed.
    """
    if steps < 1:
        raise UsageError("at least one step is needed")

    def run(session: Session, recorder: Any) -> int:
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
    return _estimate(run, gpu, compute, conf, ranks, unused)


def estimate_program(
    program: Program,
    gpu: str = "h100-80gb",
    *,
    steps: int = 3,
    compute: str = "shapes",
    conf: str | None = None,
    ranks: int = 1,
) -> Estimate:
    """As `estimate`, for a whole program: it is stopped after ``steps`` optimizer steps, and the
    result says so, since what comes later may need more.

    With ``compute="shapes"`` numbers that the program reads are NaN, and the result says so.
    Raises ProgramFailed where the program ends with an exception of its own, and `ValueNeeded`
    where NaN may have led to that, or cannot stand for what it reads.
    """
    if steps < 1:
        raise UsageError("at least one step is needed")

    def run(session: Session, recorder: Any) -> int:
        session.machine.unknown_as_nan = True
        with limit(steps) as count:
            try:
                program.run()
            except Enough:
                session.machine.assume(
                    f"stopped after step {count()} (--steps): what comes later, such as an "
                    "evaluation or a checkpoint, was not run, and may need more"
                )
            except SystemExit as exit_:
                if exit_.code not in (None, 0):
                    text = f"the program ended with exit code {exit_.code}"
                    raise _failed(session, text) from None
            except GpuprobeError:
                raise
            except Exception as error:
                text = f"the program failed: {type(error).__name__}"
                raise _failed(session, text) from error
        return count()

    unused = (
        "the program ran on the CPU: it has to move its model and data to the device where "
        "torch.cuda.is_available(), or by an option of its own (after --)"
    )
    return _estimate(run, gpu, compute, conf, ranks, unused)


def _failed(session: Session, text: str) -> ProgramFailed:
    """The error for a program that ended with one of its own, which NaN may have led it to."""
    given = session.machine.given_nan
    if not given:
        return ProgramFailed(text)
    return ValueNeeded(
        f"{text}; it was given NaN for a value that was not computed ({given}), and perhaps "
        "needs the value",
        hint="compute the values: --compute real, compute='real'",
    )


def _estimate(
    run: Callable[[Session, Any], int],
    gpu: str,
    compute: str,
    conf: str | None,
    ranks: int,
    unused: str,
) -> Estimate:
    """``unused``: what to do where nothing was allocated on the device."""
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why="an estimate runs the training step")
    from gpuprobe.allocator.recorder import TraceRecorder
    from gpuprobe.api.recordings import load, scratch_recording, summary
    from gpuprobe.api.watch import record
    from gpuprobe.virtual.session import Session, machine_of

    machine = machine_of(gpu, compute, conf, endless=True)
    machine.ranks = ranks
    taps = []
    for device in machine.devices:
        tap = TraceRecorder(device.sim, listen=False)
        device.listeners.append(tap.on_event)
        taps.append(tap)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    with scratch_recording() as path:
        recorder = record(path, level="trace", warn=lambda text: None, trace_steps="all")
        session = Session(machine)
        session.keep_stacks()
        session.start()
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            with recorder:
                steps = run(session, recorder)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            session.stop()
        report = summary(load(path), top=1_000_000)
    fullest = max(machine.devices, key=lambda device: device.sim.peak_reserved)
    if not fullest.sim.peak_allocated:
        raise UsageError("nothing was allocated on the GPU", hint=unused)
    return _result(machine, fullest, taps[fullest.index].trace(), report, steps)


def _result(machine: Any, device: Any, trace: Any, report: Report, steps: int) -> Estimate:
    """Put the figures together."""
    from gpuprobe.allocator.replays.replay import replay_trace
    from gpuprobe.allocator.replays.whatif import what_if
    from gpuprobe.model.plans.estimate import FITS, NOT, WITHIN_MARGIN, Estimate
    from gpuprobe.model.text import human_bytes
    from gpuprobe.model.values import Bytes

    model = device.model
    recorded = replay_trace(trace)
    free = what_if(trace, recorded, machine.settings)
    low = min(free.peak_reserved.least, device.sim.peak_reserved)
    high = max(free.peak_reserved.most, device.sim.peak_reserved)
    verdict = FITS
    if high + _MARGIN * high + model.context_high > model.total_memory:
        # Cached memory is given back when the device is full: only a simulation tells.
        worst = what_if(
            trace, recorded, machine.settings, capacity=model.total_memory - model.context_high
        )
        best = what_if(
            trace, recorded, machine.settings, capacity=model.total_memory - model.context_low
        )
        tight = device.sim.peak_allocated * (1 + _MARGIN) + model.context_high
        if best.would_oom == best.orders:
            verdict = NOT
        elif worst.would_oom or tight > model.total_memory:
            verdict = WITHIN_MARGIN
    growing = _growing(report, f"cuda:{device.index}")
    if growing and verdict != NOT:
        peak_with_context = device.sim.peak_allocated + model.context_high
        left = max(0, model.total_memory - peak_with_context) // growing
        machine.assume(
            f"that memory does not go on growing: the last step left {human_bytes(growing)} more "
            f"behind than it found; if every step does, the GPU is full in about {left + 1} more"
        )
    return Estimate(
        gpu=model.name,
        devices=len(machine.devices),
        steps=steps,
        peak_allocated=Bytes(device.sim.peak_allocated),
        peak_reserved=Bytes(device.sim.peak_reserved),
        reserved_low=Bytes(low),
        reserved_high=Bytes(high),
        context_low=Bytes(model.context_low),
        context_high=Bytes(model.context_high),
        capacity=Bytes(model.total_memory),
        verdict=verdict,
        attributed=Bytes(_traced(report)),
        by_category=_shares(report.categories),
        by_module=_shares(report.top_modules),
        by_line=_shares(report.top_lines),
        assumed=tuple(
            text if count == 1 else f"{text} ({count} times)"
            for text, count in machine.assumed.items()
        ),
        not_modelled=_NOT_MODELLED,
        settings=machine.settings.conf,
        ranks=machine.ranks,
    )


def _traced(report: Report) -> int:
    """What the tables sum to: the peak, or where its step has no trace the highest that has."""
    from gpuprobe.model.values import Unavailable, available

    if not isinstance(report.peak.traced, Unavailable):
        return report.peak.traced
    table = report.top_lines
    return 0 if isinstance(table, Unavailable) else available(table.total, 0)


def _growing(report: Report, device: str) -> int:
    """Bytes by which the end of the last step is above that of the step before, where that is
    worth a word; 0 where it is not. The first step is none to compare with: optimizers make
    their state in it.
    """
    ends = [
        window.end.allocated
        for row in report.steps.rows
        if row.step.ended_by != "end"
        for window in row.step.windows
        if window.device == device
    ]
    known = [end for end in ends if isinstance(end, int)]
    if len(ends) < 3 or len(known) < len(ends):
        return 0
    grown = known[-1] - known[-2]
    return grown if grown > _WORTH_SAYING * max(known) else 0


def _shares(table: Table | Unavailable) -> tuple[Share, ...]:
    from gpuprobe.model.plans.estimate import Share
    from gpuprobe.model.values import Bytes, Unavailable

    if isinstance(table, Unavailable):
        return ()
    return tuple(Share(str(row.key), Bytes(row.bytes)) for row in table.rows)
