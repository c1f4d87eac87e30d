"""Estimates: of a training run, of the largest value that fits, and of an inference server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from gpuprobe.analysis.repeats import RepeatedShare, share_groups
from gpuprobe.model.place import Place, parse_place
from gpuprobe.model.plans.estimate import (
    MAY_NEED_MORE,
    Estimate,
    EstimatedChange,
    EstimateShare,
    RoomyGpu,
)
from gpuprobe.model.plans.fit import Fit, Trial
from gpuprobe.model.plans.serving import ServingEstimate, ServingFit, ServingTrial
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.report import ShareRow
from gpuprobe.model.text import human_bytes, plural
from gpuprobe.reporters.sections.parts import (
    AUTO,
    Cell,
    Code,
    Column,
    Line,
    Part,
    Row,
    Section,
    Table,
    bulleted,
    named,
    size,
)
from gpuprobe.reporters.sections.report.steps import communication_section
from gpuprobe.reporters.sections.step_time import (
    counted_in,
    short_step_time,
    speed_cells,
    speed_columns,
    speed_notes,
    speed_text,
    step_time_sections,
)

_EVIDENCE: Final = "evidence: torch's own CUDA code, on a simulated GPU"


def estimate_sections(estimate: Estimate, top: int = 8, *, full: bool = True) -> list[Section]:
    """The estimate. ``top``: rows of each table; the other rows are summed. Without ``full``, what
    fits on a screen: the verdict, causes, the peak and the time; and what ``--verbose`` adds.
    """
    if not full:
        return _short(estimate, min(top, _FEW))
    tables = [*_shares_at_peak(estimate, top)]
    if estimate.causes:
        tables.insert(0, _not_needed(estimate, len(estimate.causes)))
    if len(estimate.phases) > 1:
        tables.append(Section("Peak of each phase", (_phases(estimate),), "phases"))
    tables = [*_several(estimate), *tables]
    if estimate.communication:
        tables.append(
            communication_section("Communication in the last step", estimate.communication, top)
        )
    tables += step_time_sections(
        estimate.step_time, top, full=full, cost=estimate.cost, ranks=estimate.ranks
    )
    listed = (
        ("Compiled", estimate.compiled),
        ("Assumed", estimate.assumed),
        ("Not modelled", estimate.not_modelled),
    )
    lists = (Section(name, bulleted(texts)) for name, texts in listed if texts)
    return [
        _estimate_summary(estimate),
        *tables,
        *lists,
        *_estimate_suggestions(estimate),
        Section(f"{_verdict(estimate)}{_best_change(estimate)}", name="verdict"),
    ]


_FEW: Final = 3
"""Rows of each table of a short estimate."""
_FEW_CAUSES: Final = 1


def _short(estimate: Estimate, top: int) -> list[Section]:
    """The estimate on one screen."""
    sections = [
        Section(
            f"{_verdict(estimate)}{_best_change(estimate)}",
            (_needed(estimate), *_estimate_notes(estimate, full=False)),
        ),
    ]
    if estimate.causes:
        sections.append(_not_needed(estimate, _FEW_CAUSES))
    elif estimate.growth_advice:
        sections.append(_growth_section(estimate))
    sections += _several(estimate)
    sections += [*_shares_at_peak(estimate, top)][:2]
    if estimate.fits:
        sections += short_step_time(estimate.step_time, cost=estimate.cost, ranks=estimate.ranks)
    sections += _suggested(estimate, few=True)
    of_lines = [text for text in estimate.assumed if _is_about_a_line(text)]
    if of_lines:  # the program may take another way there
        sections.append(Section("Assumed", bulleted(of_lines)))
    others = len(estimate.causes) - _FEW_CAUSES
    more = [
        *(["modules, phases"] if estimate.by_module else []),
        *(["time"] if isinstance(estimate.step_time, StepTime) else []),
        *(["communication"] if estimate.communication else []),
        *([plural(others, "cause")] if others > 0 else []),
        plural(len(estimate.assumed) + len(estimate.not_modelled), "assumption"),
        *([f"{len(estimate.not_tried)} not tried"] if estimate.not_tried else []),
    ]
    sections.append(Section(parts=(Line(f"more with -v: {', '.join(more)}", indent=0),)))
    return sections


def _is_about_a_line(text: str) -> bool:
    """Whether an assumption begins with a line, of the program or of what it calls."""
    place = parse_place(text.partition(": ")[0].partition(" (called at ")[0])
    return isinstance(place, Place) and bool(place.file)


def _shares_at_peak(estimate: Estimate, top: int) -> Iterator[Section]:
    at = "at the peak"
    if estimate.attributed != estimate.peak_allocated:
        below = human_bytes(estimate.peak_allocated - estimate.attributed)
        at = f"at the highest traced instant, {below} below the peak"
    for title, shares in (
        ("Categories", estimate.by_category),
        ("Lines", estimate.by_line),
        ("Modules", estimate.by_module),
    ):
        yield Section(f"{title} {at}", (_shares(title, shares, estimate.attributed, top),))


def _several(estimate: Estimate) -> list[Section]:
    """Of several ranks, and several GPUs."""
    ranks = [_ranks(estimate)] if estimate.by_rank else []
    return [*ranks, *([_devices(estimate)] if estimate.by_device else [])]


def _not_needed(estimate: Estimate, most: int) -> Section:
    """The memory that the run does not need, with the remedies: of ``most`` causes."""
    parts: list[Part] = []
    for cause in estimate.causes[:most]:
        parts.append(Line(cause.sentence, "numbered", code=True))
        parts.append(Line(cause.remedy, label="fix", indent=5))
        if cause.code:
            parts.append(Code(cause.code))
        parts.append(Line(cause.saves, label="saves", indent=5))
    return Section("Memory that is not needed", tuple(parts), "causes")


def _phases(estimate: Estimate) -> Table:
    columns = (Column("bytes", 10, number=True), Column("phase", 0, gap=2))
    rows = tuple(Row((size(one.allocated), one.phase)) for one in estimate.phases)
    return Table("peak by phase", columns, rows, header=False)


def _verdict(estimate: Estimate) -> str:
    """The outcome in one line."""
    same = len({row.gpu for row in estimate.by_device}) <= 1
    several = f"{estimate.devices} x " if estimate.devices > 1 and same else ""
    total = _span(estimate.total_low, estimate.total_high)
    of = f"{total} of {human_bytes(estimate.capacity)}"
    result = estimate.verdict
    grows = ""
    if estimate.growth:
        grows = f"; memory grows by {human_bytes(estimate.growth)} a step"
        if estimate.fits:
            result += f" for {plural(estimate.steps, 'step')}"
            grows += f", and the GPU is full in about {estimate.steps_until_full} more"
    rank = rest = ""
    if estimate.ranks > 1 and not estimate.by_rank:
        rank = f"rank {estimate.rank} of {estimate.ranks} on "
        rest = "; other ranks may need more (--rank distinct)"
    return f"{rank}{several}{estimate.gpu}: {result} ({of}){grows}{rest}"


def _best_change(estimate: Estimate) -> str:
    """The easiest change with which it fits, as a clause after the verdict; "" without one, or if
    memory grows, which no change of the kind ends.
    """
    if estimate.growth:
        return ""
    best = next((one for one in estimate.suggestions if one.fits), None)
    return "" if best is None else f"; with {best.name} it fits ({human_bytes(best.needed)})"


def _growth_section(estimate: Estimate) -> Section:
    first = "" if estimate.fits else ": change this first"
    texts = bulleted(estimate.growth_advice)
    return Section(f"Memory grows from step to step{first}", texts, "growth")


def _estimate_suggestions(estimate: Estimate) -> list[Section]:
    """The changes that were tried, and the GPUs that hold the run as it is."""
    sections = [_growth_section(estimate)] if estimate.growth_advice else []
    sections += _suggested(estimate)
    if estimate.not_tried:
        at = next((n for n, one in enumerate(sections) if one.name == "gpus"), len(sections))
        sections.insert(at, Section("Not tried", bulleted(estimate.not_tried)))
    return sections


def _suggested(estimate: Estimate, *, few: bool = False) -> list[Section]:
    """The changes that were tried, and the GPUs that hold the run as it is; of both a ``few``."""
    fits = any(one.fits for one in estimate.suggestions)

    def helps(one: EstimatedChange) -> bool:
        return one.fits if fits else one.needed < estimate.total_high

    found: list[Section] = []
    if estimate.suggestions:
        run = plural(estimate.steps, "step") if estimate.growth else "it"
        title = f"What would make {run} fit" if fits else "What would help, but is not enough"
        tried = plural(len(estimate.suggestions), "change")
        text = f"{tried} tried, each by an estimate of the changed run"
        shown = [one for one in estimate.suggestions if fits or helps(one)]
        useless = [one.name for one in estimate.suggestions if one not in shown]
        if useless:
            text += f"; of no help: {', '.join(useless)}"
        if few:
            shown = [one for one in shown if helps(one)][:_FEW]
        table = (_changes(shown, helps),) if shown else ()
        found.append(Section(title, (*table, Line(text)), "suggestions"))
    if estimate.smallest_gpus:
        title = "The smallest GPUs that hold it as it is"
        if estimate.growth:
            title = f"The smallest GPUs that hold {plural(estimate.steps, 'step')}"
        gpus = estimate.smallest_gpus[: _FEW if few else None]
        found.append(Section(title, (_gpus(gpus),), "gpus"))
    return found


def _changes(changes: Iterable[EstimatedChange], helps: Callable[[EstimatedChange], bool]) -> Table:
    """The changes, with what to write for those that help."""
    rows = [
        Row((one.name, size(one.needed), one.verdict), note=one.how if helps(one) else "")
        for one in changes
    ]
    columns = (
        Column("change", AUTO, cut=False),
        Column("needs", 10, gap=2, number=True),
        Column("", 0, gap=2, cut=False),
    )
    return Table("changes", columns, tuple(rows), note_indent=6)


def _gpus(gpus: Sequence[RoomyGpu]) -> Table:
    columns = (
        Column("GPU", AUTO),
        Column("needs up to", 11, gap=2, number=True),
        Column("of", 10, gap=2, number=True),
        Column("", 0, gap=2),
    )
    rows = tuple(
        Row(
            (
                one.gpu,
                size(one.needed),
                size(one.capacity),
                "estimated there" if one.estimated else "from the need above",
            )
        )
        for one in gpus
    )
    return Table("GPUs", columns, rows)


def _estimate_summary(estimate: Estimate) -> Section:
    """The verdict, the table of memory that is needed, and how it was estimated."""
    return Section(_verdict(estimate), (_needed(estimate), *_estimate_notes(estimate)))


def _needed(estimate: Estimate) -> Table:
    """The memory that the run needs, by who holds it."""
    nccl = (
        "NCCL's buffers",
        _span(estimate.nccl_low, estimate.nccl_high),
        "outside the allocator; 0 if NCCL keeps them in host memory",
    )
    started = (
        "other processes",
        _span(estimate.processes_low, estimate.processes_high),
        f"started by the program, at most {estimate.processes} at one time, each with a context",
    )
    allocated = max(estimate.peak_allocated, estimate.allocated_high)
    least = estimate.allocated_low or estimate.peak_allocated
    rows = (
        ("peak allocated", _span(least, allocated), "by tensors, with rounding"),
        (
            "peak reserved",
            _span(estimate.reserved_low, estimate.reserved_high),
            "held by torch's caching allocator",
        ),
        (
            "CUDA context",
            _span(estimate.context_low, estimate.context_high),
            "and its libraries, outside the allocator",
        ),
        *((nccl,) if estimate.nccl_high else ()),
        *((started,) if estimate.processes else ()),
    )
    columns = (
        Column("", 15),
        Column("", AUTO, gap=1, number=True),
        Column("", 0, gap=2, cut=False),
    )
    return Table("what it needs", columns, tuple(map(Row, rows)))


def _estimate_notes(estimate: Estimate, *, full: bool = True) -> list[Line]:
    """How the estimate was made."""
    notes = [plural(estimate.steps, "training step") if estimate.steps else "no training step"]
    if estimate.ranks > 1:
        worst = ", which needs most" if estimate.by_rank else ""
        notes.append(f"rank {estimate.rank} of {estimate.ranks}{worst}")
    if estimate.torch:
        notes.append(f"torch {estimate.torch}")
    if estimate.settings:
        notes.append(estimate.settings)
    lines = [Line(", ".join(notes)), *([Line(_EVIDENCE)] if full else [])]
    if not full:
        lines += [Line(text) for text in estimate.assumed if MAY_NEED_MORE in text]
    if estimate.model:
        lines.insert(0, Line(f"{estimate.model} (--write-script FILE keeps the script)", "item"))
    if estimate.no_kernels:
        text = f"{estimate.no_kernels}: on that GPU it needs another build of torch"
        lines.insert(0, Line(text, "alert"))
    if estimate.verdict_why:
        lines.insert(0, Line(f"{estimate.verdict}: {estimate.verdict_why}"))
    if estimate.compute_why and (full or estimate.compute != "real"):
        computed = "computed" if estimate.compute == "real" else "not computed"
        lines.append(Line(f"values of large tensors: {computed} ({estimate.compute_why})"))
        if full and estimate.compute != "real":
            lines.append(Line("nan in the script's output: a number that was not computed"))
    return lines


def _devices(estimate: Estimate) -> Section:
    """A row for each GPU of the process, with its largest categories at its own peak."""
    columns = (
        Column("device", 8),
        Column("GPU", AUTO, gap=1),
        Column("allocated", 10, gap=2, number=True),
        Column("reserved", 10, gap=2, number=True),
        Column("with context", AUTO, gap=2, number=True),
        Column("of", 10, gap=2, number=True),
        Column("", 0, gap=2, cut=False),
    )
    rows = []
    for row in estimate.by_device:
        shares = sorted(row.by_category, key=lambda share: (-share.bytes, share.name))
        most = ", ".join(f"{named(one.name)} {human_bytes(one.bytes)}" for one in shares[:_MOST])
        rows.append(
            Row(
                (
                    row.device,
                    row.gpu,
                    size(row.peak_allocated),
                    size(row.peak_reserved),
                    Cell(_span(row.total_low, row.total_high), row.total_high),
                    size(row.capacity),
                    row.verdict,
                ),
                note=most,
            )
        )
    text = "Devices, of which the one with the least room is shown below"
    return Section(text, (Table("devices", columns, tuple(rows), note_indent=2),))


_MOST: Final = 6
"""Categories in the row of a device."""


def _ranks(estimate: Estimate) -> Section:
    """A row for each rank that was estimated."""
    alike = any(row.alike for row in estimate.by_rank)
    columns = (
        Column("rank", 6, number=True),
        Column("allocated", 10, gap=2, number=True),
        Column("reserved", 10, gap=2, number=True),
        Column("with context", AUTO, gap=2, number=True),
        *((Column("alike", AUTO, gap=2),) if alike else ()),
        Column("", 0, gap=2, cut=False),
    )
    rows = tuple(
        Row(
            (
                str(row.rank),
                size(row.peak_allocated),
                size(row.peak_reserved),
                Cell(_span(row.total_low, row.total_high), row.total_high),
                *((row.alike,) if alike else ()),
                row.verdict,
            )
        )
        for row in estimate.by_rank
    )
    return Section("Ranks", (Table("ranks", columns, rows),))


def _span(low: int, high: int) -> str:
    if human_bytes(low) == human_bytes(high):
        return human_bytes(high)
    return f"{human_bytes(low)} to {human_bytes(high)}"


def _shares(title: str, shares: Sequence[EstimateShare], total: int, top: int) -> Table:
    """A table of bytes, shares and names; lines and modules that repeat are one row."""
    rows = [ShareRow(share.name, share.bytes, None) for share in shares]
    by = {"Lines": "line", "Modules": "module"}.get(title, "")
    groups = share_groups(sorted(rows, key=lambda row: str(row.key)), by)

    def row(amount: int, name: Cell | str, members: Iterable[Row] = ()) -> Row:
        part = amount / total if total else 0.0
        return Row((size(amount), Cell(f"{part:.1%}", part), name), members=tuple(members))

    def group_row(group: RepeatedShare) -> Row:
        several = group.members if len(group.members) > 1 else ()
        name = Cell(named(group.name), place=True, times=len(group.members))
        members = (row(one.bytes, Cell(named(one.key), place=True)) for one in several)
        return row(group.sum.bytes, name, members)

    foot = [Row((size(total), "", "total"))]
    more = [one for group in groups[top:] for one in group.members]
    if sum(one.bytes for one in more):
        foot.insert(0, row(sum(one.bytes for one in more), f"({len(more)} more)"))
    columns = (
        Column("bytes", 10, number=True),
        Column("share", 6, gap=1, number=True),
        Column("name", 0, gap=2, cut=False),
    )
    shown = tuple(map(group_row, groups[:top]))
    return Table(title.lower(), columns, shown, tuple(foot), header=False)


def fit_sections(fit: Fit) -> list[Section]:
    """The result of a search, changes that would help, and those that were not tried."""
    name, title = fit.argument, _fit_title(fit)
    parts: list[Part] = []
    if fit.proof is not None:
        parts.append(_trial(fit, fit.proof))
    elif fit.trials:
        parts.append(_trial(fit, fit.trials[0]))
    if fit.proof is not None and isinstance(fit.proof.time, StepTime):
        speed = speed_text(fit.proof.time, fit.ranks)
        parts.append(Line(f"a step with {name} {fit.proof.value}: {speed}"))
    if fit.proof is not None and fit.proof.no_kernels:
        parts.append(Line(fit.proof.no_kernels))
    if fit.beyond is not None:
        parts.append(_trial(fit, fit.beyond))
    elif fit.without_effect:
        value = f"with {name} {fit.without_effect[0]}"
        text = "a step gets as much data and needs as much memory; the data may have no more rows"
        parts.append(Line(f"{value}, {text}"))
    elif fit.largest == fit.most:
        parts.append(Line(f"larger values were not tried: the search ended at {fit.most}"))
    parts.append(Line(f"{len(fit.trials)} estimates; {name} was given {fit.applied}"))
    if fit.unusual:
        listed = ", ".join(map(str, fit.unusual))
        text = "a larger value does not always need more memory: "
        text += f"the need falls at {listed}; a larger value"
        parts.append(Line(f"{text} may fit too"))
    found = [Section(title, tuple(parts))]
    if fit.choices:
        of_all = " of all ranks" if any(one.ranks > 1 for one in fit.choices) else ""
        notes = speed_notes(counted_in(fit.choices), fit.choices) if _is_timed(fit) else []
        found.append(Section(f"Choices, by {name}{of_all}", (_choices(fit), *notes)))
    if fit.suggestions:
        at = fit.largest if fit.largest is not None else fit.least
        found.append(
            Section(f"What would help, estimated at {name} {at}", (_suggestions(fit),))
        )  # fmt: skip
    if fit.not_tried:
        found.append(Section("Not tried", bulleted(fit.not_tried)))
    return [*found, Section(title, name="verdict")]


def _fit_title(fit: Fit) -> str:
    name = fit.argument
    if fit.untried is not None:
        why = "interrupted" if fit.interrupted else "the time is over"
        first, last = fit.untried
        values = str(first) if first == last else f"{first} to {last}"
        so_far = "none" if fit.largest is None else fit.largest
        return (
            f"{fit.gpu}: {why}; largest {name} that fits so far: {so_far}, not yet tried: {values}"
        )
    if fit.largest is None:
        return f"{fit.gpu}: not even {name} {fit.least} fits"
    each = f" on each of {plural(fit.ranks, 'rank')}" if fit.ranks > 1 else ""
    if fit.without_effect:
        return f"{fit.gpu}: {name} {fit.largest} fits{each}; larger values have no effect"
    if fit.beyond is not None and fit.beyond.failed:
        found = f"{name} {fit.largest} is the largest that runs{each}"
        return f"{fit.gpu}: {found}, {fit.beyond.value} fails"
    return f"{fit.gpu}: {name} {fit.largest} is the largest that fits{each}"


def _choices(fit: Fit) -> Table:
    """A row for each GPU and number of ranks."""
    ranks = any(one.ranks > 1 for one in fit.choices)
    costs = any(one.cost is not None for one in fit.choices)
    timed = _is_timed(fit)
    columns = (
        Column("GPU", AUTO),
        *((Column("ranks", 6, gap=1, number=True),) if ranks else ()),
        Column(f"{fit.argument} of each" if ranks else fit.argument, AUTO, gap=2, number=True),
        *((Column("of all", 8, gap=1, number=True),) if ranks else ()),
        Column("needs", 10, gap=1, number=True),
        Column("of", 10, gap=1, number=True),
        *(speed_columns(counted_in(fit.choices), costs=costs) if timed else ()),
        Column("", 0, gap=2, cut=False),
    )
    rows = []
    for one in sorted(fit.choices, key=lambda one: (-one.total, bool(one.failed))):
        each, total = ("-", "-") if one.largest is None else (str(one.largest), str(one.total))
        largest = (str(one.ranks), each, total) if ranks else (each,)
        sizes = ("", "") if one.failed else (size(one.needed), size(one.capacity))
        no_speed = one.no_time if one.largest else f"not even {fit.least} fits"
        remark = one.failed or "; ".join(filter(None, (no_speed, one.no_kernels)))
        speed = speed_cells(one, costs=costs, ranks=one.ranks) if timed else ()
        rows.append(Row((one.gpu, *largest, *sizes, *speed, remark)))
    return Table("choices", columns, tuple(rows))


def _is_timed(fit: Fit) -> bool:
    return any(one.expected_ns for one in fit.choices)


def _suggestions(fit: Fit) -> Table:
    rows = []
    for one in fit.suggestions:
        saves, how = "saves nothing", ""
        if one.saved > 0:
            further = one.largest is not None and one.largest > (fit.largest or 0)
            more = f", then {fit.argument} {one.largest} fits" if further else ""
            saves, how = f"{human_bytes(one.saved)} less{more}", one.how
        rows.append(Row((one.name, size(one.after), saves), note=how))
    columns = (
        Column("change", 26),
        Column("needs", 10, gap=1, number=True),
        Column("", 0, gap=2, cut=False),
    )
    return Table("what would help", columns, tuple(rows), header=False, note_indent=6)


def _trial(fit: Fit, trial: Trial) -> Line:
    start = f"{fit.argument} {trial.value}:"
    if trial.failed:
        return Line(f"{start} {trial.failed}")
    needed = f"{human_bytes(trial.needed)} of {human_bytes(fit.capacity)}"
    return Line(f"{start} {trial.verdict}, needs up to {needed}")


_LINES = 6


def serving_sections(found: ServingEstimate) -> list[Section]:
    """A server's estimate: the verdict with the table, the lines at the activations' peak, and the
    assumptions.
    """
    verdict = "starts" if found.started else f"does not start: it fails {found.stage}"
    columns = (
        Column("", 19),
        Column("", AUTO, gap=1, number=True),
        Column("", 0, gap=2, cut=False),
    )
    table = Table("memory", columns, tuple(_rows(found)))
    settings = [f"vLLM {found.vllm}", f"torch {found.torch}"]
    if found.dtype:
        settings.append(found.dtype)
        settings += [f"quantization {found.quantization}"] if found.quantization else []
        settings.append(f"KV cache in {found.kv_cache_dtype}")
    if found.compile_cache:
        settings.append(f"compile cache {found.compile_cache}")
    lines = [Line(", ".join(settings)), Line(_EVIDENCE)]
    if found.unquantized:
        lines.insert(0, Line(found.unquantized, "alert"))
    if not found.started:
        lines.insert(0, Line(found.error, "alert"))
    sections = [Section(f"{found.gpu}: {verdict} ({found.command})", (table, *lines))]
    if found.advice:
        sections.append(Section("What would help", bulleted(found.advice)))
    if found.ranks:
        sections.append(_serving_ranks(found))
    if found.peak:
        sections.append(_peak(found))
    sections.append(Section("Assumed", bulleted(found.assumed)))
    return sections


def serving_fit_sections(fit: ServingFit) -> list[Section]:
    """The result of a search: the first start that came up, and a row for each start."""
    found = fit.found
    if found is None:
        title = f"does not start on any of these GPUs ({fit.command})"
        lines = [Line(fit.trials[-1].error, "alert")] if fit.trials else []
    else:
        title = f"{found.gpu}: starts ({' '.join([fit.command, *found.options])})"
        lines = []
        if fit.longest is not None:
            lines.append(Line(f"longest --max-model-len: {fit.longest:,} tokens"))
        if found.sequences is not None:
            text = f"sequences of {fit.tokens_each or found.max_model_len:,} tokens at one time"
            lines.append(Line(f"{text}: {found.sequences:,}"))
        else:
            lines.append(Line(f"sequences of {fit.tokens_each:,} tokens are longer than allowed"))
    columns = (
        Column("GPU", AUTO),
        Column("weights", AUTO, gap=2, number=True),
        Column("activations", AUTO, gap=2, number=True),
        Column("KV cache", AUTO, gap=2, number=True),
        Column("tokens", AUTO, gap=2, number=True),
        Column("length", AUTO, gap=2, number=True),
        Column("sequences", AUTO, gap=2, number=True),
        Column("added options", 0, gap=2, cut=False),
    )
    rows = tuple(_serving_trial(trial) for trial in fit.trials)
    starts = Section(f"{plural(len(rows), 'start')} of vLLM", (Table("starts", columns, rows),))
    return [Section(title, tuple(lines)), starts]


def _serving_trial(trial: ServingTrial) -> Row:
    counts = (trial.tokens, trial.max_model_len, trial.sequences)
    return Row(
        (
            trial.machine,
            *(
                Cell("–") if value is None else size(value)
                for value in (trial.weights, trial.activation, trial.kv_cache)
            ),
            *(Cell("–") if value is None else Cell(f"{value:,}", value) for value in counts),
            " ".join(trial.options) if trial.started else " ".join([*trial.options, "(fails)"]),
        )
    )


def _rows(found: ServingEstimate) -> list[Row]:
    rows = []

    def add(label: str, value: int | None, note: str) -> None:
        if value is not None:
            rows.append(Row((label, size(value), note)))

    share = f"{found.utilization:g} of" if found.utilization is not None else "of"
    add("requested", found.requested, f"{share} {human_bytes(found.capacity)}")
    add("weights", found.weights, "the model, as loaded")
    add("activation peak", found.activation, _prefill(found))
    add(
        "graphs, reserved",
        found.graphs_reserved,
        "for CUDA graphs, which the KV cache leaves free",
    )
    if found.non_torch is not None and found.non_torch_low is not None:
        span = f"{human_bytes(found.non_torch_low)} to {human_bytes(found.non_torch_high or 0)}"
        add("non-torch", found.non_torch, f"{span}: the CUDA context{_nccl(found)} and kernels")
    if found.blocks is not None and found.block_size is not None:
        text = f"{found.blocks:,} blocks of {found.block_size} tokens"
        if found.tokens is not None:
            text += f", {found.tokens:,} tokens"
        add("KV cache", found.kv_cache, text)
    else:
        add("KV cache", found.kv_cache, "")
    rows += _later(found)
    if found.graphs is not None:
        add(
            "CUDA graphs",
            found.graphs,
            f"{found.graphs_captured:,} graphs, with the driver's part",
        )
    add("left over", found.left, "of the whole GPU")
    if found.concurrency is not None and found.max_model_len is not None:
        text = f"requests of {found.max_model_len:,} tokens at one time"
        rows.append(Row(("concurrency", Cell(f"{found.concurrency:.2f}x"), text)))
    return rows


def _later(found: ServingEstimate) -> list[Row]:
    """The KV cache of a later start, if it has another one."""
    later = found.later
    if later is None:
        return []
    if later.kv_cache is None or not later.started:
        return [Row(("KV cache, later", Cell("–"), "a later start fails too"))]
    text = "" if later.tokens is None else f"{later.tokens:,} tokens "
    text += "in later starts, which do not compile"
    return [Row(("KV cache, later", size(later.kv_cache), text))]


def _nccl(found: ServingEstimate) -> str:
    return ", NCCL" if found.ranks else ""


def _prefill(found: ServingEstimate) -> str:
    if found.max_num_batched_tokens is None or found.max_num_seqs is None:
        return "of the profiling run"
    return f"{found.max_num_batched_tokens:,} tokens, {found.max_num_seqs:,} sequences"


def _serving_ranks(found: ServingEstimate) -> Section:
    titles = ("weights", "activations", "non-torch", "KV cache", "graphs", "left over")
    columns = (
        Column("rank", 4, number=True),
        *(Column(title, AUTO, gap=2, number=True) for title in titles),
    )
    rows = tuple(
        Row(
            (
                Cell(str(one.rank)),
                *(
                    Cell("–") if value is None else size(value)
                    for value in (
                        one.weights,
                        one.activation,
                        one.non_torch,
                        one.kv_cache,
                        one.graphs,
                        one.left,
                    )
                ),
            )
        )
        for one in found.ranks
    )
    return Section("Ranks", (Table("ranks", columns, rows),))


def _peak(found: ServingEstimate) -> Section:
    columns = (
        Column("allocated", 10, number=True),
        Column("function", AUTO, gap=2),
        Column("line", 0, gap=2),
    )
    rows = tuple(
        Row((size(row.bytes), row.function, Cell(row.place, place=True)))
        for row in found.peak[:_LINES]
    )
    return Section("Lines at the activations' peak", (Table("lines", columns, rows),))
