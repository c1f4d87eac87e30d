"""Problems of this machine, and of the ranks of a distributed job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuprobe.model.machine.diagnosis import Diagnosis, RankDiagnosis
from gpuprobe.model.values import ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.findings import Finding
    from gpuprobe.probes.health.base import MachineFacts
    from gpuprobe.reporters.support_bundle import Redactor
    from gpuprobe.reporters.text.draw import DrawnLine


def doctor() -> list[Finding]:
    """Problems of this machine as findings, worst first. Empty if there are none.

    Creates no CUDA context, and imports torch only in a separate process. `diagnose` also returns
    which checks passed and which were skipped.
    """
    return list(diagnose().findings)


def diagnose(
    demo: str | None = None,
    *,
    bundle: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Run every rule. ``demo`` names a simulated fleet to read instead of the hardware; then only
    the devices are checked. ``bundle`` names a zip file to write, with secrets and names redacted;
    ``environ`` is the environment of the program in question.

    Raises UsageError for an unknown fleet and for a bundle that exists already.
    """
    from gpuprobe.api.devices import inventory
    from gpuprobe.errors import UsageError
    from gpuprobe.probes.health import CHECKS
    from gpuprobe.probes.health.base import MachineFacts, device_verdicts, driver_status, examine
    from gpuprobe.probes.health.facts import gather

    if bundle is not None and os.path.lexists(bundle):  # before the checks run
        raise UsageError(
            f"{os.fspath(bundle)} exists already", hint="give another name, or remove it first"
        )
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
    diagnosis = Diagnosis(
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
    if bundle is not None:
        _write_bundle(Path(bundle), diagnosis, facts, variables)
    return diagnosis


def _write_bundle(
    path: Path, diagnosis: Diagnosis, facts: MachineFacts, environ: Mapping[str, str]
) -> None:
    from gpuprobe.model.io.codec import to_plain
    from gpuprobe.reporters import support_bundle as doctor_bundle
    from gpuprobe.reporters.json import doctor as doctor_json

    log = facts.kernel_log
    lines = (
        [f"(not readable: {log.reason})"]
        if isinstance(log, Unavailable)
        else [f"[{message.seconds:.6f}] {message.text}" for message in log]
    )
    doctor_bundle.write(
        path,
        redactor_for(facts, environ),
        doctor=doctor_json.MACHINE.plain(diagnosis),
        info=to_plain(facts.inventory),
        environ=environ,
        packages={} if isinstance(facts.packages, Unavailable) else facts.packages,
        kernel_log=lines,
    )


def redactor_for(facts: MachineFacts, environ: Mapping[str, str]) -> Redactor:
    """A redactor of this machine's names and of the users' names in ``facts``."""
    import pwd

    from gpuprobe.reporters.support_bundle import Redactor

    users = {environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")}
    homes = {environ.get("HOME", "")}
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:  # a container's user without a passwd entry
        pass
    else:
        users.add(entry.pw_name)
        users.update(entry.pw_gecos.split(",")[0:1])  # the person's name
        homes.add(entry.pw_dir)
    node = socket.gethostname()
    hosts = {node, environ.get("HOSTNAME", ""), environ.get("HOST", "")}
    if not isinstance(facts.inventory, Unavailable):
        hosts.add(facts.inventory.host.hostname)
        for process in facts.inventory.processes:
            if isinstance(process.user.value, str):
                users.add(process.user.value)
    hosts |= {host.partition(".")[0] for host in hosts}
    return Redactor(environ, users=users, homes=homes, hosts=hosts)


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
