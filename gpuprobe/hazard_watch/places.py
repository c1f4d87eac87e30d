"""The line of the program that caused an operation."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

from gpuprobe.hazards.events import CodePosition, Site
from gpuprobe.model.place import Place
from gpuprobe.torch_support.compiled_code import lines_of
from gpuprobe.user_frames import innermost, line_of, name_of

_MOST_SITES: Final = 4096
_sites: dict[tuple[int, int], CodePosition] = {}  # by id of the code, and instruction: one of each

backward_frames: Final[list[FrameType]] = []
"""The frames that called the backward passes in progress. On CUDA the autograd engine has separate
threads, without any frame of the program.
"""


def program_frame() -> FrameType | None:
    """The innermost frame of the program; in a thread without one, of the thread that called the
    backward pass. None if neither has one.
    """
    frame = innermost(sys._getframe(1))
    return innermost(backward_frames[-1]) if frame is None and backward_frames else frame


def site_at_hand() -> CodePosition | None:
    """The position of the innermost frame of the program, resolved by `place`. In a thread without
    one, the place that called the backward pass.
    """
    frame = innermost(sys._getframe(2))
    if frame is None and backward_frames:
        frame = innermost(backward_frames[-1])
    if frame is None:
        return None
    code = frame.f_code
    key = id(code), frame.f_lasti
    site = _sites.get(key)
    if site is None:  # whose code is alive, so that no other has its id
        if len(_sites) >= _MOST_SITES:
            _sites.clear()
        site = _sites[key] = CodePosition(code, key[1])
    return site


def place(site: Site) -> Place | None:
    """The file and line of a site."""
    if not isinstance(site, CodePosition):
        return None
    code, instruction = site
    line = line_of(code, instruction)
    if origins := lines_of(code.co_filename, line):  # in code that torch's compiler wrote
        return Place(*origins[0])
    name = getattr(code, "co_qualname", code.co_name)
    return Place(name_of(code.co_filename), line, name)
