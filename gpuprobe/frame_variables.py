"""The variables of a frame, read without any effect on the frame or the program.

Before Python 3.13 the attribute ``f_locals`` of a function's frame is a snapshot that the frame
keeps: what it held once stays alive until the function returns, deleted or not, and the dict that
the program's own ``locals()`` returned is refreshed, as it is the same one. In the body of a class
it can add names. For these versions the variables are read from the interpreter's own memory. Since
3.13 (PEP 667) ``f_locals`` is a view that keeps nothing.

Layouts: ``Include/cpython/frameobject.h`` of CPython 3.10, ``Include/internal/pycore_frame.h`` of
3.11 and 3.12; they are the same in all releases of a minor version. Each frame is checked to have
this layout before anything is read as an object.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FrameType
from typing import Any, Final, NamedTuple

_WORD: Final = ctypes.sizeof(ctypes.c_void_p)


class _Layout(NamedTuple):
    """Offsets in the interpreter's record of a call, in words from its beginning."""

    frame: int | None
    """The pointer to the frame object; None if the record is the frame object."""
    code: int
    namespace: int
    """The pointer to the snapshot, or to the names of a module or the body of a class."""
    slots: int
    """The first local variable."""


_RECORD: Final = 3
"""The offset of a frame object's pointer to the record, in words: after its head and ``f_back``."""


def _layout() -> _Layout | None:
    if object.__basicsize__ != 2 * _WORD or sys.implementation.name != "cpython":
        return None  # a build that traces references (Py_TRACE_REFS)
    return {
        (3, 10): _Layout(frame=None, code=4, namespace=7, slots=44),
        (3, 11): _Layout(frame=5, code=4, namespace=3, slots=9),
        (3, 12): _Layout(frame=6, code=0, namespace=5, slots=9),
    }.get(sys.version_info[:2])


_LAYOUT: Final = _layout()
_KEEPS: Final = sys.version_info < (3, 13)
"""Whether a frame keeps what its ``f_locals`` once had."""

_VIEW: Final = type((lambda: sys._getframe().f_locals)())
"""The type of ``f_locals`` of a function's frame."""


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame by name, including those of its closure: a new dict, which keeps
    them alive as long as the caller keeps it.

    The frame belongs to the calling thread, or has ended: in other threads it would change
    meanwhile. It must not belong to a generator that was closed before its end: for those Python
    3.13.0 reads memory that was freed (python/cpython#125723).
    """
    if not _KEEPS:
        local = frame.f_locals
        # Also for a module's frame, while a comprehension in it runs.
        return dict(local) if type(local) is _VIEW else _of_dict(local)
    layout = _LAYOUT
    start = _record(frame, layout) if layout is not None else None
    if layout is None or start is None:
        return _emptied(frame)
    code = frame.f_code
    found: dict[str, Any] = {}
    if not code.co_flags & inspect.CO_OPTIMIZED:
        found = _of_dict(_object(start + layout.namespace * _WORD))
    for slot, (name, shared) in enumerate(_names(code)):
        value = _object(start + (layout.slots + slot) * _WORD)
        if shared and type(value) is CellType:
            try:
                value = value.cell_contents
            except ValueError:  # empty
                continue
        if value is not _NOTHING:
            # A comprehension's variable comes before the closure's of that name.
            found.setdefault(name, value)
    return found


def variables_elsewhere(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame of another thread, which may continue meanwhile: its record of the
    call may be gone at any moment. Before Python 3.13 a dict that the program got from ``locals()``
    in that very call loses them.
    """
    return _emptied(frame) if _KEEPS else variables(frame)


def _of_dict(namespace: Any) -> dict[str, Any]:
    """The names of a module or of the body of a class, without running code of a class: a namespace
    may have any type (``__prepare__``).
    """
    return dict(dict.items(namespace)) if issubclass(type(namespace), dict) else {}


_NOTHING: Final = object()


def _object(address: int) -> Any:
    """The object that the pointer at an address refers to; `_NOTHING` if it is null."""
    if ctypes.c_void_p.from_address(address).value is None:
        return _NOTHING
    return ctypes.py_object.from_address(address).value


def _record(frame: FrameType, layout: _Layout) -> int | None:
    """The address of the record of a frame's call; None if its layout is not the expected one."""
    start = id(frame)
    if layout.frame is not None:
        start = ctypes.c_void_p.from_address(start + _RECORD * _WORD).value or 0
        if not start or _pointer(start, layout.frame) != id(frame):
            return None
    return start if _pointer(start, layout.code) == id(frame.f_code) else None


def _pointer(start: int, word: int) -> int | None:
    return ctypes.c_void_p.from_address(start + word * _WORD).value


def _names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """The variables of a function in the order of their slots, and whether each may be in a cell.

    Since 3.11 a parameter that inner functions use has one slot, before that two.
    """
    cells, free = code.co_cellvars, code.co_freevars
    one_slot = sys.version_info >= (3, 11)
    own = code.co_varnames
    for name in own:
        yield name, one_slot and name in cells
    for name in cells:
        if not (one_slot and name in own):
            yield name, True
    for name in free:
        yield name, True


def _emptied(frame: FrameType) -> dict[str, Any]:
    """The variables from ``f_locals``, if the layout of the interpreter's records is unknown: the
    snapshot of a function is emptied of its variables again. A dict that the program got from
    ``locals()`` in that very call loses them too.
    """
    code = frame.f_code
    local = frame.f_locals
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return _of_dict(local)
    found = dict(local)
    for name, _ in _names(code):
        local.pop(name, None)
    return found
