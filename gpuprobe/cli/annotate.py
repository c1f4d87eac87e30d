"""``--annotations``: findings at their lines in a pull request."""

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
    """The destination of annotations. ``service`` is None if ``auto`` detects none; then nothing is
    written.

    Created before the program runs, which may change the working directory: ``project`` and
    ``file`` are absolute.
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
            raise argparse.ArgumentTypeError(f"cannot write {file}")  # before the program runs
        return Annotations(service, str(Path.cwd()), path)

    def write(
        self,
        findings: Sequence[Finding],
        elsewhere: str,
        project: str = "",
        failed: str = "",
    ) -> None:
        """Write annotations: GitHub's to stderr, which it reads like stdout (stdout may be
        redirected to a report), GitLab's to the file, even without findings. ``elsewhere``: the
        file at which findings without a place are shown; ``project``: the folder that relative
        file names start from (default: the working directory); ``failed``: how the program failed.

        Raises UsageError if the file cannot be written.
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
