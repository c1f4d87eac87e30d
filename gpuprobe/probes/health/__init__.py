"""The rules of ``gpuprobe doctor``, and the facts they read.

``RULES`` is in the order of the ids. An id is never used for another rule again.
"""

from __future__ import annotations

from gpuprobe.probes.health import allocator_conf, devices, driver, host, sharing
from gpuprobe.probes.health.base import Facts, Outcome, Rule, examine

__all__ = ["RULES", "Facts", "Outcome", "Rule", "examine"]

RULES: tuple[Rule, ...] = tuple(
    sorted(
        (*driver.RULES, *devices.RULES, *allocator_conf.RULES, *host.RULES, *sharing.RULES),
        key=lambda rule: rule.info.id,
    )
)
