"""Problems of this machine, and of the ranks of a distributed job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gpuprobe.model.machine.diagnosis import Diagnosis, RankDiagnosis
from gpuprobe.model.values import ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.findings import Finding
    from gpuprobe.reporters.text.draw import DrawnLine


def doctor() -> list[Finding]:
    """Problems of this machine as findings, worst first. Empty if there are none.

    Creates no CUDA context, and imports torch only in a separate process. `diagnose` also returns
    which checks passed and which were skipped.
    """
    return list(diagnose().findings)


def diagnose(demo: str | None = None, *, environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Run every rule. ``demo`` names a simulated fleet to read instead of the hardware; then only
    the devices are checked. ``environ`` is the environment of the program in question.

    Raises UsageError for an unknown fleet.
    """
    from gpuprobe.api.devices import inventory
    from gpuprobe.probes.health import CHECKS
    from gpuprobe.probes.health.base import MachineFacts, device_verdicts, driver_status, examine
    from gpuprobe.probes.health.facts import gather

    variables = os.environ if environ is None else environ
    found = inventory(("nvml", "cuda"), demo, environ=variables)
    if demo:
        only = Unavailable("--demo simulates only GPUs", ReadStatus.NOT_COLLECTED)
        given: dict[str, Any] = {field.name: only for field in fields(MachineFacts)}
        given |= {"inventory": found, "in_container": False, "uid": os.getuid()}
        facts = MachineFacts(**given)
    else:
        facts = gather(found, variables)
    outcome = examine(CHECKS, facts)
    status = driver_status(found)
    driver = found.driver.version.value
    if isinstance(status, Unavailable):
        driver = status
    elif not status.available:
        driver = Unavailable(status.reason)
    elif isinstance(driver, Unavailable):
        driver = "of an unknown version"
    return Diagnosis(
        taken_at=found.taken_at,
        driver=driver,
        torch=facts.torch if isinstance(facts.torch, Unavailable) else facts.torch.version,
        devices=driver if isinstance(driver, Unavailable) else len(found.devices),
        findings=outcome.findings,
        passed=outcome.passed,
        not_checked=outcome.not_checked,
        demo=demo or "",
        verdicts=device_verdicts(found, outcome),
    )


def diagnose_ranks(timeout: float = 30.0) -> RankDiagnosis:
    """Check a distributed job from within: called on every rank, as under ``torchrun``.

    ``timeout``: seconds for the ranks to join and for each later step. Needs torch; creates a CUDA
    context on one GPU per rank. Every rank gets the same verdict; rank 0 gets the whole report.

    Raises MissingExtra if torch is not installed.
    """
    from gpuprobe.probes.distributed.meeting import check_ranks

    return check_ranks(os.environ, timeout)


def diagnosis_lines(diagnosis: Diagnosis, columns: int) -> list[DrawnLine]:
    """The diagnosis as text, in lines of at most ``columns`` columns. Commands are never broken."""
    from gpuprobe.reporters.sections.doctor import doctor_sections
    from gpuprobe.reporters.terminal import Style
    from gpuprobe.reporters.text.draw import draw

    return list(draw(doctor_sections(diagnosis), Style(width=columns)))
