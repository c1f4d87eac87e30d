"""A health rule, the facts it reads, and the run of all rules.

A rule is a generator over `MachineFacts`: it yields a `Finding` for each problem and an
`Unavailable` for each value that it needs and cannot read. A rule that yields nothing has passed. A
rule never raises for a value that it cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.machine.devices import Device, Inventory, SourceStatus
from gpuprobe.model.machine.diagnosis import DeviceVerdict, NotChecked
from gpuprobe.model.rules import Rule, define
from gpuprobe.model.values import Bytes, Reading, ReadStatus, T, Unavailable

NOT_GATHERED = Unavailable("not gathered", ReadStatus.NOT_COLLECTED)


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The installed torch, as a separate process reports it.

    ``nccl_built`` is the version that torch was compiled against, ``nccl_loaded`` that of the
    library that a process with torch loads.
    """

    version: str
    cuda: str | Unavailable  # the CUDA runtime it was built with, as "12.8"
    hip: str | Unavailable = NOT_GATHERED
    archs: tuple[str, ...] | Unavailable = NOT_GATHERED  # "sm_90", "compute_90", …
    nccl_built: str | Unavailable = NOT_GATHERED
    nccl_loaded: str | Unavailable = NOT_GATHERED


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """``/dev/shm``: size and free bytes, and whether this process may write to it."""

    total: Bytes
    free: Bytes
    writable: bool = True


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """A driver library that the dynamic loader finds. ``path`` is resolved."""

    name: str
    path: str
    stub: bool


@dataclass(frozen=True, slots=True)
class KernelMessage:
    """A line of the kernel log. ``seconds`` since boot."""

    seconds: float
    text: str


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts that the rules may read. A fact that could not be read has the reason.

    ``memlock`` is the soft limit in bytes, -1 for none. ``packages`` maps distribution names (as in
    their metadata, in lower case) to versions. ``pycuda_cuda`` is the CUDA version that pycuda was
    compiled against, ``libraries`` the driver libraries that were found.
    """

    inventory: Inventory | Unavailable = NOT_GATHERED
    environ: Mapping[str, str] | Unavailable = NOT_GATHERED
    torch: TorchFacts | Unavailable = NOT_GATHERED
    shared_memory: SharedMemory | Unavailable = NOT_GATHERED
    memlock: int | Unavailable = NOT_GATHERED
    kernel_log: tuple[KernelMessage, ...] | Unavailable = NOT_GATHERED
    packages: Mapping[str, str] | Unavailable = NOT_GATHERED
    pycuda_cuda: str | Unavailable = NOT_GATHERED
    libraries: tuple[LibraryFile, ...] | Unavailable = NOT_GATHERED
    in_container: bool | Unavailable = NOT_GATHERED
    uid: int | Unavailable = NOT_GATHERED
    rdma_devices: tuple[str, ...] | Unavailable = NOT_GATHERED


Check = Callable[[MachineFacts], Iterator[Finding | Unavailable]]


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A rule about a machine, and the function that checks it."""

    rule: Rule
    check: Check = field(repr=False)


RuleCheck = Callable[[Rule, MachineFacts], Iterator[Finding | Unavailable]]


def rule(
    id: str, kind: str, title: str, levels: tuple[Level, ...] | Level, reads: str
) -> Callable[[RuleCheck], HealthCheck]:
    """Turn a generator function into a `HealthCheck`, with its docstring as the rule's description.
    ``reads``: the sources of its facts, separated by commas.
    """

    def decorate(function: RuleCheck) -> HealthCheck:
        parts = tuple(part.strip() for part in reads.split(","))
        made = define(id, kind, levels, title, description=function.__doc__ or "", reads=parts)

        def check(facts: MachineFacts) -> Iterator[Finding | Unavailable]:
            try:
                yield from function(made, facts)
            except _Missing as missing:
                yield missing.why

        return HealthCheck(made, check)

    return decorate


class _Missing(Exception):
    """A fact that a rule needs is unavailable."""

    def __init__(self, why: Unavailable) -> None:
        super().__init__(why.reason)
        self.why = why


def needed(fact: T | Unavailable) -> T:
    """A fact that a rule is about. If it is unavailable, the check ends with the reason."""
    if isinstance(fact, Unavailable):
        raise _Missing(fact)
    return fact


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a set of rules."""

    findings: tuple[Finding, ...]
    passed: tuple[Rule, ...]
    not_checked: tuple[NotChecked, ...]


_SEVERITY = {Level.ERROR: 0, Level.WARNING: 1, Level.NOTE: 2}


def examine(checks: Iterable[HealthCheck], facts: MachineFacts) -> Outcome:
    """Run ``checks``. Findings are sorted by severity, then in the order of the checks."""
    findings: list[Finding] = []
    passed: list[Rule] = []
    not_checked: list[NotChecked] = []
    for each in checks:
        clean = True
        reasons: dict[str, None] = {}  # the same reason for eight GPUs is reported once
        for result in each.check(facts):
            clean = False
            if isinstance(result, Unavailable):
                reasons.setdefault(result.reason)
            else:
                findings.append(result)
        not_checked += [NotChecked(each.rule, reason) for reason in reasons]
        if clean:
            passed.append(each.rule)
    findings.sort(key=lambda found: _SEVERITY[found.level])
    return Outcome(tuple(findings), tuple(passed), tuple(not_checked))


def unread(reading: Reading[T], what: str) -> Unavailable | None:
    """The reason to report for a reading that is missing; None if it is not missing, or if the
    device does not support it, which is not a gap in the check.
    """
    if isinstance(reading.value, Unavailable):
        if reading.value.status is ReadStatus.UNSUPPORTED:
            return None
        return Unavailable(f"{what}: {reading.value.reason}", reading.value.status)
    return None


def name_of(device: Device) -> str:
    """The device's name in findings: ``GPU 3 (NVIDIA H100)``, with NVML's index."""
    index = device.identity.nvml_index
    label = device.key if isinstance(index, Unavailable) else f"GPU {index}"
    name = device.name.value
    return label if isinstance(name, Unavailable) else f"{label} ({name})"


def device_verdicts(inventory: Inventory, outcome: Outcome) -> tuple[DeviceVerdict, ...]:
    """The findings about each GPU: those whose subject begins with its key, or that name it in
    their message or evidence; and the number of checks that could not read one of its values.
    """
    verdicts = []
    for device in inventory.devices:
        name = name_of(device)
        label = re.compile(rf"{re.escape(name.partition(' (')[0])}(?![\w.])")
        about = tuple(
            found
            for found in outcome.findings
            if device.key in found.subject.split()
            or label.search(found.message)
            or any(label.search(text) for row in found.evidence for text in row)
        )
        skipped = {one.rule.id for one in outcome.not_checked if label.search(one.reason)}
        verdicts.append(DeviceVerdict(name, about, len(skipped)))
    return tuple(verdicts)


def driver_status(inventory: Inventory) -> SourceStatus | Unavailable:
    """The status of NVML, which represents the driver."""
    for source in inventory.sources:
        if source.name == "nvml":
            return source
    return Unavailable("NVML was not queried", ReadStatus.NOT_COLLECTED)


def inventory_of(facts: MachineFacts) -> Inventory:
    """The inventory, which is `needed`, of a driver that responds."""
    inventory = needed(facts.inventory)
    if not needed(driver_status(inventory)).available:
        raise _Missing(Unavailable("no driver"))
    return inventory


def is_lost(device: Device) -> bool:
    """Whether the device no longer responds: all its measured values are lost then."""
    return ReadStatus.LOST in (
        device.throttling.status,
        device.utilisation.gpu.status,
        device.memory.used.status,
    )
