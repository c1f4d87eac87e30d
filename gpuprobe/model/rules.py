"""The registry of rules: what a finding can be of, under one id, wherever it is found.

A rule is defined in the room that checks it, with `define`, and is in the registry from the moment
that room is imported. ``docs/reference/rules.md`` and the rules in SARIF files are made from it. An
id is never used for another rule again.

* ``GP1..``: this machine and the ranks of a job (`gpuprobe.probes.health`, ``.distributed``)
* ``GP2..``: streams and synchronisation (`gpuprobe.hazards.rules`)
* ``GP3..``: the placement of memory on devices (`gpuprobe.analysis.placement`)
* ``GPM-…``: regressions against a baseline (`gpuprobe.analysis.baseline.check`)
* words: what a report suggests (`gpuprobe.causes.advice`)
"""

from __future__ import annotations

from inspect import cleandoc

from gpuprobe.model.findings import Finding, Fix, Level
from gpuprobe.model.place import Place
from gpuprobe.model.record import record


@record(frozen=True, slots=True)
class Rule:
    """``levels`` are those its findings can have, the usual one first; ``kind`` is a short name,
    which rules may share. ``title`` is one line, ``description`` explains why it matters
    (Markdown), ``remedy`` is the general advice, ``reads`` names the readings it needs.
    """

    id: str
    kind: str
    levels: tuple[Level, ...]
    title: str
    description: str = ""
    remedy: str = ""
    reads: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        """The usual one."""
        return self.levels[0]

    def finding(
        self,
        message: str,
        *evidence: tuple[str, object],
        fix: str,
        code: str = "",
        subject: str = "",
        level: Level | None = None,
        location: Place | None = None,
        count: int = 1,
    ) -> Finding:
        """A finding of this rule, at its usual level unless another is given."""
        return Finding(
            self.id,
            self.kind,
            level or self.level,
            message,
            tuple((name, str(value)) for name, value in evidence),
            location=location,
            fix=Fix(fix, code),
            subject=subject,
            count=count,
        )


_RULES: dict[str, Rule] = {}


def define(
    id: str,
    kind: str,
    levels: tuple[Level, ...] | Level,
    title: str,
    *,
    description: str = "",
    remedy: str = "",
    reads: tuple[str, ...] = (),
) -> Rule:
    """Make a rule and register it; ``description`` may be indented.

    Raises ValueError where the id is taken.
    """
    if id in _RULES:
        raise ValueError(f"rule {id} is already defined: {_RULES[id].title}")
    levels = (levels,) if isinstance(levels, Level) else levels
    made = _RULES[id] = Rule(id, kind, levels, title, cleandoc(description), remedy, reads)
    return made


def registered() -> tuple[Rule, ...]:
    """The rules of all rooms that were imported, by id."""
    return tuple(_RULES[id] for id in sorted(_RULES))


def rule_of(id: str) -> Rule | None:
    """The rule with this id, or whose id is a pattern for it (``GPM-phase-*``)."""
    found = _RULES.get(id)
    if found is None:
        for pattern, rule in _RULES.items():
            if pattern.endswith("*") and id.startswith(pattern[:-1]):
                return rule
    return found
