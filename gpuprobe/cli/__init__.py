"""The ``gpuprobe`` command.

``gpuprobe --version`` imports neither argparse nor anything else; each command's module is
imported when that command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. ``argv`` excludes the program name. Returns the exit code. Without ``argv``
    this is the whole process, which may fork (see `gpuprobe.cli.supervise`).

    SystemExit passes through only from argparse (usage, help) and from a watched script that
    called ``sys.exit``.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--version"], ["-V"]):
        from gpuprobe._version import __version__

        print(f"gpuprobe {__version__}")  # noqa: T201 (does nothing where there is no stdout)
        return 0

    from gpuprobe.cli.parser import dispatch

    return dispatch(arguments, supervise=argv is None)
