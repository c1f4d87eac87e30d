"""Which frame of a stack to show: the first one that the user wrote.

Stacks are innermost first. A frame is the user's unless it is C++, PyTorch, an installed
package, the standard library or generated code. Other rules can be passed as a predicate.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gpuprobe.model.trace import Frame, StackTable

__all__ = [
    "AUTOGRAD_ENGINE",
    "BEFORE_THE_TRACE",
    "NO_MODULE",
    "NO_USER_FRAME",
    "UNKNOWN",
    "Lines",
    "UserFrame",
    "folded",
    "is_cpp",
    "is_user_frame",
    "module_row",
    "short_name",
]

UserFrame = Callable[[Frame], bool]

UNKNOWN = "(unknown)"
"""The row of memory without any stack or module."""

BEFORE_THE_TRACE = "(before the trace)"
"""The row of memory without a stack that was alive before recording began."""

AUTOGRAD_ENGINE = "(autograd engine)"
"""The row of memory allocated on a backward thread, which has no Python frames."""

NO_MODULE = "(no module)"
"""The row of memory with which no module is recorded, though where it was made is known."""

NO_USER_FRAME = "(no user frame)"
"""The row of memory whose stack has frames, none of them the user's."""

_PYTHON_SUFFIXES = (".py", ".pyi", ".pyx", ".ipynb")
_LIBRARY = re.compile(
    r"""
    /(site|dist)-packages/          # installed
    | /lib/python\d(\.\d+)?t?/      # the standard library
    | ^[A-Za-z]:/.*/Lib/            # the same on Windows, after \ became /
    | /torchinductor_               # code that torch.compile wrote
    | /torch/(_|nn/|optim/|autograd/|cuda/|utils/|distributed/|amp/|functional\.py|overrides\.py)
    | /gpuprobe/(sampler|virtual|probes|api|cli|recording|model|integrations|hazards)/
    """,
    re.VERBOSE,
)
_GENERATED = (
    "<autograd>",
    "<frozen",
    "<string>",
    "<eval_with_key",
    "<__array_function__",
    "<attrs",
)


def is_cpp(frame: Frame) -> bool:
    """Whether a frame is native code, by its file name ("??" and "" included)."""
    name = frame.filename
    return not (name.endswith(_PYTHON_SUFFIXES) or name.startswith("<")) and (
        frame.line == 0 or not name or name == "??" or _is_source_of_native(name)
    )


def _is_source_of_native(name: str) -> bool:
    return name.endswith((".cpp", ".cc", ".c", ".cu", ".cuh", ".h", ".hpp", ".so", ".pyd"))


def is_user_frame(frame: Frame) -> bool:
    """The default predicate: not native, installed, standard library, torch or generated."""
    name = frame.filename
    if is_cpp(frame) or name.startswith(_GENERATED):
        return False
    return _LIBRARY.search(name.replace("\\", "/")) is None


def short_name(frame: Frame) -> str:
    """``file:line in function``, or only the function for native frames."""
    if is_cpp(frame):
        return frame.name or UNKNOWN
    return f"{frame.filename}:{frame.line}" + (f" in {frame.name}" if frame.name else "")


def module_row(module: str, stack: int, *, before: bool) -> str:
    """The module as a key; ``stack`` and ``before`` say why where there is none."""
    if module or stack:
        return module or NO_MODULE
    return BEFORE_THE_TRACE if before else UNKNOWN


class Lines:
    """From stack ids to source lines, each stack looked at once.

    ``is_user`` decides which frames are the user's; the first such frame, from the innermost,
    is the line. Where there is none, one of the constants of this module says why.
    """

    def __init__(self, stacks: StackTable, is_user: UserFrame = is_user_frame) -> None:
        self._stacks = stacks
        self._is_user = is_user
        self._user: dict[int, bool] = {}  # frame id -> is it the user's
        self._frames: dict[int, int] = {}  # stack id -> frame id, or a negative reason

    def frame(self, stack: int) -> Frame | None:
        """The user's frame of a stack; None where it has none."""
        found = self._find(stack)
        return self._stacks.frames[found] if found > 0 else None

    def line(self, stack: int, *, before: bool = False) -> str:
        """The line as a key; ``before`` says that the memory predates the trace."""
        found = self._find(stack)
        if found > 0:
            return short_name(self._stacks.frames[found])
        if found == _NO_STACK:
            return BEFORE_THE_TRACE if before else UNKNOWN
        return AUTOGRAD_ENGINE if found == _ENGINE else NO_USER_FRAME

    def _find(self, stack: int) -> int:
        found = self._frames.get(stack)
        if found is None:
            found = self._frames[stack] = self._search(stack)
        return found

    def _search(self, stack: int) -> int:
        ids = self._stacks.stacks[stack]
        if not ids:
            return _NO_STACK
        user, frames = self._user, self._stacks.frames
        for index in ids:
            known = user.get(index)
            if known is None:
                known = user[index] = self._is_user(frames[index])
            if known:
                return index
        if any(frames[index].name.startswith(_ENGINE_NAMES) for index in ids):
            return _ENGINE
        return _LIBRARY_ONLY


_NO_STACK, _ENGINE, _LIBRARY_ONLY = -1, -2, -3
_ENGINE_NAMES = ("torch::autograd::Engine", "torch::autograd::Node", "_engine_run_backward")


def folded(stacks: StackTable, stack: int) -> str:
    """A stack as one line, outermost first, frames joined by ``;`` (the flame graph form)."""
    return ";".join(short_name(frame) for frame in reversed(stacks.frames_of(stack)))
