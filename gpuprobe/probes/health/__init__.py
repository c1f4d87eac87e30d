"""The rules of ``gpuprobe doctor``, and the facts they read.

``CHECKS`` is in the order of the ids. The id of a removed rule is never reused.
"""

from __future__ import annotations

from gpuprobe.probes.health import devices, driver, environment, sharing
from gpuprobe.probes.health.base import HealthCheck

CHECKS: tuple[HealthCheck, ...] = tuple(
    sorted(
        (*driver.CHECKS, *devices.CHECKS, *environment.CHECKS, *sharing.CHECKS),
        key=lambda check: check.rule.id,
    )
)

RULES = tuple(check.rule for check in CHECKS)
