"""The reference page of the rules, made from the rules themselves.

``python -m gpuprobe.probes.health.reference`` prints it; ``docs/reference/rules.md`` holds it.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.probes.distributed.rules import RULES as RANK_RULES
from gpuprobe.probes.health import RULES
from gpuprobe.probes.health.base import RuleText
from gpuprobe.probes.health.xid import XIDS

__all__ = ["page"]


def page() -> str:
    """The whole page, Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Rules of `gpuprobe doctor`"
    yield ""
    yield "Generated from the rules: `python -m gpuprobe.probes.health.reference`."
    yield ""
    yield (
        "A rule that could not read what it needs is reported as *not checked*, with the reason; "
        "it never passes by default. Ids are not used again."
    )
    yield ""
    yield "## One machine"
    yield from _table(RULES)
    for rule in RULES:
        yield from _section(rule)
    yield ""
    yield "## The ranks of a job (`--distributed`)"
    yield from _table(RANK_RULES)
    for text in RANK_RULES:
        yield from _section(text)
    yield ""
    yield "## Xid messages"
    yield ""
    yield (
        "What GP124 says about each number. Source: NVIDIA's Xid catalogue "
        "(docs.nvidia.com/deploy/xid-errors), in our own words."
    )
    yield ""
    yield "| Xid | level | meaning | what to do |"
    yield "| ---: | --- | --- | --- |"
    for code, advice in sorted(XIDS.items()):
        yield f"| {code} | {advice.level.value} | {advice.meaning} | {advice.action} |"


def _table(rules: tuple[RuleText, ...]) -> Iterator[str]:
    yield ""
    yield "| id | kind | passes when | levels |"
    yield "| --- | --- | --- | --- |"
    for rule in rules:
        levels = ", ".join(level.value for level in rule.levels)
        name = f"[{rule.info.id}](#{_anchor(rule)})"
        yield f"| {name} | {rule.info.kind} | {rule.info.title} | {levels} |"


def _anchor(rule: RuleText) -> str:
    return f"{rule.info.id}-{rule.info.kind}".lower()


def _section(rule: RuleText) -> Iterator[str]:
    yield ""
    yield f"### {rule.info.id} {rule.info.kind}"
    yield ""
    yield rule.doc
    yield ""
    yield f"Reads: {', '.join(rule.reads)}."


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
