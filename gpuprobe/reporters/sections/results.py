"""The sections of any result, for notebooks and IPython."""

from __future__ import annotations

from gpuprobe.allocator.results import ReplayResult
from gpuprobe.analysis.baseline.model import CheckResult
from gpuprobe.analysis.compare.diff import Diff
from gpuprobe.hazards.findings.results import Hazards
from gpuprobe.model.findings import Finding
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.model.plans.fit import Fit
from gpuprobe.model.report import Report
from gpuprobe.reporters.sections.check import check_sections
from gpuprobe.reporters.sections.diff import caution_section, compiled_section, peak_sections
from gpuprobe.reporters.sections.hazards import finding_section, hazard_sections
from gpuprobe.reporters.sections.parts import Section
from gpuprobe.reporters.sections.plans import estimate_sections, fit_sections
from gpuprobe.reporters.sections.replay import replay_sections
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.sections.report.memory import causes_section

ROWS = 8
"""The rows of a table of changes."""


def sections_of(value: object) -> list[Section]:
    """A result's sections, the most important first; of a report those that answer at first sight.
    Empty for other objects.
    """
    if isinstance(value, Report):
        named = {section.name: section for section in report_sections(value)}
        first = (named["head"], named["peak"], causes_section(value))
        return [*first, named["categories"], named["lines"]]
    if isinstance(value, Diff):
        return diff_sections(value)
    if isinstance(value, CheckResult):
        return [*check_sections(value, ROWS)]
    if isinstance(value, Estimate):
        return [*estimate_sections(value)]
    if isinstance(value, Fit):
        return [*fit_sections(value)]
    if isinstance(value, Hazards):
        return [*hazard_sections(value)]
    if isinstance(value, ReplayResult):
        return [*replay_sections(value)]
    return [finding_section(value)] if isinstance(value, Finding) else []


def diff_sections(diff: Diff) -> list[Section]:
    """The change of each peak, by lines and categories."""
    peaks = peak_sections(diff, ("line", "category"), ROWS)
    return [*peaks, *compiled_section(diff, ROWS), *caution_section(diff.cautions)]
