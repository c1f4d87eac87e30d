"""Numbers that a program reads and that were not computed.

An `UnknownFloat` is a float of the value `PLACEHOLDER`, which is finite: code that tests for NaN
and infinity continues as with any healthy number. What is computed with it is unknown as well. Its
comparisons, its truth and its conversions are decisions, which `Decisions` makes and notes.

C code reads the value without calling a method. So the value itself can be recognised: a tensor
that is made with one, or the result of an operator that gets it as a scalar, is unknown, and the
functions of `math` are replaced while values are tracked (`follow_math`).
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from gpuprobe.patching import Patches

PLACEHOLDER: Final = 0.7357823848724365
"""The value of all unknown numbers: within (0, 1), so that logarithms, roots and divisions work,
and the same in float32 and float64, so that it is recognised."""

_SHOWN: Final = "nan"
"""How an unknown number is printed: nothing is invented."""


class Decisions(Protocol):
    """What decides where a program needs an unknown number: `gpuprobe.native.values.reads.Reads`.
    ``need`` describes the value that is needed.
    """

    def decide(self, need: str, healthy: bool | None = None) -> bool:
        """The truth of a condition; ``healthy`` if all finite numbers agree on it."""

    def healthy(self) -> None:
        """Note that numbers passed as finite."""

    def extreme(self, comparison: str) -> bool | None:
        """The answer by which `max` and `min` return the unknown number; None for others."""

    def ordered(self) -> bool:
        """Whether a sort compares, in which the order of unknown numbers does not matter."""

    def escape(self, need: str, *, floating: bool = True) -> float:
        """Note a number whose use is not followed from here on. Its value, NaN if it is
        ``floating`` and only becomes text.
        """

    def whole(self, need: str, placeholder: int) -> int:
        """A whole number, such as a size."""

    def printed(self) -> None:
        """Note that a number becomes text."""


def _compared(
    name: str, flips: Callable[[Any, Any], bool], same: bool, mark: str
) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        decisions: Decisions = self.decisions
        if self is other:
            decisions.healthy()
            return same
        if not isinstance(other, (UnknownFloat, UnknownInt)) and not math_isfinite(other):
            decisions.healthy()
            return flips(PLACEHOLDER, other)
        kept = decisions.extreme(name)
        if kept is not None:
            return kept
        if isinstance(other, (UnknownFloat, UnknownInt)) and decisions.ordered():
            return same
        return decisions.decide(f"whether a number {mark} another")

    compare.__name__ = name
    return compare


math_isfinite: Final = math.isfinite
"""The original function: `follow_math` replaces it."""


def _computed(name: str) -> Callable[..., Any]:
    native = getattr(float, name)

    def compute(self: Any, *others: Any) -> Any:
        plain = [
            PLACEHOLDER if isinstance(one, (UnknownFloat, UnknownInt)) else one for one in others
        ]
        if native(
            PLACEHOLDER, *(1.0 if isinstance(one, (int, float)) else one for one in plain)
        ) is (NotImplemented):
            return NotImplemented
        return UnknownFloat(self.decisions)

    compute.__name__ = name
    return compute


_ARITHMETIC: Final = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "pow", "rpow", "neg", "pos", "abs",
)  # fmt: skip
_COMPARISONS: Final = (
    ("__lt__", operator.lt, False, "is less than"),
    ("__le__", operator.le, True, "is at most"),
    ("__gt__", operator.gt, False, "is more than"),
    ("__ge__", operator.ge, True, "is at least"),
    ("__eq__", operator.eq, True, "equals"),
    ("__ne__", operator.ne, False, "differs from"),
)


class _Unknown:
    """What both kinds of unknown numbers share."""

    decisions: Decisions

    def __bool__(self) -> bool:
        return self.decisions.decide("whether a number is not zero")

    def __str__(self) -> str:
        self.decisions.printed()
        return _SHOWN

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        self.decisions.printed()
        try:
            return format(math.nan, spec)
        except ValueError:  # a format of whole numbers
            return _SHOWN

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __divmod__(self, other: Any) -> Any:
        return UnknownFloat(self.decisions), UnknownFloat(self.decisions)

    __rdivmod__ = __divmod__

    def item(self) -> Any:
        """The number itself, as of a NumPy scalar."""
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """A universal function of NumPy. Tests for NaN and infinity pass, comparisons are decided,
        other results are unknown.
        """
        name = ufunc.__name__
        plain = [_plain(one) for one in inputs]
        result = getattr(ufunc, method)(*plain, **kwargs)
        if name in ("isfinite", "isnan", "isinf", "signbit"):
            self.decisions.healthy()
            return result
        if getattr(result, "shape", ()) == () and getattr(result, "dtype", None) == "bool":
            return self.decisions.decide(f"numpy.{name}")
        if getattr(result, "shape", ()) == ():
            return UnknownFloat(self.decisions)
        self.decisions.escape(f"what numpy.{name} gets", floating=False)
        return result


class UnknownFloat(_Unknown, float):
    """A float that was not computed."""

    def __new__(cls, decisions: Decisions) -> UnknownFloat:
        made = super().__new__(cls, PLACEHOLDER)
        made.decisions = decisions
        return made

    def __hash__(self) -> int:
        return hash(PLACEHOLDER)

    def __float__(self) -> float:
        return self.decisions.escape("a plain number")

    def __int__(self) -> int:
        return self.decisions.whole("a whole number", 1)

    __trunc__ = __floor__ = __ceil__ = __int__

    def __round__(self, digits: Any = None) -> Any:
        return UnknownFloat(self.decisions) if digits is not None else int(self)

    def is_integer(self) -> bool:
        return self.decisions.decide("whether a number is whole")

    def as_integer_ratio(self) -> tuple[int, int]:
        return self.decisions.escape("a plain number", floating=False).as_integer_ratio()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (PLACEHOLDER,)


class UnknownInt(_Unknown, int):
    """A whole number that was not computed: noted where it is read, since sizes are used by C code
    without a call.
    """

    decisions: Decisions

    def __new__(cls, decisions: Decisions, placeholder: int) -> UnknownInt:
        made = super().__new__(cls, placeholder)
        made.decisions = decisions
        return made

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __round__(self, digits: Any = None) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (int.__int__(self),)


def _plain(value: Any) -> Any:
    if isinstance(value, UnknownInt):
        return int.__int__(value)
    return PLACEHOLDER if isinstance(value, UnknownFloat) else value


def _whole(name: str) -> Callable[..., Any]:
    native = getattr(int, name)

    def compute(self: Any, *others: Any) -> Any:
        try:
            result = native(self, *others)
        except ZeroDivisionError:  # of the value that replaces it
            return UnknownFloat(self.decisions)
        if result is NotImplemented:
            return result
        if isinstance(result, float):
            return UnknownFloat(self.decisions)
        return UnknownInt(self.decisions, result)

    compute.__name__ = name
    return compute


for _name in _ARITHMETIC:
    setattr(UnknownFloat, f"__{_name}__", _computed(f"__{_name}__"))
    setattr(UnknownInt, f"__{_name}__", _whole(f"__{_name}__"))
for _name, _flips, _same, _mark in _COMPARISONS:
    for _kind in (UnknownFloat, UnknownInt):
        setattr(_kind, _name, _compared(_name, _flips, _same, _mark))

_OF_SEVERAL: Final = ("fsum", "prod", "dist", "hypot", "sumprod")
_FUNCTIONS: Final = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "copysign", "cos", "cosh",
    "degrees", "erf", "erfc", "exp", "exp2", "expm1", "fabs", "fmod", "gamma", "ldexp",
    "lgamma", "log", "log10", "log1p", "log2", "nextafter", "pow", "radians", "remainder",
    "sin", "sinh", "sqrt", "tan", "tanh", "ulp",
)  # fmt: skip


def follow_math(patches: Patches) -> None:
    """Replace the functions of `math`, which read the value of a float without a call: they pass
    as finite, and what is computed of them is unknown.
    """
    results: dict[str, Callable[[Decisions], Any]] = {
        "isnan": lambda decisions: _passed(decisions, False),
        "isinf": lambda decisions: _passed(decisions, False),
        "isfinite": lambda decisions: _passed(decisions, True),
        "isclose": lambda decisions: decisions.decide("whether numbers are close"),
        "frexp": lambda decisions: (UnknownFloat(decisions), 0),
        "modf": lambda decisions: (UnknownFloat(decisions), UnknownFloat(decisions)),
    }
    made = {
        name: _followed(
            vars(math)[name], results.get(name, UnknownFloat), several=name in _OF_SEVERAL
        )
        for name in (*results, *_FUNCTIONS, *_OF_SEVERAL)
        if name in vars(math)  # some were added by a later version of Python
    }
    patches.set_all(math, made, within="")  # at once: it reads every module


def follow_logging(patches: Patches) -> None:
    """Replace what makes the text of a log message: ``%`` reads the value of a float without a
    call.
    """
    before = logging.LogRecord.getMessage

    @functools.wraps(before)
    def message(record: Any) -> str:
        args = record.args
        if isinstance(args, tuple) and any(isinstance(one, UnknownFloat) for one in args):
            record.args = tuple(_read_as_text(one) for one in args)
        try:
            return before(record)
        finally:
            record.args = args

    patches.set(logging.LogRecord, "getMessage", message)


def _read_as_text(value: Any) -> Any:
    if not isinstance(value, UnknownFloat):
        return value
    value.decisions.printed()
    return math.nan


def _passed(decisions: Decisions, truth: bool) -> bool:
    """The result of a test that all finite numbers pass, or fail."""
    decisions.healthy()
    return truth


def _followed(
    before: Callable[..., Any], result: Callable[[Decisions], Any], *, several: bool
) -> Callable[..., Any]:
    """A function of `math` that has another result of an unknown number. ``several``: arguments may
    be iterables of numbers.
    """

    @functools.wraps(before)
    def function(*args: Any, **kwargs: Any) -> Any:
        values: Iterable[Any] = args
        if several:
            args = tuple(arg if isinstance(arg, (int, float)) else [*arg] for arg in args)
            values = (one for arg in args for one in (arg if isinstance(arg, list) else (arg,)))
        for one in values:
            if isinstance(one, UnknownFloat):
                return result(one.decisions)
        return before(*args, **kwargs)

    return function
