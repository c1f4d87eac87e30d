"""Warnings about a program's line that were issued while a function of gpuprobe called torch's.

A warning names the innermost frame of Python, or one that is so many frames further out. Where
gpuprobe has replaced a function, that may be a frame of gpuprobe, which the program would not have.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Final

from gpuprobe.patching import Patches
from gpuprobe.user_frames import PACKAGE, outside

_REGISTRY: Final = "__warningregistry__"


def follow(patches: Patches) -> None:
    """Issue warnings that name a frame of gpuprobe for the frame around it instead: with the
    filters of that line, and once where they show a warning once.
    """
    show: Any = getattr(warnings, "_showwarnmsg", None)  # called for each warning to be shown
    if show is None:
        return

    def shown(message: Any) -> None:
        file, line = message.filename, message.lineno
        frame = None
        if file.startswith(PACKAGE):
            frame = sys._getframe(1)
            while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (file, line):
                frame = frame.f_back
        own, frame = frame, outside(frame, PACKAGE)
        if own is None or frame is None:
            show(message)
            return
        own.f_globals.pop(_REGISTRY, None)  # the next one may be about another line
        warnings.warn_explicit(
            message.message,
            message.category,
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__"),
            frame.f_globals.setdefault(_REGISTRY, {}),
            frame.f_globals,
            message.source,
        )

    patches.set(warnings, "_showwarnmsg", shown)
