"""Readable names of kernels: demangled, without namespaces, parameters and what only addresses.

``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,
std::array<char*, 3ul> >(int, …)`` becomes ``vectorized_elementwise_kernel<4,
CUDAFunctor_add<float>>``. Different kernels may get the same name.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Final

LONGEST: Final = 200
"""Characters of a name: what is longer ends with an ellipsis."""

_ADDRESSING: Final = frozenset(
    {
        "array", "Array", "LoadWithoutCast", "OffsetCalculator", "StoreWithoutCast",
        "TrivialOffsetCalculator",
    }
)  # fmt: skip
"""Template arguments that say how a kernel finds its operands: torch's elementwise kernels have
them (aten/src/ATen/native/cuda/MemoryAccess.cuh)."""

_NUMBER: Final = re.compile(r"(?:\([\w: ]+\))?(-?\d+)[ul]*")
_LAMBDA: Final = re.compile(r"\{lambda\((.*)\)#\d+\}")
_OPENING: Final = {"<": ">", "(": ")", "{": "}"}


@functools.lru_cache(maxsize=65536)
def readable(symbol: str) -> str:
    """The readable name of a kernel by the name of its symbol. Names that are not mangled (Triton,
    functions of libraries) stay.
    """
    text = demangled(symbol) if symbol.startswith("_Z") else symbol
    short = text if text == symbol else shortened(text)
    return short if len(short) <= LONGEST else short[: LONGEST - 1] + "…"


@functools.cache
def _demangler() -> tuple[Callable[..., int | None], Callable[[int], None]] | None:
    """``__cxa_demangle`` of the C++ library that torch is linked to, and ``free``. Source of its
    interface: Itanium C++ ABI, 3.4 "Demangler API".
    """
    try:
        found = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_void_p
    found.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    free = ctypes.CDLL(None).free
    free.restype = None
    free.argtypes = (ctypes.c_void_p,)
    return found, free


def demangled(symbol: str) -> str:
    """The C++ name of a symbol; the symbol itself where it has none."""
    functions = _demangler()
    if functions is None:
        return symbol
    demangle, free = functions
    status = ctypes.c_int()
    made = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not made:
        return symbol
    try:
        return ctypes.string_at(made).decode(errors="replace")
    finally:
        free(made)


def shortened(name: str) -> str:
    """A demangled name in short; unchanged where its brackets do not match."""
    try:
        return _short(name.removeprefix("void "))
    except ValueError:
        return name


def _short(text: str) -> str:
    text = text.strip()
    number = _NUMBER.fullmatch(text)
    if number:
        return number[1]
    parts = _split(text, "::")
    types = ""
    while len(parts) > 1:
        found = _LAMBDA.match(parts[-1])
        if found:
            types = types or found[1]
        elif not parts[-1].startswith(("operator()", "(anonymous namespace)", "{")):
            break
        parts.pop()
    head, arguments = _head(parts[-1])
    if arguments is None:
        return f"{head}({types})" if types else head
    shown = [_short(one) for one in arguments if not _addresses(one)]
    return f"{head}<{', '.join(shown)}>" if shown else head


def _addresses(argument: str) -> bool:
    return _head(_split(argument.strip(), "::")[-1])[0] in _ADDRESSING


def _head(part: str) -> tuple[str, list[str] | None]:
    """A name, and its template arguments if it has any."""
    for at, character in enumerate(part):
        if character == "<":
            end = _closing(part, at)
            return part[:at], _split(part[at + 1 : end], ",")
        if character in "({" and at:
            return part[:at], None
    return part.strip(), None


def _closing(text: str, at: int) -> int:
    """Where the bracket at ``at`` is closed. Raises ValueError if it is not."""
    open_brackets: list[str] = []
    for i in range(at, len(text)):
        character = text[i]
        if character in _OPENING:
            open_brackets.append(_OPENING[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return i
    raise ValueError(text)


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators outside all brackets. Raises ValueError for brackets that do
    not match.
    """
    parts: list[str] = []
    start = i = 0
    while i < len(text):
        if text[i] in _OPENING:
            i = _closing(text, i)
        elif text.startswith(separator, i):
            parts.append(text[start:i])
            start = i + len(separator)
            i = start - 1
        i += 1
    return [*parts, text[start:]]
