"""Results in every output format: `render` writes one.

`_SECTIONS` has a function for the sections of each type of result, from which text and the formats
of `DRAWN` are drawn, and `_DOCUMENTS` one for its JSON document. Each imports what it needs: a
command prints one result in one format, and the modules of all take more than 0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

if TYPE_CHECKING:
    from gpuprobe.allocator.results import ReplayResult
    from gpuprobe.analysis.baseline import CheckResult
    from gpuprobe.analysis.compare.diff import Diff
    from gpuprobe.errors import GpuprobeError
    from gpuprobe.hazards.findings.results import Hazards
    from gpuprobe.model.causes import Explanation
    from gpuprobe.model.machine.devices import Inventory
    from gpuprobe.model.machine.diagnosis import Diagnosis, RankDiagnosis
    from gpuprobe.model.outcomes import CudaTorchStatus, ProgramRun, WrittenFiles
    from gpuprobe.model.plans.estimate import Estimate
    from gpuprobe.model.plans.fit import Fit
    from gpuprobe.model.plans.gpu_table import GpuTable
    from gpuprobe.model.plans.serving import ServingEstimate, ServingFit
    from gpuprobe.model.report import Report
    from gpuprobe.model.run.jobs import HangReport, Scaling
    from gpuprobe.model.run.totals import Run
    from gpuprobe.reporters.sections.parts import Section

Document = dict[str, Any]
_T = TypeVar("_T")


class CheckResults(tuple["CheckResult", ...]):
    """The results of one check, one for each run."""

    __slots__ = ()


class RunList(tuple["Run", ...]):
    """The runs that are being recorded on this machine."""

    __slots__ = ()


class Options(NamedTuple):
    """How a result is drawn, as far as it has such parts. ``full``: every figure, in lines of any
    length; ``top``: rows for each table; ``by``: the breakdowns of a diff; ``cwd``: the folder that
    is left out of paths; ``columns``: the width of the table of GPUs; ``summary``: for readers of a
    CI job, with the tables that they act on.
    """

    full: bool = False
    top: int | None = None
    by: tuple[str, ...] | None = None
    cwd: str = ""
    columns: int = 0
    summary: bool = False


def render(
    result: object,
    form: str,
    stream: TextIO,
    *,
    full: bool = False,
    top: int | None = None,
    by: tuple[str, ...] | None = None,
    cwd: str = "",
    columns: int = 0,
) -> None:
    """Write a result to a text stream, as ``"text"``, ``"json"`` or a format of `DRAWN`; see
    `Options`.

    Raises LookupError if the result cannot be rendered in this format.
    """
    options = Options(full, top, by, cwd, columns, form == "markdown")
    if form == "json":
        from gpuprobe.model.io.document import write

        write(_entry(result, _DOCUMENTS)(result, options), stream)
        return
    if form == "text" and type(result).__name__ in _TEXTS:
        _TEXTS[type(result).__name__](result, stream, options)
        return
    sections = _entry(result, _SECTIONS)(result, options)
    draw = _draw_text if form == "text" else DRAWN[form].draw
    draw(sections, stream, options)


def _entry(result: object, table: Mapping[str, _T]) -> _T:
    """The entry of the result's class, or of a class that it inherits from: errors do."""
    for kind in type(result).__mro__:
        if kind.__name__ in table:
            return table[kind.__name__]
    raise LookupError(f"no renderer for {type(result).__name__}")


# -- formats that are drawn from sections


class Drawn(NamedTuple):
    """A format that is drawn from sections. ``help``: of the commands' option; ``everywhere``: all
    commands that print sections have it.
    """

    draw: Callable[[list[Section], TextIO, Options], None]
    help: str
    everywhere: bool


def _draw_text(sections: list[Section], stream: TextIO, options: Options) -> None:
    from gpuprobe.reporters.text.draw import write

    write(sections, stream, cwd=options.cwd, full=options.full)


def _draw_markdown(sections: list[Section], stream: TextIO, options: Options) -> None:
    from gpuprobe.reporters.markdown import write

    write(sections, stream)


DRAWN: dict[str, Drawn] = {
    "markdown": Drawn(_draw_markdown, "print Markdown", everywhere=False),
}


# -- sections, by type of result


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others are the renderer's own."""
    return {name: value for name, value in options.items() if value is not None}


def _check_sections(results: CheckResults, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.check import run_sections

    return run_sections(*results, summary=options.summary)


def _diagnosis_sections(result: Diagnosis, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.doctor import doctor_sections

    return doctor_sections(result)


def _rank_diagnosis_sections(result: RankDiagnosis, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.doctor import rank_doctor_sections

    return rank_doctor_sections(result)


def _diff_sections(result: Diff, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.diff import diff_sections

    return diff_sections(result, **_given(by=options.by, top=options.top))


def _estimate_sections(result: Estimate, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.plans import estimate_sections

    return estimate_sections(result, **_given(top=options.top))


def _explanation_sections(result: Explanation, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.explain import explain_sections

    return explain_sections(result, full=options.full)


def _gpu_table_sections(result: GpuTable, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.step_time import gpu_table_sections

    return gpu_table_sections(result)


def _fit_sections(result: Fit, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.plans import fit_sections

    return fit_sections(result)


def _hang_sections(result: HangReport, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.jobs import hang_sections

    return hang_sections(result)


def _hazard_sections(result: Hazards, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.hazards import hazard_sections

    return hazard_sections(result, full=options.full)


def _replay_sections(result: ReplayResult, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.replay import replay_sections

    return replay_sections(result)


def _report_sections(result: Report, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.report import report_sections

    return report_sections(result, full=options.full, **_given(top=options.top))


def _scaling_sections(result: Scaling, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.jobs import scale_sections

    return scale_sections(result)


def _serving_sections(result: ServingEstimate, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.plans import serving_sections

    return serving_sections(result)


def _serving_fit_sections(result: ServingFit, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.plans import serving_fit_sections

    return serving_fit_sections(result)


_SECTIONS: dict[str, Callable[[Any, Options], list[Section]]] = {
    "CheckResults": _check_sections,
    "Diagnosis": _diagnosis_sections,
    "Diff": _diff_sections,
    "Estimate": _estimate_sections,
    "Explanation": _explanation_sections,
    "Fit": _fit_sections,
    "GpuTable": _gpu_table_sections,
    "HangReport": _hang_sections,
    "Hazards": _hazard_sections,
    "RankDiagnosis": _rank_diagnosis_sections,
    "ReplayResult": _replay_sections,
    "Report": _report_sections,
    "Scaling": _scaling_sections,
    "ServingEstimate": _serving_sections,
    "ServingFit": _serving_fit_sections,
}

# -- results whose text is not drawn from sections


def _write_inventory(result: Inventory, stream: TextIO, options: Options) -> None:
    from gpuprobe.reporters.text.info import write

    write(result, stream, columns=options.columns, full=options.full)


def _write_runs(result: RunList, stream: TextIO, options: Options) -> None:
    from gpuprobe.reporters.text.runs import write

    write(result, stream)


_TEXTS: dict[str, Callable[[Any, TextIO, Options], None]] = {
    "Inventory": _write_inventory,
    "RunList": _write_runs,
}

# -- JSON documents, by type of result


def _check_document(results: CheckResults, options: Options) -> Document:
    from gpuprobe.reporters.json.check import document

    return document(*results)


def _cuda_torch_document(result: CudaTorchStatus, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import cuda_torch

    return cuda_torch(result)


def _diagnosis_document(result: Diagnosis, options: Options) -> Document:
    from gpuprobe.reporters.json.doctor import document

    return document(result)


def _rank_diagnosis_document(result: RankDiagnosis, options: Options) -> Document:
    from gpuprobe.reporters.json.doctor import ranks_document

    return ranks_document(result)


def _diff_document(result: Diff, options: Options) -> Document:
    from gpuprobe.reporters.json.diff import document

    return document(result, **_given(by=options.by))


def _estimate_document(result: Estimate, options: Options) -> Document:
    from gpuprobe.reporters.json.estimate import document

    return document(result)


def _explanation_document(result: Explanation, options: Options) -> Document:
    from gpuprobe.reporters.json.explain import document

    return document(result)


def _gpu_table_document(result: GpuTable, options: Options) -> Document:
    from gpuprobe.reporters.json.estimate import GPUS

    return GPUS.plain(result)


def _fit_document(result: Fit, options: Options) -> Document:
    from gpuprobe.reporters.json.fit import document

    return document(result)


def _error_document(result: GpuprobeError, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import error

    return error(result)


def _hang_document(result: HangReport, options: Options) -> Document:
    from gpuprobe.reporters.json.hang import document

    return document(result)


def _hazard_document(result: Hazards, options: Options) -> Document:
    from gpuprobe.reporters.json.hazards import document

    return document(result)


def _inventory_document(result: Inventory, options: Options) -> Document:
    from gpuprobe.reporters.json.info import document

    return document(result)


def _program_run_document(result: ProgramRun, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import program_run

    return program_run(result)


def _replay_document(result: ReplayResult, options: Options) -> Document:
    from gpuprobe.reporters.json.replay import document

    return document(result)


def _report_document(result: Report, options: Options) -> Document:
    from gpuprobe.reporters.json.report import to_document

    return to_document(result)


def _runs_document(result: RunList, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import runs

    return runs(result)


def _scaling_document(result: Scaling, options: Options) -> Document:
    from gpuprobe.reporters.json.scale import document

    return document(result)


def _serving_document(result: ServingEstimate, options: Options) -> Document:
    from gpuprobe.reporters.json.serving import document

    return document(result)


def _serving_fit_document(result: ServingFit, options: Options) -> Document:
    from gpuprobe.reporters.json.serving import fit_document

    return fit_document(result)


def _written_document(result: WrittenFiles, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import written

    return written(result)


_DOCUMENTS: dict[str, Callable[[Any, Options], Document]] = {
    "CheckResults": _check_document,
    "CudaTorchStatus": _cuda_torch_document,
    "Diagnosis": _diagnosis_document,
    "Diff": _diff_document,
    "Estimate": _estimate_document,
    "Explanation": _explanation_document,
    "Fit": _fit_document,
    "GpuTable": _gpu_table_document,
    "GpuprobeError": _error_document,
    "HangReport": _hang_document,
    "Hazards": _hazard_document,
    "Inventory": _inventory_document,
    "ProgramRun": _program_run_document,
    "RankDiagnosis": _rank_diagnosis_document,
    "ReplayResult": _replay_document,
    "Report": _report_document,
    "RunList": _runs_document,
    "Scaling": _scaling_document,
    "ServingEstimate": _serving_document,
    "ServingFit": _serving_fit_document,
    "WrittenFiles": _written_document,
}
