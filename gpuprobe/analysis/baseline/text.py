"""Baselines as text that people review: sorted, one row per line, units with all numbers, without
times and absolute paths. A file has one baseline, or those of several runs (a training script and
an evaluation) by name.
"""

from __future__ import annotations

import base64
import bz2
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from gpuprobe.analysis.baseline.model import (
    METRICS,
    PEAK,
    Baseline,
    KeptFile,
    Label,
    Tolerance,
    labels_of,
    place_of,
)
from gpuprobe.analysis.blame.source import decode, digest
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.peak.peaks import Share
from gpuprobe.errors import DataError
from gpuprobe.model.io.codec import Malformed, from_plain, unknown_key
from gpuprobe.model.io.document import check_version, header
from gpuprobe.model.needs import Need
from gpuprobe.model.text import amount, human_bytes
from gpuprobe.model.values import Bounds, Parsed

SCHEMA: Final = "gpuprobe.baseline"
VERSION: Final = (2, 4)
"""(major, minor); a minor version only adds keys."""

RUNS_SCHEMA: Final = "gpuprobe.baselines"
RUNS_VERSION: Final = (1, 0)
"""(major, minor) of a file with the baselines of several runs (`loads_runs`)."""

_WIDTH: Final = 100  # characters in a line of base64
_MOST_TEXT: Final = 4 << 20  # bytes of one file of sources
_DEEPEST: Final = 2_000  # calls in a path; Python's own limit is 1,000 by default

CONFLICT: Final = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)
"""The markers that git writes around the two sides of a conflict."""

_HINT: Final = "delete it and run gpuprobe baseline update to write a new one"
_BEGINNINGS: Final = ('{\n "a', '{\n "g')  # accounts or at_peak; with several runs gpuprobe


def dumps(baseline: Baseline) -> str:
    """The baseline as reviewable JSON, ASCII only."""
    return rendered({**header(SCHEMA, VERSION), **plain_of(baseline)})


def plain_of(baseline: Baseline) -> dict[str, object]:
    """A baseline as plain data, without the file's header."""
    writer = _Writer(baseline)
    peak = baseline.accounts.get(PEAK, Account(0))
    document: dict[str, object] = {
        "environment": dict(baseline.environment),
        "steps": baseline.steps,
        "metrics": {
            name: _amount(value, METRICS[name][0]) for name, value in baseline.metrics.items()
        },
        "tolerance": {
            name: {"relative": tolerance.relative, "absolute": tolerance.absolute}
            for name, tolerance in (baseline.tolerances or {}).items()
        },
        "phases": {name: _size(value) for name, value in baseline.phases.items()},
        "at_peak": {
            "categories": _plain_shares(peak.categories),
            "modules": _plain_shares(peak.modules),
            "lines": writer.lines(peak),
        },
        "accounts": writer.accounts(),
        "paths": writer.paths,
        "places": writer.places(),
        "sources": {
            name: {"statements": source.encode()} for name, source in baseline.sources.items()
        },
    }
    if baseline.files:
        document["files"] = {
            name: {
                "digest": kept.digest,
                **({} if kept.text is None else {"text": _packed(kept.text)}),
            }
            for name, kept in baseline.files.items()
        }
    if baseline.stopped_after is not None:
        document["stopped_after"] = baseline.stopped_after
    if baseline.command:
        document["command"] = list(baseline.command)
    return document


def _size(value: int) -> dict[str, object]:
    return {"bytes": value, "text": human_bytes(value)}


def _amount(value: int, unit: str) -> dict[str, object]:
    """An amount in its unit; with a text where that is easier to read."""
    return {unit: value} if unit == "count" else {unit: value, "text": amount(value, unit)}


class _Chunks(list[str]):
    """A long string in pieces, each on its own line."""


def _packed(text: str) -> _Chunks:
    """A text compressed with bzip2, which has one implementation: equal texts give equal
    results."""
    data = text.encode("utf-8", "surrogateescape")
    word = base64.b64encode(bz2.compress(data)).decode("ascii")
    return _Chunks(word[at : at + _WIDTH] for at in range(0, len(word), _WIDTH))


def _unpacked(chunks: list[str]) -> str:
    """The text that `_packed` compressed. Raises Malformed if it is damaged or too long."""
    reader = bz2.BZ2Decompressor()
    try:
        data = reader.decompress(base64.b64decode("".join(chunks), validate=True), _MOST_TEXT)
    except (OSError, EOFError) as error:
        raise Malformed(f"the text is damaged: {error}") from None
    if not reader.eof:
        raise Malformed(f"the text is damaged, or of more than {human_bytes(_MOST_TEXT)}")
    return data.decode("utf-8", "surrogateescape")


def _plain_shares(rows: Iterable[Share[str]]) -> dict[str, object]:
    return {row.key: {**_size(row.bytes), "blocks": row.blocks} for row in rows}


class _Writer:
    """Writes the lines of one baseline by their labels. ``paths``: the calls that led to each line,
    as a tree: each node has a line and the node that called it.
    """

    def __init__(self, baseline: Baseline) -> None:
        self._accounts = baseline.accounts
        self.paths: dict[str, dict[str, str]] = {}
        lines = [line for account in baseline.accounts.values() for line in account.lines]
        keys = {key for line in lines for path, _ in line.call_paths for key in path}
        keys.update(line.key for line in lines)
        self._labels = {**labels_of(keys, baseline.sources), **baseline.labels}

    def lines(self, account: Account) -> dict[str, object]:
        if account.unit != "bytes":
            return {
                self._name(line.key): _amount(line.bytes, account.unit) for line in account.lines
            }
        return {
            self._name(line.key): {
                **_size(line.bytes),
                "blocks": line.blocks,
                **_plain_categories(line),
                **_plain_needs(line),
                **({"until": line.until} if line.until else {}),
                **({"path": paths} if (paths := self._call_paths(line)) else {}),
            }
            for line in account.lines
        }

    def _name(self, key: str) -> str:
        return self._labels[key].text

    def _call_paths(self, line: LineShare) -> str:
        """One path, or several with their bytes: ``k3Fx9a 1024, Qz81bB 512``."""
        found = [(self._path(path), size) for path, size in line.call_paths]
        if len(found) == 1:
            return found[0][0]
        return ", ".join(f"{path} {size}" for path, size in found)

    def _path(self, call_path: tuple[str, ...]) -> str:
        outer = ""
        for key in reversed(call_path):
            row = {"line": self._name(key), **({"caller": outer} if outer else {})}
            outer = digest(f"{row['line']}\0{outer}", 6)
            self.paths[outer] = row
        return outer

    def places(self) -> dict[str, object]:
        """The position of each line, and the functions that it calls."""
        calls = {
            line.key: line.calls
            for account in self._accounts.values()
            for line in account.lines
            if line.calls
        }
        return {
            label.text: {
                **({"calls": calls[key]} if key in calls else {}),
                **({"at": label.at} if label.at else {}),
            }
            for key, label in self._labels.items()
            if label.at or key in calls
        }

    def accounts(self) -> dict[str, object]:
        """All accounts except the peak's. One that equals an earlier one only refers to that."""
        found: dict[str, object] = {}
        written: list[tuple[str, dict[str, object]]] = []
        if PEAK in self._accounts:
            written.append((PEAK, self.lines(self._accounts[PEAK])))
        for name in sorted(self._accounts):
            account = self._accounts[name]
            if name == PEAK:
                continue
            rows = self.lines(account)
            same = next((other for other, lines in written if lines and lines == rows), None)
            total = _amount(account.total, account.unit)
            if same is not None:
                found[name] = {"total": total, "same_as": same}
            else:
                found[name] = {"total": total, "lines": rows}
                written.append((name, rows))
        return found


def _plain_categories(line: LineShare) -> dict[str, object]:
    """One category, or several with their bytes: ``activation 1024, temporary 512``."""
    if not line.categories or line.categories == (("unknown", line.bytes),):
        return {}
    if len(line.categories) == 1:
        return {"category": line.category}
    return {"category": ", ".join(f"{name} {size}" for name, size in line.categories)}


def _plain_needs(line: LineShare) -> dict[str, object]:
    """One need, or several with their bytes, as `_plain_categories`."""
    if len(line.needs) == 1:
        return {"need": line.needs[0][0]}
    return {"need": ", ".join(f"{name} {size}" for name, size in line.needs)} if line.needs else {}


def _needs(text: str) -> tuple[tuple[str, int | None], ...]:
    """What `_plain_needs` wrote. Raises ValueError for a need that does not exist."""
    parts = _parts(text)
    for name, _ in parts:
        Need(name)
    return parts


def _parts(text: str) -> tuple[tuple[str, int | None], ...]:
    """The names and bytes that `_plain_categories` or `_Writer._call_paths` wrote."""
    if not text or " " not in text:
        return ((text, None),) if text else ()
    pairs = (part.rpartition(" ") for part in text.split(", "))
    return tuple((name, int(number)) for name, _, number in pairs)


def rendered(document: dict[str, object]) -> str:
    """A document as JSON text that people review."""
    return "".join(_rendered(document)) + "\n"


def _rendered(value: object, depth: int = 0) -> Iterator[str]:
    """JSON with sorted keys; an object without nested objects is one line."""
    if isinstance(value, _Chunks):
        lines = (f"\n{' ' * (depth + 1)}{json.dumps(chunk)}" for chunk in value)
        yield f"[{','.join(lines)}\n{' ' * depth}]"
        return
    if not isinstance(value, dict) or not any(
        isinstance(part, (dict, _Chunks)) for part in value.values()
    ):
        yield json.dumps(value, sort_keys=True, ensure_ascii=True)
        return
    pad = " " * (depth + 1)
    yield "{"
    for index, key in enumerate(sorted(value)):
        yield f"{',' if index else ''}\n{pad}{json.dumps(key, ensure_ascii=True)}: "
        yield from _rendered(value[key], depth + 1)
    yield f"\n{' ' * depth}}}"


# -- reading


def loads(text: str, where: str = "the baseline") -> Baseline:
    """Read a baseline that `dumps` wrote. Raises DataError for anything else, UnsupportedSchema for
    a newer major version.
    """
    document, version = parsed(text, where)
    if document["schema"] != SCHEMA:
        raise _not_a_baseline(where)
    return baseline_from(document, where, newer=version > VERSION)


def parsed(text: str, where: str) -> tuple[dict[str, object], tuple[int, int]]:
    """The document of one baseline, or of several runs, and its version. Raises like `loads`."""
    try:
        if CONFLICT.search(text):
            raise DataError(
                f"{where} has merge conflicts",
                hint="run gpuprobe baseline update to rewrite it with the tolerances of both sides",
            )
        document = json.loads(text)
        newest = {SCHEMA: VERSION, RUNS_SCHEMA: RUNS_VERSION}
        if not isinstance(document, dict) or document.get("schema") not in newest:
            raise _not_a_baseline(where)
        return document, check_version(document, newest[document["schema"]], where, hint=_HINT)
    except (TypeError, ValueError, RecursionError) as error:
        if not _may_be_baseline(text):
            raise _not_a_baseline(where) from None
        raise DataError(f"{where} is damaged: {error}", hint=_HINT) from error


def baseline_from(plain: object, where: str, *, newer: bool) -> Baseline:
    """The baseline that `plain_of` wrote. ``newer``: the file has a newer minor version."""
    decoded = from_plain(_BaselineDocument, plain, f"{where} is damaged", hint=_HINT)
    try:
        return _baseline(decoded, where, newer=newer)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is damaged: {error}", hint=_HINT) from error


def _not_a_baseline(where: str) -> DataError:
    return DataError(
        f"{where} is not a gpuprobe baseline",
        hint="choose another file; gpuprobe baseline update creates a baseline",
    )


def _may_be_baseline(text: str) -> bool:
    """Whether a text is a (truncated) baseline. Only then may a hint suggest to delete the file: it
    may be a source file.
    """
    return SCHEMA in text or any(
        text.startswith(begin) or begin.startswith(text) for begin in _BEGINNINGS
    )


_Whole = Annotated[int, Bounds(0, (1 << 63) - 1)]
_Signed = Annotated[int, Bounds(1 - (1 << 63), (1 << 63) - 1)]  # growth may be below 0


@dataclass(frozen=True)
class _Amount:
    """An amount: ``bytes``, the ``count`` of a metric that counts, or nanoseconds (``ns``)."""

    bytes: _Signed | None = None
    count: _Signed | None = None
    ns: _Signed | None = None

    def __post_init__(self) -> None:
        if self.bytes is None and self.count is None and self.ns is None:
            raise Malformed("'bytes' is missing")

    @property
    def value(self) -> int:
        if self.bytes is not None:
            return self.bytes
        return self.count or 0 if self.ns is None else self.ns

    @property
    def unit(self) -> str:
        if self.bytes is not None:
            return "bytes"
        return "count" if self.ns is None else "ns"


@dataclass(frozen=True)
class _Size(_Amount):
    bytes: _Whole | None = None
    count: _Whole | None = None
    ns: _Whole | None = None


@dataclass(frozen=True)
class _Line(_Amount):
    """A line of an account."""

    blocks: _Signed = 0
    category: Annotated[tuple[tuple[str, int | None], ...], Parsed(str, _parts)] = ()
    need: Annotated[tuple[tuple[str, int | None], ...], Parsed(str, _needs)] = ()
    until: str = ""
    path: Annotated[tuple[tuple[str, int | None], ...], Parsed(str, _parts)] = ()


@dataclass(frozen=True)
class _PartOfPeak:
    bytes: _Signed
    blocks: _Signed


@dataclass(frozen=True)
class _AccountRow:
    total: _Amount
    lines: dict[str, _Line] = field(default_factory=dict)
    same_as: str = ""


@dataclass(frozen=True)
class _AtPeak:
    lines: dict[str, _Line]
    categories: dict[str, _PartOfPeak]
    modules: dict[str, _PartOfPeak]


@dataclass(frozen=True)
class _Position:
    calls: str = ""
    at: str = ""


@dataclass(frozen=True)
class _Call:
    """A node of a call path. ``caller``: the path of its caller, empty for the outermost."""

    line: str
    caller: str = ""


@dataclass(frozen=True)
class _Digests:
    """The digests of a file, as `Source.encode` writes them."""

    statements: str


@dataclass(frozen=True)
class _File:
    digest: str
    text: Annotated[str, Parsed(list[str], _unpacked)] | None = None


@dataclass(frozen=True)
class _Accepted:
    relative: Annotated[float, Bounds(0, 1e6)] = 0.0
    absolute: _Whole = 0


@dataclass(frozen=True)
class _BaselineDocument:
    """The document that `dumps` writes, without the texts for human readers."""

    environment: dict[str, str]
    steps: _Whole
    metrics: dict[str, _Size]
    phases: dict[str, _Size]
    at_peak: _AtPeak
    tolerance: dict[str, _Accepted] = field(default_factory=dict)
    accounts: dict[str, _AccountRow] = field(default_factory=dict)
    places: dict[str, _Position] = field(default_factory=dict)
    paths: dict[str, _Call] = field(default_factory=dict)
    sources: dict[str, _Digests] = field(default_factory=dict)
    stopped_after: _Whole | None = None
    command: list[str] = field(default_factory=list)
    files: dict[str, _File] = field(default_factory=dict)


def _baseline(document: _BaselineDocument, where: str, *, newer: bool) -> Baseline:
    for name in document.tolerance:
        if name not in METRICS and not newer:
            problem = unknown_key(name, METRICS)
            raise DataError(f"{where}: tolerance: {problem}", hint=problem.hint)
    reader = _Reader(document)
    return Baseline(
        environment=dict(document.environment),
        steps=document.steps,
        metrics={name: row.value for name, row in document.metrics.items() if name in METRICS},
        phases={name: row.value for name, row in document.phases.items()},
        accounts=reader.accounts(),
        tolerances={
            name: Tolerance(row.relative, row.absolute)
            for name, row in document.tolerance.items()
            if name in METRICS
        },
        stopped_after=document.stopped_after,
        sources=reader.sources,
        labels=reader.labels(),
        command=tuple(document.command),
        files={name: KeptFile(row.digest, row.text) for name, row in document.files.items()},
    )


class _Reader:
    """Reads the lines of a document, by their places."""

    def __init__(self, document: _BaselineDocument) -> None:
        self._document = document
        self.sources = {name: decode(row.statements) for name, row in document.sources.items()}
        self._keys = {
            text: place_of(text, row.at, self.sources)
            for text, row in document.places.items()
            if row.at
        }
        self._calls = {text: row.calls for text, row in document.places.items()}
        self._call_paths: dict[str, tuple[str, ...]] = {"": ()}

    def labels(self) -> dict[str, Label]:
        return {
            self._keys[text]: Label(text, row.at)
            for text, row in self._document.places.items()
            if row.at
        }

    def accounts(self) -> dict[str, Account]:
        at_peak = self._document.at_peak
        found: dict[str, Account] = {}
        if at_peak.lines or at_peak.categories or at_peak.modules:
            lines = self._lines(at_peak.lines)
            total = sum(line.bytes for line in lines)
            shares = _shares(at_peak.categories), _shares(at_peak.modules)
            found[PEAK] = Account(total, lines, *shares)
        rest = self._document.accounts
        for name in sorted(rest, key=lambda name: (bool(rest[name].same_as), name)):
            row = rest[name]
            if row.same_as and row.same_as not in found:
                raise Malformed(
                    f"accounts[{name!r}] is the same as {row.same_as!r}, which is missing"
                )
            lines = found[row.same_as].lines if row.same_as else self._lines(row.lines)
            found[name] = Account(row.total.value, lines, unit=row.total.unit)
        return found

    def _lines(self, rows: Mapping[str, _Line]) -> tuple[LineShare, ...]:
        found = []
        for text, row in rows.items():
            key, calls = self._keys.get(text, text), self._calls.get(text, "")
            if row.unit != "bytes":
                found.append(LineShare(key, row.value, row.value, calls=calls))
                continue
            # A single category is written without bytes, which are the line's. So is a single path.
            categories = tuple(
                (name, row.value if size is None else size)
                for name, size in row.category or (("unknown", None),)
            )
            paths = tuple(
                (self._call_path(path), row.value if size is None else size)
                for path, size in row.path
            )
            needs = tuple((name, row.value if size is None else size) for name, size in row.need)
            found.append(
                LineShare(
                    key,
                    row.value,
                    row.blocks,
                    categories,
                    row.until,
                    calls,
                    call_paths=paths,
                    needs=needs,
                )
            )
        return tuple(sorted(found, key=lambda line: (-line.bytes, line.key)))

    def _call_path(self, path: str) -> tuple[str, ...]:
        """The places of a path, innermost first."""
        chain: list[tuple[str, str]] = []
        at = path
        while at not in self._call_paths:
            call = self._document.paths.get(at)
            if call is None:
                raise Malformed(f"there is no path {at!r}")
            if len(chain) > _DEEPEST:
                raise Malformed(f"path {path!r} has no end")
            chain.append((at, self._keys.get(call.line, call.line)))
            at = call.caller
        for inner, key in reversed(chain):
            self._call_paths[inner] = (key, *self._call_paths[at])
            at = inner
        return self._call_paths[path]


def _shares(rows: Mapping[str, _PartOfPeak]) -> tuple[Share[str], ...]:
    found = [Share(key, row.bytes, row.blocks) for key, row in rows.items()]
    return tuple(sorted(found, key=lambda share: (-share.bytes, share.key)))


UNNAMED: Final = ""
"""The name of the run of a file with one baseline."""

NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Valid names of runs: they appear in reports, on command lines and in names of test cases."""


def dumps_runs(runs: Mapping[str, Baseline]) -> str:
    """The text of a file with these baselines, by the names of their runs."""
    if set(runs) == {UNNAMED}:
        return dumps(runs[UNNAMED])
    plain = {name: plain_of(baseline) for name, baseline in runs.items()}
    return rendered({**header(RUNS_SCHEMA, RUNS_VERSION), "runs": plain})


def loads_runs(text: str, where: str = "the baseline") -> dict[str, Baseline]:
    """Read the baselines that `dumps_runs` or `dumps` wrote. Raises DataError for anything else,
    UnsupportedSchema for a newer major version.
    """
    document, version = parsed(text, where)
    if document["schema"] != RUNS_SCHEMA:
        return {UNNAMED: loads(text, where)}
    runs: dict[str, object] = from_plain(
        dict[str, Any], document.get("runs"), f"{where} is damaged: runs"
    )
    wrong = next((name for name in runs if not NAME.fullmatch(name)), None)
    if wrong is not None or not runs:
        raise DataError(f"{where} is damaged: runs: {wrong!r:.80} is no name of a run")
    newer = version > RUNS_VERSION
    return {
        name: baseline_from(plain, f"{where}: {name}", newer=newer) for name, plain in runs.items()
    }


def merged_tolerances(text: str) -> dict[str, dict[str, Tolerance]] | None:
    """The tolerances of both sides of a file with merge conflicts, by run; the smaller one if they
    differ. None if there is no conflict, or if a side cannot be read.
    """
    if not CONFLICT.search(text):
        return None
    found: dict[str, dict[str, Tolerance]] = {}
    for side in (0, 1):
        lines, here = [], 0
        for line in text.splitlines():
            if line.startswith("<<<<<<<"):
                here = 1
            elif line.startswith("|||||||"):
                here = 3  # the common ancestor, in git's diff3 style
            elif line.startswith("=======") and here:
                here = 2
            elif line.startswith(">>>>>>>"):
                here = 0
            elif here in (0, side + 1):
                lines.append(line)
        try:
            runs = loads_runs("\n".join(lines))
        except DataError:
            return None
        for run, baseline in runs.items():
            known = found.setdefault(run, {})
            for name, tolerance in (baseline.tolerances or {}).items():
                other = known.get(name, tolerance)
                known[name] = min(other, tolerance, key=lambda t: (t.relative, t.absolute))
    return found
