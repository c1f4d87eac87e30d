"""Results in every output format: `render` writes one.

`_RESULTS` has each type of result: a function for its JSON document, and one for the sections from
which text and the formats of `DRAWN` are drawn. Each imports what it needs: a command prints one
result in one format, and the modules of all take more than 0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from gpuprobe.allocator.results import ReplayResult
    from gpuprobe.analysis.baseline.model import CheckResult
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
    from gpuprobe.model.run.jobs import Scaling
    from gpuprobe.model.run.totals import Run
    from gpuprobe.reporters.sections.parts import Section

Document = dict[str, Any]


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
    shown = _shown(result)
    if form == "json":
        from gpuprobe.model.io.document import write

        write(shown.document(result, options), stream)
    elif form == "text" and shown.text is not None:
        shown.text(result, stream, options)
    elif shown.sections is not None:
        draw = _draw_text if form == "text" else DRAWN[form].draw
        draw(shown.sections(result, options), stream, options)
    else:
        raise LookupError(f"{type(result).__name__} has no {form}")


def _shown(result: object) -> _Result:
    """The entry of the result's class, or of a class that it inherits from: errors do."""
    for kind in type(result).__mro__:
        if kind.__name__ in _RESULTS:
            return _RESULTS[kind.__name__]
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

    return run_sections(*results, summary=options.summary, full=options.full)


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

    return estimate_sections(result, **_given(top=options.top), full=options.full)


def _explanation_sections(result: Explanation, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.explain import explain_sections

    return explain_sections(result, full=options.full)


def _gpu_table_sections(result: GpuTable, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.step_time import gpu_table_sections

    return gpu_table_sections(result)


def _fit_sections(result: Fit, options: Options) -> list[Section]:
    from gpuprobe.reporters.sections.plans import fit_sections

    return fit_sections(result)


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


# -- results whose text is not drawn from sections


def _write_inventory(result: Inventory, stream: TextIO, options: Options) -> None:
    from gpuprobe.reporters.text.info import write

    write(result, stream, columns=options.columns, full=options.full)


def _write_runs(result: RunList, stream: TextIO, options: Options) -> None:
    from gpuprobe.reporters.text.runs import write

    write(result, stream)


# -- JSON documents, by type of result


def _check_document(results: CheckResults, options: Options) -> Document:
    from gpuprobe.reporters.json.check import document

    return document(*results)


def _cuda_torch_document(result: CudaTorchStatus, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import CUDA_TORCH

    return CUDA_TORCH.plain(result)


def _diagnosis_document(result: Diagnosis, options: Options) -> Document:
    from gpuprobe.reporters.json.doctor import MACHINE

    return MACHINE.plain(result)


def _rank_diagnosis_document(result: RankDiagnosis, options: Options) -> Document:
    from gpuprobe.reporters.json.doctor import RANKS

    return RANKS.plain(result)


def _diff_document(result: Diff, options: Options) -> Document:
    from gpuprobe.reporters.json.diff import document

    return document(result, **_given(by=options.by))


def _estimate_document(result: Estimate, options: Options) -> Document:
    from gpuprobe.reporters.json.plans import ESTIMATE

    return ESTIMATE.plain(result)


def _explanation_document(result: Explanation, options: Options) -> Document:
    from gpuprobe.reporters.json.report import EXPLANATION

    return EXPLANATION.plain(result)


def _gpu_table_document(result: GpuTable, options: Options) -> Document:
    from gpuprobe.reporters.json.plans import GPUS

    return GPUS.plain(result)


def _fit_document(result: Fit, options: Options) -> Document:
    from gpuprobe.reporters.json.plans import FIT

    return FIT.plain(result)


def _error_document(result: GpuprobeError, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import error

    return error(result)


def _hazard_document(result: Hazards, options: Options) -> Document:
    from gpuprobe.reporters.json.hazards import document

    return document(result)


def _inventory_document(result: Inventory, options: Options) -> Document:
    from gpuprobe.reporters.json.info import document

    return document(result)


def _program_run_document(result: ProgramRun, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import RUN

    return RUN.plain(result)


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
    from gpuprobe.reporters.json.jobs import SCALING

    return SCALING.plain(result)


def _serving_document(result: ServingEstimate, options: Options) -> Document:
    from gpuprobe.reporters.json.plans import SERVING

    return SERVING.plain(result)


def _serving_fit_document(result: ServingFit, options: Options) -> Document:
    from gpuprobe.reporters.json.plans import SERVING_FIT

    return SERVING_FIT.plain(result)


def _written_document(result: WrittenFiles, options: Options) -> Document:
    from gpuprobe.reporters.json.outcomes import WRITTEN

    return WRITTEN.plain(result)


# -- results, by type


class _Result(NamedTuple):
    """A type of result: its JSON document, and its text: drawn from sections, or written by
    ``text``.
    """

    document: Callable[[Any, Options], Document]
    sections: Callable[[Any, Options], list[Section]] | None = None
    text: Callable[[Any, TextIO, Options], None] | None = None


_RESULTS: dict[str, _Result] = {
    "CheckResults": _Result(_check_document, _check_sections),
    "CudaTorchStatus": _Result(_cuda_torch_document),
    "Diagnosis": _Result(_diagnosis_document, _diagnosis_sections),
    "Diff": _Result(_diff_document, _diff_sections),
    "Estimate": _Result(_estimate_document, _estimate_sections),
    "Explanation": _Result(_explanation_document, _explanation_sections),
    "Fit": _Result(_fit_document, _fit_sections),
    "GpuTable": _Result(_gpu_table_document, _gpu_table_sections),
    "GpuprobeError": _Result(_error_document),
    "Hazards": _Result(_hazard_document, _hazard_sections),
    "Inventory": _Result(_inventory_document, text=_write_inventory),
    "ProgramRun": _Result(_program_run_document),
    "RankDiagnosis": _Result(_rank_diagnosis_document, _rank_diagnosis_sections),
    "ReplayResult": _Result(_replay_document, _replay_sections),
    "Report": _Result(_report_document, _report_sections),
    "RunList": _Result(_runs_document, text=_write_runs),
    "Scaling": _Result(_scaling_document, _scaling_sections),
    "ServingEstimate": _Result(_serving_document, _serving_sections),
    "ServingFit": _Result(_serving_fit_document, _serving_fit_sections),
    "WrittenFiles": _Result(_written_document),
}
