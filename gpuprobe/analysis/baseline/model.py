"""The contents of a baseline, and the results of a check against it.

In its file a baseline names places by labels, which stay the same when lines shift: ``file in
function: text``, with ``#2`` if the file has the same text again. The line is found by the digest
of its statement in the file's source.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from gpuprobe.analysis.blame.source import Source
from gpuprobe.analysis.compare.accounts import Account
from gpuprobe.analysis.compare.causes import Cause
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.analysis.growth import MANY_STEPS
from gpuprobe.model.io.codec import Malformed
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.text import amount
from gpuprobe.model.values import Displayed


@dataclass(frozen=True, slots=True)
class Label:
    """A place by its text. ``at``: the digest of its statement, ``/n`` for the n-th equal one,
    ``+n`` for a line further down in it. Empty if the source is unknown; then ``text`` is the place
    itself.
    """

    text: str
    at: str = ""


def labels_of(keys: Iterable[str], sources: Mapping[str, Source]) -> dict[str, Label]:
    """The label of each place (``file:line in function``); they are unique."""
    found: dict[str, Label] = {}
    for key in sorted(set(keys)):
        found[key] = _label(key, sources)
    twice = {text for text, n in Counter(label.text for label in found.values()).items() if n > 1}
    return {
        key: Label(key) if label.text in twice or (label.at and label.text in found) else label
        for key, label in found.items()
    }


def _label(key: str, sources: Mapping[str, Source]) -> Label:
    place = parse_place(key)
    source = sources.get(place.file) if isinstance(place, Place) else None
    if source is None or not isinstance(place, Place) or place.line not in source.by_line:
        return Label(key)
    text = source.lines[place.line - 1].strip() if place.line <= len(source.lines) else ""
    if not text:
        return Label(key)
    statement = source.statements[source.by_line[place.line]]
    equal = [item.start for item in source.statements if item.exact == statement.exact]
    at = statement.exact
    if len(equal) > 1:
        at += f"/{equal.index(statement.start) + 1}"
    if place.line > statement.start:
        at += f"+{place.line - statement.start}"
    same = [number for number, line in enumerate(source.lines, 1) if line.strip() == text]
    if len(same) > 1:
        text += f" #{same.index(place.line) + 1}"
    function = f" in {place.function}" if place.function else ""
    return Label(f"{place.file}{function}: {text}", at)


def place_of(text: str, at: str, sources: Mapping[str, Source]) -> str:
    """The place of a label. Raises Malformed if the source does not have its statement."""
    if not at:
        return text
    names = [name for name in sources if text.startswith((f"{name} in ", f"{name}: "))]
    digest, _, offset = at.partition("+")
    digest, _, ordinal = digest.partition("/")
    number = int(ordinal or 1) - 1
    if not names or not (offset or "0").isdigit() or number < 0:
        raise Malformed(f"places[{text!r}] is not a file in 'sources'")
    file = max(names, key=len)
    equal = [item.start for item in sources[file].statements if item.exact == digest]
    if number >= len(equal):
        raise Malformed(f"places[{text!r}]: {file} has no statement {at!r}")
    rest = text[len(file) :].removeprefix(" in ")
    function = rest.partition(": ")[0] if not rest.startswith(":") else ""
    return str(Place(file, equal[number] + int(offset or 0), function))


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The accepted increase over the baseline: the larger of a share and an amount. ``most`` limits
    the amount to a share, which matters for small programs.
    """

    relative: float = 0.0
    absolute: int = 0
    most: float | None = None

    def limit(self, value: int) -> int:
        """The largest accepted value."""
        amount = self.absolute
        if self.most is not None:
            amount = min(amount, int(value * self.most))
        return value + max(int(value * self.relative), amount)

    def exact_text(self) -> str:
        """The tolerance as on the command line: ``2%``, ``64000B``, ``2%,64000B``."""
        parts = [f"{self.relative * 100:g}%"] if self.relative or not self.absolute else []
        return ",".join([*parts, *([f"{self.absolute}B"] if self.absolute else [])])

    def text(self, unit: str) -> str:
        """The tolerance as text: ``2%``, ``64.0 MiB``, ``2% or 64.0 MiB``, ``nothing``."""
        parts = [f"{self.relative * 100:g}%"] if self.relative else []
        if self.absolute:
            parts.append(amount(self.absolute, unit))
        text = " or ".join(parts) or "nothing"
        return text if self.most is None else f"{text}, at most {self.most * 100:g}%"


METRICS: Final[dict[str, tuple[str, Tolerance]]] = {
    "growth_per_step": ("bytes", Tolerance()),
    "peak_allocated": ("bytes", Tolerance(relative=0.01)),
    "steady_allocated": ("bytes", Tolerance(relative=0.01)),
    "peak_reserved": ("bytes", Tolerance(relative=0.02, absolute=2 << 20)),
    "device_allocs_after_warm_up": ("count", Tolerance()),
    "implicit_syncs_per_step": ("count", Tolerance()),
    "races": ("count", Tolerance()),
    "step_time": ("ns", Tolerance(relative=0.02)),
}
"""The metrics that a check compares, with their units and default tolerances. Causes are searched
in this order: memory that grows with every step also raises the peak. Reserved memory changes in
segments of 2 MiB and more. ``step_time`` is predicted (`gpuprobe.step_time`), on simulated GPUs
alone. The peak of a phase or a kind of step may grow by as many bytes as
``peak_allocated`` may; see `BELOW_PEAK`."""

IGNORED: Final = {
    name: Tolerance(relative=0.001, absolute=1 << 20, most=0.01)
    for name in ("peak_allocated", "steady_allocated")
}
"""Replaces the tolerances of `METRICS` if all runs give the same figures: on simulated GPUs. There
is no noise; a change below this is too small to act on."""

BELOW_PEAK: Final = 0.9
MORE_BELOW_PEAK: Final = 0.05
"""A phase or kind of step whose peak stays below 90% of the program's may grow by 5% by default:
the program does not need more memory for it. One of `ONCE` may grow to any amount below 90%."""

ONCE: Final = frozenset({"phase setup", "first step", "after the last step"})
"""Phases and kinds of step that occur once. Memory that they leave behind does not accumulate, as
it may in a phase that each step repeats. An evaluation with its peak after the last step belongs to
that."""

SIMULATED: Final = "simulated "
"""A baseline's device begins with this if its GPU was simulated; the GPU's name follows."""


def is_exact(device: str) -> bool:
    """Whether a baseline's device is simulated, so that all runs give the same figures."""
    return device.startswith(SIMULATED)


def simulated_gpu(device: str) -> str | None:
    """The name of a baseline's simulated GPU; None if it was measured on this machine's own."""
    return device.removeprefix(SIMULATED) if is_exact(device) else None


PEAK: Final = "peak"
ACCOUNT_OF: Final = {
    "growth_per_step": "growth",
    "peak_allocated": PEAK,
    "steady_allocated": "steady",
    "peak_reserved": "reserved",
    "device_allocs_after_warm_up": "device allocs",
    "implicit_syncs_per_step": "syncs",
    "races": "races",
    "step_time": "step time",
}
"""The account of each metric. Accounts of phases and of kinds of step have the metric's own
name."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of the project that the program imports or reads: the digest of its text, and the text
    itself if it is stored.
    """

    digest: str
    text: str | None = None

    @classmethod
    def of(cls, text: str) -> KeptFile:
        """A file with its text."""
        return cls(file_digest(text), text)


def file_digest(text: str) -> str:
    """The digest of a file's text, 16 characters."""
    data = text.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Baseline:
    """The memory of a run, as a check compares it.

    ``metrics``: values by name, bytes or counts. ``phases``: the peak of allocated bytes of each
    phase (``phase forward``) over all steps, and of each kind of step (``first step``).
    ``accounts``: by the names in `ACCOUNT_OF`. ``stopped_after``: the number of optimizer steps
    after which the program was stopped, None if it ran to its end. ``sources``: the program's
    files, by their names in the accounts. ``labels``: the
    labels of lines in the file that it was read from. ``command``: the script, or ``-m`` and the
    module, with its arguments; empty for a recording. ``files``: the project's files that the
    program imports or opens as text, by their names relative to the project. ``missing``: what is
    missing from the recording, a sentence each; such a measurement is not written as a baseline.
    ``rank``: the rank of a job that was measured, and the number of ranks; it is not written.
    """

    environment: Mapping[str, str]
    steps: int
    metrics: Mapping[str, int]
    phases: Mapping[str, int]
    accounts: Mapping[str, Account] = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] | None = None
    stopped_after: int | None = None
    sources: Mapping[str, Source] = field(default_factory=dict)
    labels: Mapping[str, Label] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    files: Mapping[str, KeptFile] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    rank: tuple[int, int] = (0, 1)

    @property
    def texts(self) -> dict[str, str]:
        """The texts of ``files``, as far as they are stored."""
        return {name: kept.text for name, kept in self.files.items() if kept.text is not None}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a check as text, and its source (``command line``, ``baseline``,
    ``pyproject.toml``, ``default``).
    """

    name: str
    value: str
    source: Annotated[str, "command line, baseline, pyproject.toml or default"]


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of a check. ``limit`` is the largest accepted value; ``accepted`` is the tolerance
    as text, ``source`` where it was set. ``ignored``: the tolerance is one of `IGNORED`.

    A regression has a ``cause``, the first thing to check; ``place`` is its line (``file:line in
    function``, empty if unknown) and ``causes`` are all of them in order. ``unexplained``: the part
    of the growth that no tested cause explains, None if none was tested. ``rows``: the lines of its
    account, which sum to the account's change; None without an account.
    """

    name: str
    unit: str
    before: int
    after: int
    limit: int
    accepted: Annotated[str, "the tolerance in words"] = ""
    source: Annotated[str, "where the tolerance was set"] = "default"
    cause: Annotated[str, "of a regression: what to inspect first, in words"] = ""
    place: Annotated[str, "its line, file:line in function; empty if unknown"] = ""
    causes: Annotated[tuple[Cause, ...], "what to inspect, in order"] = ()
    unexplained: Annotated[
        int | None, "the growth that no cause explains; null if none was tested"
    ] = None
    ignored: bool = False
    rows: Annotated[
        tuple[DiffRow, ...] | None,
        "of a regression: what changed by line; sums to the change of its account",
    ] = None

    @property
    def regressed(self) -> bool:
        return self.after > self.limit

    @property
    def delta(self) -> int:
        return self.after - self.before


def important_first(
    metrics: Iterable[MetricResult], phases: Iterable[MetricResult]
) -> tuple[MetricResult, ...]:
    """Those above their limits, by what they cost: bytes first, the most of them first. What each
    step leaves counts as that of `MANY_STEPS`, reserved memory only beyond the growth of allocated,
    which comes before it.
    """
    metrics = tuple(metrics)
    peak = next((item for item in metrics if item.name == "peak_allocated"), None)
    grown = 0 if peak is None else max(0, peak.delta)

    def weight(item: MetricResult) -> int:
        if item.unit != "bytes":
            return 0
        if item.name == "growth_per_step":
            return item.delta * MANY_STEPS
        if item.name == "peak_reserved":
            beyond = item.delta - grown
            return beyond if peak is None or not peak.regressed else min(beyond, grown - 1)
        return item.delta

    regressed = sorted((item for item in metrics if item.regressed), key=lambda one: -weight(one))
    return (*regressed, *(item for item in phases if item.regressed))


@dataclass(frozen=True, slots=True)
class CheckResult(Displayed):
    """The results of a check. ``rows``: by ``category``, ``module``, ``line`` and ``need``; each
    sums to the change of the peak; None if the baseline or the run has no trace. ``cause``: what to
    check first. ``mismatches``: differences of the environments, ``incomplete``: what is missing
    from the recording; such a check fails. ``settings``: with their sources. ``trials``: the runs
    that tested the causes, or why there were none. If memory grew: ``accept`` is the command that
    makes this run the baseline, ``reproduce`` the shortest one that makes the same comparison.
    """

    metrics: tuple[MetricResult, ...]
    phases: tuple[MetricResult, ...]
    rows: Mapping[str, tuple[DiffRow, ...]] | None
    cause: str
    mismatches: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    run: str = ""
    trials: str = ""
    accept: str = ""
    reproduce: str = ""
    incomplete: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if self.ok:
            return "<check: within the baseline>"
        names = ", ".join(item.name for item in self.regressions)
        return f"<check: failed: {names or '; '.join(self.incomplete + self.mismatches)}>"

    @property
    def regressions(self) -> tuple[MetricResult, ...]:
        """The metrics and phases above their limits, the most important first."""
        return important_first(self.metrics, self.phases)

    @property
    def ok(self) -> bool:
        return not self.regressions and not self.mismatches and not self.incomplete
