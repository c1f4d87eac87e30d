"""Whose a frame is, and which line of a stack is the user's: decided here for all of gpuprobe.

Each file has an `Owner`. Two questions follow from it:

* Which line is memory or time attributed to? The innermost frame that the user wrote
  (`is_user_file`, `Lines`).
* Which line is at fault? The innermost frame of the program and its libraries (`is_program_file`,
  `innermost`), like the last line of a traceback: an error in torchvision is not one of its caller.

Files are classified by their names alone, as in recordings of other machines, and by the folders of
this process, where torch and gpuprobe may not be installed. Folders end with a separator, so that
``torchvision`` is not mistaken for ``torch``. Stacks are innermost first.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Final

from gpuprobe.model.place import NoPlace, Place, SourceLine, program_name
from gpuprobe.model.trace import Frame, StackTable

PACKAGE: Final = str(Path(__file__).parent) + os.sep
"""The prefix of the file names of gpuprobe's own code."""


class Owner(Enum):
    """Whose code a file is."""

    USER = "user"
    LIBRARY = "library"  # an installed package, except torch and gpuprobe
    PYTHON = "python"  # the standard library, and wrappers that back-port it
    TORCH = "torch"
    COMPILED = "compiled"  # written by torch.compile
    GENERATED = "generated"  # without a file: methods of a dataclass, what `exec` runs, python -c
    GPUPROBE = "gpuprobe"
    LAUNCHER = "launcher"  # the command that started the program
    NATIVE = "native"

    __hash__ = object.__hash__  # Enum's is a function in Python: sets of owners are in hot paths


_PYTHON_SUFFIXES = (".py", ".pyi", ".pyx", ".ipynb")
_NATIVE_SUFFIXES = (
    ".cpp", ".cc", ".cxx", ".c", ".cu", ".cuh", ".h", ".hpp", ".hxx", ".tcc", ".inl", ".inc",
    ".S", ".s", ".asm",  # glibc's: every thread begins in clone3.S
    ".f", ".f90", ".rs", ".go", ".m", ".mm", ".so", ".pyd",
)  # fmt: skip
_GENERATED = (
    "<autograd>",
    "<string>",
    "<eval_with_key",
    "<__array_function__",
    "<attrs",
)
_INSTALLED: Final = re.compile(r".*(?:^|/)(?:site|dist)-packages/+", re.DOTALL)
_OF_PACKAGES: Final = {
    "torch": Owner.TORCH,
    "functorch": Owner.TORCH,
    "triton": Owner.TORCH,  # it launches a kernel for the line that calls it
    "gpuprobe": Owner.GPUPROBE,
    "typing_extensions.py": Owner.PYTHON,  # it wraps functions that torch has deprecated
}
"""Owners by the first part of a path in ``site-packages``."""
_OF_PATHS: Final = re.compile(
    r"""
      (?P<COMPILED>/torchinductor_)
    | (?P<LIBRARY>/torch_geometric\.[^/]*\.py$)  # its templates, in the folder for temporary files
    | (?P<PYTHON>/lib/python\d(\.\d+)?t?/ | ^[A-Za-z]:/.*/Lib/)  # Windows, after \ became /
    | (?P<TORCH>/torch/(_|nn/|optim/|autograd/|cuda/|utils/|distributed/|amp/)
                |/torch/(functional|overrides)\.py)
    | (?P<GPUPROBE>
          /gpuprobe/(api|cli|engines|hazard_watch|hazards|integrations|model|native|probes)/
        | /gpuprobe/(pytest_plugin|recording|sampler|torch_support|virtual)/
        | /gpuprobe/(patching|recursion)\.py$)
    | (?P<LAUNCHER>/bin/(accelerate|gpuprobe|ipython|py\.?test|torchrun)$)
    """,
    re.VERBOSE,
)
"""Owners by names of folders: torch and gpuprobe are sometimes run where they were built."""
_STANDARD: Final = str(Path(os.__file__).parent) + os.sep
_MOST_FILES: Final = 65_536
_owners: Final[dict[str, Owner]] = {}  # by file name


def owner_of(file: str) -> Owner:
    """Whose code a file is, by its name; of native code only the names of sources are known."""
    owner = _owners.get(file)
    if owner is None:
        owner = _owner(file)
        if len(_owners) >= _MOST_FILES:
            _owners.clear()
        _owners[file] = owner
    return owner


def _owner(file: str) -> Owner:
    if file.startswith("<frozen"):
        return Owner.PYTHON
    if file.startswith("<"):
        return Owner.GENERATED if file.startswith(_GENERATED) else Owner.USER
    if not file or file == "??" or file.endswith(_NATIVE_SUFFIXES):
        return Owner.NATIVE
    if file.startswith(PACKAGE):
        return Owner.GPUPROBE
    inside = package_path(file)
    if inside is not None:
        return _OF_PACKAGES.get(inside.partition("/")[0], Owner.LIBRARY)
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__ and file.startswith(folder_of(torch)):
        return Owner.TORCH
    found = _OF_PATHS.search(file.replace("\\", "/"))
    if found is not None:
        return Owner[str(found.lastgroup)]
    return Owner.PYTHON if file.startswith(_STANDARD) else Owner.USER


def package_path(file: str) -> str | None:
    """The path of a file of an installed package, with ``/``, after the folder that has all
    packages; None for other files.
    """
    plain = file.replace("\\", "/")
    found = _INSTALLED.match(plain)
    return None if found is None else plain[found.end() :]


SITE_PACKAGES: Final = "site-packages/"
"""The prefix of the names of files of installed packages in baselines and their differences."""


def is_outside(name: str) -> bool:
    """Whether a name in a baseline is that of a file outside the project's folder."""
    return name.startswith((SITE_PACKAGES, ".../"))


def is_user_file(file: str) -> bool:
    """Whether the user wrote a file."""
    return owner_of(file) is Owner.USER


_PROGRAM: Final = frozenset((Owner.USER, Owner.LIBRARY))


def is_program_file(file: str) -> bool:
    """Whether a file belongs to the program or one of its libraries, and not to torch, Python or
    gpuprobe.
    """
    return owner_of(file) in _PROGRAM


_AT_FAULT: Final = _PROGRAM | {Owner.COMPILED}
USERS: Final = frozenset((Owner.USER,))
GENERATED: Final = frozenset((Owner.GENERATED,))


def innermost(frame: FrameType | None, owners: frozenset[Owner] = _AT_FAULT) -> FrameType | None:
    """The innermost frame of these owners, from ``frame`` outwards; None if there is none. By
    default those of the program and its libraries, and code that torch.compile wrote for it.
    """
    known = _owners
    while frame is not None:
        file = frame.f_code.co_filename
        if (known.get(file) or owner_of(file)) in owners:
            return frame
        frame = frame.f_back
    return None


def outside(frame: FrameType | None, files: str | tuple[str, ...]) -> FrameType | None:
    """The innermost frame, from ``frame`` outwards, whose file's name begins with none of these."""
    while frame is not None and frame.f_code.co_filename.startswith(files):
        frame = frame.f_back
    return frame


def program_stack(frame: FrameType | None) -> Iterator[Frame]:
    """The frames from ``frame`` outwards, innermost first, without gpuprobe's own."""
    while (frame := outside(frame, PACKAGE)) is not None:
        code = frame.f_code
        yield Frame(name_of(code.co_filename), frame.f_lineno or 0, code.co_name)
        frame = frame.f_back


def is_cpp(frame: Frame) -> bool:
    """Whether a frame is native code, by its file name (``??`` and an empty one included)."""
    name = frame.filename
    return not (name.endswith(_PYTHON_SUFFIXES) or name.startswith("<")) and (
        frame.line == 0 or owner_of(name) is Owner.NATIVE
    )


def is_user_frame(frame: Frame) -> bool:
    """Whether the user wrote a frame's code."""
    return is_user_file(frame.filename) and not is_cpp(frame)


_OWNERS_OF_PLUMBING: Final = frozenset(
    (
        Owner.TORCH,
        Owner.COMPILED,
        Owner.GENERATED,
        Owner.GPUPROBE,
        Owner.LAUNCHER,
        Owner.NATIVE,
    )
)
_WRAPPERS: Final = re.compile(
    r"^<frozen|/lib/python\d(\.\d+)?t?/(contextlib|runpy|threading|functools|importlib/.*)(\.py)?"
)


def is_plumbing(frame: Frame) -> bool:
    """Whether a frame has little use for a user: native code, PyTorch's own Python
    (``_call_impl``, ``backward``), gpuprobe, generated code, and wrappers of the standard library.
    Frames of other installed packages are not plumbing: they identify the layer.
    """
    owner = owner_of(frame.filename)
    if owner in _OWNERS_OF_PLUMBING or is_cpp(frame):
        return True
    return owner is Owner.PYTHON and _WRAPPERS.search(frame.filename.replace("\\", "/")) is not None


def folder_of(module: ModuleType) -> str:
    """The prefix of the file names of all code of a package."""
    return str(Path(str(module.__file__)).parent) + os.sep


def line_of(code: CodeType, instruction: int) -> int:
    """The source line of an instruction (an offset, as ``f_lasti``)."""
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


def name_of(file: str) -> str:
    """The name of a file in messages: ``In [3]`` for the code of a notebook's cell, which IPython
    compiles under another name (a temporary file's, or ``<ipython-input-…>``); otherwise ``file``.

    The cell's text is added to `linecache` under its new name, as it is under the old one, so that
    its lines can be shown.
    """
    if "ipython" not in file and "ipykernel" not in file:
        return file
    return _cell_name(file)


def _cell_name(file: str) -> str:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return file
    # A pair such as ("Cell", "In[3]"); None for other files (IPython's CachingCompiler).
    found = shell.compile.format_code_name(file)
    if found is None or not found[1].startswith("In["):
        return file
    name = f"In {found[1][2:]}"
    lines = linecache.getlines(file)
    linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return name


def file_and_line(file: str, line: int) -> str:
    """``file:line`` for a reader: for installed packages only the part after the folder that
    contains them all.
    """
    return f"{package_path(file) or name_of(file)}:{line}"


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

    The line is that of the innermost frame of the user; if there is none, the `NoPlace` with the
    reason.
    """

    def __init__(self, stacks: StackTable) -> None:
        self._stacks = stacks
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
                known = user[index] = is_user_frame(frames[index])
            if known:
                return index
        if any(frames[index].name.startswith(_ENGINE_NAMES) for index in ids):
            return _ENGINE
        return _LIBRARY_ONLY


_NO_STACK, _ENGINE, _LIBRARY_ONLY = -1, -2, -3
_ENGINE_NAMES = ("torch::autograd::Engine", "torch::autograd::Node", "_engine_run_backward")
