"""Findings at their lines in a pull request: GitHub's workflow commands, GitLab's code quality.

GitHub reads commands from what a step prints (docs.github.com, "Workflow commands for GitHub
Actions"). ``%``, CR and LF are escaped everywhere, ``:`` and ``,`` in properties, as in the actions
toolkit (``packages/core/src/command.ts``). It shows ten errors, ten warnings and ten notices of a
step; the report's text has all findings.

GitLab reads a file, a subset of Code Climate's format (docs.gitlab.com, "Code Quality", "Code
Quality report format"): each entry needs a place and a unique fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.place import Place
from gpuprobe.model.text import cut, visible
from gpuprobe.user_frames import is_outside

SERVICES: Final = ("github", "gitlab")

GITLAB_FILE: Final = "gl-code-quality-report.json"
"""The file name in GitLab's templates."""

_COMMANDS: Final = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "notice"}
# GitLab also has critical and blocker, which are for people to assign.
_SEVERITIES: Final = {Level.ERROR: "major", Level.WARNING: "minor", Level.NOTE: "info"}
_ORDER: Final = (Level.ERROR, Level.WARNING, Level.NOTE)


def service_of(environment: Mapping[str, str]) -> str | None:
    """The one of `SERVICES` that this process runs on, by the variable that it sets (GitHub:
    ``GITHUB_ACTIONS``, GitLab: ``GITLAB_CI``); None elsewhere.
    """
    if environment.get("GITHUB_ACTIONS") == "true":
        return "github"
    if environment.get("GITLAB_CI") == "true":
        return "gitlab"
    return None


def checkout(environment: Mapping[str, str], project: str) -> str:
    """The folder of the checkout if the service names it, else ``project``."""
    named = environment.get("GITHUB_WORKSPACE") or environment.get("CI_PROJECT_DIR")
    return named or project


@dataclass(frozen=True, slots=True)
class Places:
    """Converts the files of findings to paths in the repository.

    ``project`` is the folder that relative names start from, ``repository`` the checkout's; both
    absolute. A file outside the checkout (an installed package) has no path in it.
    """

    project: str
    repository: str

    @staticmethod
    def of(environment: Mapping[str, str], project: str) -> Places:
        """The places in the checkout that the service names (``GITHUB_WORKSPACE``,
        ``CI_PROJECT_DIR``), else in ``project``.
        """
        return Places(project, checkout(environment, project))

    def path(self, file: str) -> str | None:
        """Relative to the checkout, with ``/``; None for a file that is not in it."""
        # "..." replaces folders that a baseline omits: the path is unknown.
        if not file or file.startswith("<") or is_outside(file) or "\0" in file:
            return None
        whole = os.path.normpath(os.path.join(self.project, file))  # noqa: PTH118 - pure text
        for root in (self.repository, os.path.realpath(self.repository)):
            inside = os.path.relpath(whole, root)
            if inside != os.pardir and not inside.startswith(os.pardir + os.sep):
                return inside.replace(os.sep, posixpath.sep)
        return None


def commands(findings: Sequence[Finding], places: Places) -> Iterator[str]:
    """GitHub's workflow commands, one line each, the worst first, as GitHub shows only ten."""
    for finding in sorted(findings, key=lambda item: _ORDER.index(item.level)):
        properties = {}
        path = None if finding.location is None else places.path(finding.location.file)
        if path is not None and finding.location is not None:
            properties = {"file": path, "line": str(max(1, finding.location.line))}
        properties["title"] = f"gpuprobe {finding.rule} {finding.kind}".rstrip()
        given = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        text = "\n".join(_text(finding, placed=path is not None))
        yield f"::{_COMMANDS[finding.level]} {given}::{_data(text)}"


def code_quality(
    findings: Sequence[Finding], places: Places, elsewhere: str
) -> list[dict[str, object]]:
    """GitLab's report as plain data. A finding without a place in the checkout is put at line 1
    of ``elsewhere``, a file of the project.
    """
    found: list[dict[str, object]] = []
    counts: Counter[str] = Counter()
    for finding in findings:
        path = None if finding.location is None else places.path(finding.location.file)
        line = 1 if path is None or finding.location is None else max(1, finding.location.line)
        shown = path or places.path(elsewhere) or posixpath.basename(elsewhere)
        counts[finding.fingerprint] += 1
        # Two findings may have the same fingerprint (one line, two tensors): a count makes it
        # unique, and is the same in the next run.
        key = f"{finding.fingerprint}:{counts[finding.fingerprint]}"
        found.append(
            {
                "description": " ".join(_text(finding, placed=path is not None)),
                "check_name": f"gpuprobe/{finding.rule}",
                "fingerprint": hashlib.sha256(key.encode()).hexdigest()[:32],
                "severity": _SEVERITIES[finding.level],
                "location": {
                    "path": visible(shown),
                    "lines": {"begin": line},
                },
            }
        )
    return found


def write_github(
    findings: Sequence[Finding], stream: TextIO, places: Places, *, failed: str = ""
) -> None:
    """Write GitHub's workflow commands. ``failed``: how the program failed, an entry as well."""
    for command in commands(_with_failure(findings, failed), places):
        stream.write(command + "\n")


def write_gitlab(
    findings: Sequence[Finding],
    stream: TextIO,
    places: Places,
    elsewhere: str,
    *,
    failed: str = "",
) -> None:
    """Write GitLab's report; ``elsewhere``: as for `code_quality`."""
    found = code_quality(_with_failure(findings, failed), places, elsewhere)
    json.dump(found, stream, indent=2)
    stream.write("\n")


def _with_failure(findings: Sequence[Finding], failed: str) -> Sequence[Finding]:
    if not failed:
        return findings
    message = f"the program failed: {failed}"
    return (Finding("program-failed", "", Level.ERROR, message), *findings)


_LONGEST: Final = 1000
"""The longest message: names in it have any length."""


def _text(finding: Finding, *, placed: bool) -> Iterator[str]:
    """The lines of the text, with control characters escaped."""
    where = "" if placed or finding.location is None else f" (at {_shown(finding.location)})"
    yield visible(cut(finding.message, _LONGEST)) + where
    if finding.fix is not None:
        yield visible(cut(finding.fix.text, _LONGEST))


def _shown(place: Place) -> str:
    return visible(str(place))


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(visible(text)).replace(":", "%3A").replace(",", "%2C")
