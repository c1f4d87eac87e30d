"""Results in every output format: `render` writes one, by a table of renderers.

A renderer is named as ``module:function``, relative to `gpuprobe.reporters`, and imported when it
is used. A new format is a module there and a `Format` here: the commands get its option from
`formats_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpuprobe.analysis.baseline import CheckResult
    from gpuprobe.model.run.totals import Run


class CheckResults(tuple["CheckResult", ...]):
    """The results of one check, one for each run."""

    __slots__ = ()


class RunList(tuple["Run", ...]):
    """The runs that are being recorded on this machine."""

    __slots__ = ()


class Format(NamedTuple):
    """An output format: what it is made from (a column of the table), and the function that
    writes that. ``options`` are fixed for the format. ``help`` is the help text of the option that
    commands have for it; ``offered`` are the results whose commands have one, None for all.
    """

    source: str
    write: str
    help: str = ""
    offered: tuple[str, ...] | None = None
    options: Mapping[str, object] = {}


FORMATS: dict[str, Format] = {
    "text": Format("sections", ".text.draw:write", offered=()),
    "json": Format("document", "gpuprobe.model.io.document:write", "print one JSON document"),
    "markdown": Format(
        "sections", ".markdown:write", "print Markdown", ("CheckResults",), {"summary": True}
    ),
}

_FINDINGS = {
    "sarif": ".ci.sarif:write",
    "junit": ".ci.junit:write",
    "github": ".ci.annotations:write_github",
    "gitlab": ".ci.annotations:write_gitlab",
}

# Result -> what it is rendered by: functions that return its sections and its JSON document, and
# for all other formats functions that write it.
_RENDERERS: dict[str, dict[str, str]] = {
    "CheckResults": {
        "sections": ".sections.check:run_sections",
        "document": ".json.check:document",
        "html": ".html.report:write_check",
    },
    "CudaTorchStatus": {"document": ".json.outcomes:cuda_torch"},
    "Diagnosis": {
        "sections": ".sections.doctor:doctor_sections",
        "document": ".json.doctor:document",
    },
    "Diff": {
        "sections": ".sections.diff:diff_sections",
        "document": ".json.diff:document",
        "html": ".html.report:write_diff",
    },
    "Estimate": {
        "sections": ".sections.plans:estimate_sections",
        "document": ".json.estimate:document",
    },
    "Explanation": {
        "sections": ".sections.explain:explain_sections",
        "document": ".json.explain:document",
    },
    "Fit": {
        "sections": ".sections.plans:fit_sections",
        "document": ".json.fit:document",
    },
    "GpuprobeError": {"document": ".json.outcomes:error"},
    "HangReport": {
        "sections": ".sections.jobs:hang_sections",
        "document": ".json.hang:document",
    },
    "Hazards": {
        "sections": ".sections.hazards:hazard_sections",
        "document": ".json.hazards:document",
    },
    "Inventory": {
        "text": ".text.info:write",
        "document": ".json.info:document",
    },
    "ProgramRun": {"document": ".json.outcomes:program_run"},
    "RankDiagnosis": {
        "sections": ".sections.doctor:rank_doctor_sections",
        "document": ".json.doctor:ranks_document",
    },
    "ReplayResult": {
        "sections": ".sections.replay:replay_sections",
        "document": ".json.replay:document",
    },
    "Report": {
        "sections": ".sections.report:report_sections",
        "document": ".json.report:to_document",
        "html": ".html.report:write",
    },
    "RunList": {"text": ".text.runs:write", "document": ".json.outcomes:runs"},
    "Scaling": {
        "sections": ".sections.jobs:scale_sections",
        "document": ".json.scale:document",
    },
    "ServingEstimate": {
        "sections": ".sections.plans:serving_sections",
        "document": ".json.serving:document",
    },
    "ServingFit": {
        "sections": ".sections.plans:serving_fit_sections",
        "document": ".json.serving:fit_document",
    },
    "WrittenFiles": {"document": ".json.outcomes:written"},
    "list": _FINDINGS,
    "tuple": _FINDINGS,
}


def formats_of(result: str) -> dict[str, Format]:
    """The formats that commands offer for a type of result, apart from text."""
    row = _RENDERERS[result]
    return {
        name: form
        for name, form in FORMATS.items()
        if form.source in row and (form.offered is None or result in form.offered)
    }


def render(result: object, form: str, stream: IO[str], **options: object) -> None:
    """Write a result to a text stream. ``form``: a name in `FORMATS` or ``"html"``; for a sequence
    of findings ``"sarif"``, ``"junit"``, ``"github"`` or ``"gitlab"``.

    ``options`` are the keyword arguments of the renderers; one that does not have an option ignores
    it. ``full``: every figure, in lines of any length; ``top``: rows for each table; ``by``: the
    breakdowns of a diff; ``cwd``: the folder that is left out of paths; ``columns``: the width of
    the table of GPUs.

    Raises LookupError if the result cannot be rendered in this format.
    """
    for kind in type(result).__mro__:
        row = _RENDERERS.get(kind.__name__)
        if row is not None:
            break
    else:
        raise LookupError(f"no renderer for {type(result).__name__}")
    arguments = result if isinstance(result, CheckResults) else (result,)
    options["stream"] = stream
    if form in row:
        _call(row[form], arguments, options)
        return
    chosen = FORMATS.get(form)
    if chosen is None or chosen.source not in row:
        raise LookupError(f"{type(result).__name__} has no format {form!r}")
    options.update(chosen.options)
    _call(chosen.write, (_call(row[chosen.source], arguments, options),), options)


def _call(name: str, arguments: tuple[object, ...], options: dict[str, object]) -> object:
    """Import a renderer and call it with those of the options that are its parameters."""
    module, _, function = name.partition(":")
    found: Any = getattr(import_module(module, "gpuprobe.reporters"), function)
    code = found.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return found(*arguments, **{key: options[key] for key in parameters if key in options})
