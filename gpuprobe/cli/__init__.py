"""The ``gpuprobe`` command.

``gpuprobe --version`` imports neither argparse nor anything else; each command's module is
imported when that command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``argv`` excludes the program name; without it,
    the command is the whole process and may fork (see `gpuprobe.cli.supervise`).

    SystemExit is raised only by argparse (usage, help) and by a script that calls ``sys.exit``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-V"]):
        from gpuprobe._version import __version__

        print(f"gpuprobe {__version__}")  # noqa: T201 (does nothing without a stdout)
        return 0

    from gpuprobe.cli.parser import dispatch

    return dispatch(arguments, supervise=argv is None)
