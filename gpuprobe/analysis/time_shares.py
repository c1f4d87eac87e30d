"""The time of a program's steps by phase, and its collective calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpuprobe.model.run.session import Collective, Step
from gpuprobe.model.values import Bytes, Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.report import TimeShares


def full_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps whose durations are representative: without the first, which initialises
    everything, and without what follows the last one; all of them if there are no others.
    """
    whole = [step for step in steps if step.ended_by != "end"]
    return whole[1:] or whole or list(steps)


def time_shares(steps: Sequence[Step], rank: int = 0) -> TimeShares | None:
    """Sum up `full_steps` of a rank; None if there are no steps."""
    from gpuprobe.model.report import PhaseTime, TimeShares  # 5 ms, which a recorder does not need

    chosen = full_steps(steps)
    if not chosen:
        return None
    phases: dict[str, int] = {}
    gpu_phases: dict[str, int] = {}
    gpu_steps = gpu_ns = 0
    for step in chosen:
        timed = not isinstance(step.gpu_ns, Unavailable)
        if not isinstance(step.gpu_ns, Unavailable):
            gpu_steps += 1
            gpu_ns += step.gpu_ns
        for phase in step.phases:
            if "/" not in phase.path:
                phases[phase.path] = phases.get(phase.path, 0) + phase.duration_ns
                if timed and not isinstance(phase.gpu_ns, Unavailable):
                    gpu_phases[phase.path] = gpu_phases.get(phase.path, 0) + phase.gpu_ns
    total = sum(step.duration_ns for step in chosen)
    longest_first = sorted(phases.items(), key=lambda item: (-item[1], item[0]))
    return TimeShares(
        rank=rank,
        steps=len(chosen),
        duration_ns=total,
        gpu_steps=gpu_steps,
        gpu_ns=gpu_ns,
        phases=tuple(PhaseTime(path, ns, gpu_phases.get(path, 0)) for path, ns in longest_first),
        outside_phases_ns=total - sum(phases.values()),
        collectives=joined_calls(call for step in chosen for call in step.collectives),
    )


def joined_calls(calls: Iterable[Collective]) -> tuple[Collective, ...]:
    """Sum up calls by operation: the longest time on the host first, then the most bytes. A sum is
    `Unavailable` if a figure of one call is.
    """
    sums: dict[str, Collective] = {}
    for call in calls:
        before = sums.get(call.op)
        if before is None:
            sums[call.op] = call
            continue
        spent = before.host_ns
        if not isinstance(spent, Unavailable):
            spent = call.host_ns if isinstance(call.host_ns, Unavailable) else spent + call.host_ns
        size = Bytes(before.bytes + call.bytes)
        wire = before.wire
        if not isinstance(wire, Unavailable):
            wire = call.wire if isinstance(call.wire, Unavailable) else Bytes(wire + call.wire)
        sums[call.op] = Collective(call.op, before.count + call.count, size, spent, wire)

    def order(call: Collective) -> tuple[int, int, str]:
        spent = 0 if isinstance(call.host_ns, Unavailable) else call.host_ns
        return -spent, -call.bytes, call.op

    return tuple(sorted(sums.values(), key=order))
