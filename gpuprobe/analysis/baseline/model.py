"""What a baseline holds, and what a check against it finds."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuprobe.analysis.blame.source import Source
from gpuprobe.analysis.compare.accounts import Account
from gpuprobe.analysis.compare.causes import Cause
from gpuprobe.analysis.compare.diff import DiffRow
from gpuprobe.model.io.codec import Malformed
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Displayed


@dataclass(frozen=True, slots=True)
class Label:
    """``at``: the digest of the statement, ``/n`` for the n-th that is equal, ``+n`` for a line
    further down in it; "" where the source is not known, and the text is the place itself."""

    text: str
    at: str = ""


def labels_of(keys: Iterable[str], sources: Mapping[str, Source]) -> dict[str, Label]:
    """From places (``file:line in function``) to labels; no two are the same."""
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
    """The place that a label stands for. Raises Malformed where its statement is not there."""
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
    """How much more than the baseline is accepted: the larger of a share and an amount. ``most``: a
    share that the amount may not be more than, which matters for small programs."""

    relative: float = 0.0
    absolute: int = 0
    most: float | None = None

    def limit(self, value: int) -> int:
        """The largest accepted value."""
        amount = self.absolute
        if self.most is not None:
            amount = min(amount, int(value * self.most))
        return value + max(int(value * self.relative), amount)

    def text(self, unit: str) -> str:
        """In words: ``2%``, ``64.0 MiB``, ``2% or 64.0 MiB``, ``nothing``."""
        parts = [f"{self.relative * 100:g}%"] if self.relative else []
        if self.absolute:
            parts.append(human_bytes(self.absolute) if unit == "bytes" else str(self.absolute))
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
}
"""What is compared, in which unit, and what is accepted where nothing else is said. In the order
in which a cause is looked for: what grows with every step also raises the peak. Reserved memory
moves in segments of 2 MiB and more. The peak of a phase or a kind of step may take as many bytes
more as ``peak_allocated`` may; see `BELOW_PEAK`."""

IGNORED: Final = {
    name: Tolerance(relative=0.001, absolute=1 << 20, most=0.01)
    for name in ("peak_allocated", "steady_allocated")
}
"""What is ignored, in place of the tolerances of `METRICS`, where every run gives the same figures:
on the native engine and on a virtual GPU. There is no noise there; this is what nobody would act
on."""

BELOW_PEAK: Final = 0.9
MORE_BELOW_PEAK: Final = 0.05
"""A phase or kind of step whose peak stays below 90% of the program's may take 5% more, where
nobody says otherwise: the program needs no more memory for it. One of `ONCE` may take any amount
up to there."""

ONCE: Final = frozenset({"phase setup", "first step", "after the last step"})
"""What a program goes through once. What is left there adds up to nothing, as it may in a phase
that comes again with every step. An evaluation that is highest after the last step is a part of
that."""

_EXACT: Final = ("virtual ", "native ")


def is_exact(device: str) -> bool:
    """Whether a device, as a baseline names it, is simulated: the same figures in every run."""
    return device.startswith(_EXACT)


PEAK: Final = "peak"
ACCOUNT_OF: Final = {
    "growth_per_step": "growth",
    "peak_allocated": PEAK,
    "steady_allocated": "steady",
    "peak_reserved": "reserved",
    "device_allocs_after_warm_up": "device allocs",
    "implicit_syncs_per_step": "syncs",
    "races": "races",
}
"""The account that says what a metric is made of. Those of phases and of kinds of step have the
metric's own name."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of the project that the program consists of or reads: the digest of its text, and
    the text where it is kept."""

    digest: str
    text: str | None = None

    @classmethod
    def of(cls, text: str) -> KeptFile:
        """With the text."""
        return cls(file_digest(text), text)


def file_digest(text: str) -> str:
    """What tells two states of a file apart, in 16 characters."""
    data = text.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Baseline:
    """``metrics``: name to value, bytes or counts. ``phases``: peak allocated of each phase
    (``phase forward``) over all steps, and of each kind of step (``first step``). ``accounts``: by
    `ACCOUNT_OF`. ``stopped_after``: the optimizer steps that the program was ended after, None
    where it ran to its end. ``sources``: the program's files, by their names in the accounts; none
    in a baseline of an earlier version. ``labels``: what the file it was read from calls its lines.
    ``command``: the script, or ``-m`` and the module, with its arguments; none of a recording.
    ``files``: the project's own files that the program imports or opens as text, by their names
    relative to the project.
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

    @property
    def texts(self) -> dict[str, str]:
        """The texts of ``files`` that are known."""
        return {name: kept.text for name, kept in self.files.items() if kept.text is not None}


@dataclass(frozen=True, slots=True)
class Setting:
    """Something a check was told: in words, and by whom (``command line``, ``baseline``,
    ``pyproject.toml``, ``default``)."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of a check. ``limit`` is the largest accepted value; ``accepted`` the tolerance
    in words, and ``source`` where that comes from. Of a regression, ``cause`` says what to look
    at first, ``place`` is its line (``file:line in function``, "" where none is known), ``causes``
    are that and what to look at next, ``unexplained`` is what the causes that were tried leave of
    the growth (None where none was tried), and ``rows`` are the lines of its account, summing to
    the account's change; None without one. ``ignored``: the tolerance is what is ignored on an
    exact engine.
    """

    name: str
    unit: str
    before: int
    after: int
    limit: int
    accepted: str = ""
    source: str = "default"
    cause: str = ""
    place: str = ""
    causes: tuple[Cause, ...] = ()
    unexplained: int | None = None
    ignored: bool = False
    rows: tuple[DiffRow, ...] | None = None

    @property
    def regressed(self) -> bool:
        return self.after > self.limit

    @property
    def delta(self) -> int:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class CheckResult(Displayed):
    """What a check found. ``rows``: by ``category``, ``module`` and ``line``, each summing to
    the change of the peak; None if a side has no trace. ``cause``: a description of the first
    thing to look at. ``mismatches``: how the environments differ; such a check fails.
    ``settings``: the settings of the check and their sources. ``run``: its name, "" if there is
    only one. ``trials``: how the causes were found: by which runs, or why by none.
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

    def __repr__(self) -> str:
        if self.ok:
            return "<check: within the baseline>"
        names = ", ".join(item.name for item in self.regressions)
        return f"<check: failed: {names or '; '.join(self.mismatches)}>"

    @property
    def regressions(self) -> tuple[MetricResult, ...]:
        """Sorted by importance."""
        return tuple(item for item in (*self.metrics, *self.phases) if item.regressed)

    @property
    def ok(self) -> bool:
        return not self.regressions and not self.mismatches
