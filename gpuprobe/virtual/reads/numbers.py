"""A number that was not computed, as a program holds it: NaN that knows what it is.

Arithmetic with it gives another one, comparisons give a truth that is decided where it is tested,
and what asks whether it is finite gets yes for an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Protocol, SupportsIndex

from gpuprobe.patching import Patches


class ValueReader(Protocol):
    """What a virtual machine knows of unknown values that a program uses."""

    def truth(self, default: bool) -> bool:
        """The truth that the program tests now; ``default`` is what NaN gives."""

    def finite(self) -> None:
        """The program asks whether a number is finite."""

    def whole(self) -> int:
        """The whole number that the program needs now. Raises ValueNeeded where nobody knows."""


class UnknownTruth(int):
    """What a comparison with an unknown number gives. It is 0 or 1 as NaN has it, until it is
    tested.
    """

    _reader: ValueReader

    def __new__(cls, reader: ValueReader, default: bool) -> UnknownTruth:
        made = super().__new__(cls, default)
        made._reader = reader
        return made

    def __bool__(self) -> bool:
        return self._reader.truth(int(self) == 1)

    def __repr__(self) -> str:
        return repr(int(self) == 1)

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (int(self),)


class UnknownNumber(float):
    """NaN in place of a value that was not computed."""

    _reader: ValueReader

    def __new__(cls, reader: ValueReader) -> UnknownNumber:
        made = super().__new__(cls, "nan")
        made._reader = reader
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return float, ("nan",)

    def __copy__(self) -> UnknownNumber:
        return self

    def __deepcopy__(self, memo: Any) -> UnknownNumber:
        return self

    __hash__ = float.__hash__

    def __eq__(self, other: object) -> Any:
        if float.__eq__(self, other) is NotImplemented:
            return NotImplemented
        return self is other or UnknownTruth(self._reader, False)

    def __ne__(self, other: object) -> Any:
        if float.__ne__(self, other) is NotImplemented:
            return NotImplemented
        return self is not other and UnknownTruth(self._reader, True)

    def __bool__(self) -> bool:
        return self._reader.truth(True)

    def __int__(self) -> int:
        return self._reader.whole()

    def __trunc__(self) -> int:
        return self._reader.whole()

    def __floor__(self) -> int:
        return self._reader.whole()

    def __ceil__(self) -> int:
        return self._reader.whole()

    def __round__(self, ndigits: SupportsIndex | None = None) -> Any:
        if ndigits is None:
            return self._reader.whole()
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's functions, called on it as on NaN."""
        plain = [math.nan if isinstance(item, UnknownNumber) else item for item in inputs]
        if ufunc.__name__ in ("isnan", "isinf", "isfinite"):
            self._reader.finite()
            return ufunc.__name__ == "isfinite"
        result = getattr(ufunc, method)(*plain, **options)
        unknown = isinstance(result, float) and result != result
        return UnknownNumber(self._reader) if unknown else result


def _arithmetic(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: UnknownNumber, *others: Any) -> Any:
        result = plain(self, *others)
        if type(result) is tuple:  # divmod
            return tuple(UnknownNumber(self._reader) for _ in result)
        if type(result) is not float or result == result:
            return result  # NotImplemented, and the few that are known: x ** 0
        return UnknownNumber(self._reader)

    method.__name__ = name
    return method


def _comparison(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: UnknownNumber, other: Any) -> Any:
        result = plain(self, other)
        return result if result is NotImplemented else UnknownTruth(self._reader, False)

    method.__name__ = name
    return method


_OPERATORS: Final = "add sub mul truediv floordiv mod divmod pow"
for _name in _OPERATORS.split():
    for _full in (f"__{_name}__", f"__r{_name}__"):
        setattr(UnknownNumber, _full, _arithmetic(_full))
for _full in ("__neg__", "__pos__", "__abs__"):
    setattr(UnknownNumber, _full, _arithmetic(_full))
for _full in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(UnknownNumber, _full, _comparison(_full))


def install(patches: Patches) -> None:
    """Have ``math.isnan`` and its kin take unknown numbers for finite ones."""

    def asked(original: Callable[[Any], bool], answer: bool) -> Callable[[Any], bool]:
        def ask(x: Any, /) -> bool:
            if isinstance(x, UnknownNumber):
                x._reader.finite()
                return answer
            return original(x)

        ask.__name__ = original.__name__
        return ask

    for original, answer in ((math.isnan, False), (math.isinf, False), (math.isfinite, True)):
        patches.set(math, original.__name__, asked(original, answer))
