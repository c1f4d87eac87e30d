"""``--annotations``: findings at their lines in a pull request, for the commands that find some."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuprobe.cli import stderr
from gpuprobe.errors import UsageError

if TYPE_CHECKING:
    from gpuprobe.model.findings import Finding


@dataclass(frozen=True, slots=True)
class Annotations:
    """Where annotations go. ``service`` is None where ``auto`` found none: nothing is written.

    Made before a program is run, which may change the working directory: ``project`` and
    ``file`` do not depend on it.
    """

    service: str | None
    project: str
    file: Path

    @staticmethod
    def of(text: str) -> Annotations:
        """``github``, ``gitlab``, ``gitlab=FILE`` or ``auto``. Raises ArgumentTypeError."""
        from gpuprobe.api.views import annotation_service

        try:
            service, file = annotation_service(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        path = Path(file).absolute()
        if service == "gitlab" and (path.is_dir() or not path.parent.is_dir()):
            raise argparse.ArgumentTypeError(f"cannot write {file}")  # before anything is run
        return Annotations(service, str(Path.cwd()), path)

    def write(
        self,
        findings: Sequence[Finding],
        elsewhere: str,
        project: str = "",
        failed: str = "",
    ) -> None:
        """GitHub's go to stderr, which it reads as it does stdout: stdout may be a report that
        is kept. GitLab's go to the file, also where nothing was found. ``elsewhere``: the file
        that findings without a place of their own are shown at; ``project``: the folder that
        names of files start from, default the working directory; ``failed``: how the program
        ended that did not end well.

        Raises UsageError where the file cannot be written.
        """
        if self.service is None:
            return
        from gpuprobe.api.views import annotations_of

        text = annotations_of(self.service, findings, project or self.project, elsewhere, failed)
        if self.service == "github":
            if text:
                stderr.write(text)
            return
        try:
            self.file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {self.file}: {error.strerror or error}") from error


def add_option(parser: argparse.ArgumentParser, flag: str, more: str = "") -> None:
    """Add ``flag`` to a command; the parsed value is `Annotations`, or None."""
    parser.add_argument(
        flag,
        type=Annotations.of,
        metavar="SERVICE",
        help="also annotate the lines of findings in a pull request: github, gitlab, gitlab=FILE "
        "(default: gl-code-quality-report.json), or auto (detect the service)"
        f"{more}",
    )
