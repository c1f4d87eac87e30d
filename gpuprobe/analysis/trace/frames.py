"""The frame of a stack that is shown to a user: the innermost one that the user wrote.

Stacks are innermost first. A frame is the user's unless it is C++, PyTorch, an installed
package, the standard library or generated code. Callers can pass another predicate.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gpuprobe.model.place import NoPlace, Place, SourceLine, program_name
from gpuprobe.model.trace import Frame, StackTable

UserFrame = Callable[[Frame], bool]

_PYTHON_SUFFIXES = (".py", ".pyi", ".pyx", ".ipynb")
_NATIVE_SUFFIXES = (
    ".cpp", ".cc", ".cxx", ".c", ".cu", ".cuh", ".h", ".hpp", ".hxx", ".tcc", ".inl", ".inc",
    ".S", ".s", ".asm",  # glibc's: every thread begins in clone3.S
    ".f", ".f90", ".rs", ".go", ".m", ".mm", ".so", ".pyd",
)  # fmt: skip
_RUNS_PROGRAMS = r"""
    | /gpuprobe/(api|cli|engines|hazard_watch|hazards|integrations|model|native|probes)/
    | /gpuprobe/(pytest_plugin|recording|sampler|torch_support|virtual)/
    | /gpuprobe/(patching|recursion)\.py$
    | /bin/(accelerate|gpuprobe|ipython|py\.?test|torchrun)$  # the command itself
"""
"""Code below the program on its stacks, and gpuprobe's own where it is not installed."""
_LIBRARY = re.compile(
    r"""
    /(site|dist)-packages/          # installed
    | /lib/python\d(\.\d+)?t?/      # the standard library
    | ^[A-Za-z]:/.*/Lib/            # the same on Windows, after \ became /
    | /torchinductor_               # code that torch.compile wrote
    | /torch/(_|nn/|optim/|autograd/|cuda/|utils/|distributed/|amp/|functional\.py|overrides\.py)
    """
    + _RUNS_PROGRAMS,
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
    """Whether a frame is native code, by its file name (``??`` and an empty one included)."""
    name = frame.filename
    return not (name.endswith(_PYTHON_SUFFIXES) or name.startswith("<")) and (
        frame.line == 0 or not name or name == "??" or _is_source_of_native(name)
    )


def _is_source_of_native(name: str) -> bool:
    return name.endswith(_NATIVE_SUFFIXES)


def is_user_frame(frame: Frame) -> bool:
    """Whether a frame is the user's: not native, installed, standard library, torch or
    generated.
    """
    name = frame.filename
    if is_cpp(frame) or name.startswith(_GENERATED):
        return False
    return _LIBRARY.search(name.replace("\\", "/")) is None


_PLUMBING = re.compile(
    r"""
    (^|/)(site|dist)-packages/(torch|gpuprobe)(/|\.py)
    | /torch/(_|nn/|optim/|autograd/|cuda/|utils/|distributed/|amp/|functional\.py|overrides\.py)
    | /torchinductor_
    | /lib/python\d(\.\d+)?t?/(contextlib|runpy|threading|functools|importlib/.*)(\.py)?
    """
    + _RUNS_PROGRAMS,
    re.VERBOSE,
)


def is_plumbing(frame: Frame) -> bool:
    """Whether a frame has little use for a user: native code, PyTorch's own Python
    (``_call_impl``, ``backward``), gpuprobe, generated code, and wrappers of the standard library.
    Frames of other installed packages are not plumbing: they identify the layer.
    """
    name = frame.filename
    if is_cpp(frame) or name.startswith(_GENERATED):
        return True
    return _PLUMBING.search(name.replace("\\", "/")) is not None


def place_of(frame: Frame) -> SourceLine:
    """The frame's line; for native frames only the function."""
    if is_cpp(frame):
        return Place("", 0, frame.name) if frame.name else NoPlace.UNKNOWN
    return Place(frame.filename, frame.line, program_name(frame.name))


def short_name(frame: Frame) -> str:
    """``file:line in function``, or only the function for native frames."""
    return str(place_of(frame))


def module_row(module: str, stack: int, *, before: bool) -> str:
    """The module as a key. If there is none, ``stack`` and ``before`` select the reason."""
    if module or stack:
        return module or NoPlace.NO_MODULE
    return NoPlace.BEFORE_THE_TRACE if before else NoPlace.UNKNOWN


class Lines:
    """The source line of each stack id; each stack is searched once.

    The line is the innermost frame for which ``is_user`` holds. If there is none, it is the
    `NoPlace` with the reason.
    """

    def __init__(self, stacks: StackTable, is_user: UserFrame = is_user_frame) -> None:
        self._stacks = stacks
        self._is_user = is_user
        self._user: dict[int, bool] = {}  # frame id -> is it the user's
        self._places: dict[int, SourceLine] = {}  # by frame id
        self._frames: dict[int, int] = {}  # stack id -> frame id, or a negative reason

    def frame(self, stack: int) -> Frame | None:
        """The user's frame of a stack, or None."""
        found = self._find(stack)
        return self._stacks.frames[found] if found > 0 else None

    def place(self, stack: int, *, before: bool = False) -> SourceLine:
        """The line of a stack; ``before``: the memory was allocated before the trace."""
        found = self._find(stack)
        if found > 0:
            place = self._places.get(found)
            if place is None:
                place = self._places[found] = place_of(self._stacks.frames[found])
            return place
        if found == _NO_STACK:
            return NoPlace.BEFORE_THE_TRACE if before else NoPlace.UNKNOWN
        return NoPlace.AUTOGRAD_ENGINE if found == _ENGINE else NoPlace.NO_USER_FRAME

    def line(self, stack: int, *, before: bool = False) -> str:
        """`place` as text."""
        return str(self.place(stack, before=before))

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
