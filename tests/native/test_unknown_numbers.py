"""Unknown numbers stay unknown in arithmetic, pass as finite, and report each decision."""

from __future__ import annotations

import copy
import json
import math
import pickle
import statistics
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.native.values import unknown
from gpuprobe.native.values.conditions import passing
from gpuprobe.native.values.unknown import PLACEHOLDER, UnknownFloat, UnknownInt, follow_math
from gpuprobe.patching import Patches


class Noted:
    """Decisions that are all false, and what was needed for them."""

    def __init__(self) -> None:
        self.needs: list[str] = []

    def decide(self, need: str, healthy: bool | None = None) -> bool:
        self.needs.append(need)
        return bool(healthy)

    def healthy(self) -> None:
        self.needs.append("finite")

    def extreme(self, comparison: str) -> bool | None:
        return passing.answer_of_extreme(_caller(), comparison)

    def ordered(self) -> bool:
        return passing.sorts(_caller())

    def escape(self, need: str, *, floating: bool = True) -> float:
        caller = _caller()
        text = floating and caller is not None and passing.only_text(caller)
        self.needs.append("text" if text else need)
        return math.nan if text else PLACEHOLDER

    def printed(self) -> None:
        self.needs.append("text")

    def whole(self, need: str, placeholder: int) -> int:
        self.needs.append(need)
        return placeholder


def _caller() -> FrameType | None:
    """The frame of a test, which calls what compares."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == unknown.__file__:
        frame = frame.f_back
    return frame


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def functions() -> Iterator[None]:
    patches = Patches()
    follow_math(patches)
    yield
    patches.undo()


OPERATIONS = st.sampled_from(
    [
        lambda x, n: x + n,
        lambda x, n: n + x,
        lambda x, n: x - n,
        lambda x, n: n - x,
        lambda x, n: x * n,
        lambda x, n: n * x,
        lambda x, n: x / n,
        lambda x, n: n / x,
        lambda x, n: x // n,
        lambda x, n: n // x,
        lambda x, n: x % n,
        lambda x, n: x**2,
        lambda x, n: n**x,
        lambda x, n: -x,
        lambda x, n: +x,
        lambda x, n: abs(x),
        lambda x, n: round(x, 2),
        lambda x, n: sum([x, n]),
        lambda x, n: divmod(x, n)[0],
        lambda x, n: copy.deepcopy([x])[0],
    ]
)
NUMBERS = st.one_of(st.integers(1, 9), st.floats(0.5, 9.0))


@given(st.lists(st.tuples(OPERATIONS, NUMBERS), max_size=12))
def test_what_is_computed_of_an_unknown_number_is_unknown(steps: list[tuple[Any, Any]]) -> None:
    noted = Noted()
    value: Any = UnknownFloat(noted)
    for operation, number in steps:
        value = operation(value, number)
    assert isinstance(value, UnknownFloat)
    assert isinstance(value, float)
    assert not noted.needs
    value < 1.0  # noqa: B015 - it is noted
    assert noted.needs == ["whether a number is less than another"]


@given(st.lists(st.tuples(OPERATIONS, st.integers(1, 9)), max_size=6))
def test_what_is_computed_of_an_unknown_whole_number_is_unknown(
    steps: list[tuple[Any, int]],
) -> None:
    noted = Noted()
    value: Any = UnknownInt(noted, 3)
    for operation, number in steps:
        value = operation(value, number)
    assert isinstance(value, (UnknownInt, UnknownFloat))
    assert not noted.needs


@pytest.mark.usefixtures("functions")
def test_tests_of_finiteness_pass(noted: Noted) -> None:
    value = UnknownFloat(noted)
    assert math.isfinite(value)
    assert not math.isnan(value)
    assert not math.isinf(value * 2)
    assert value == value
    assert not value != value  # noqa: SIM202
    assert value < math.inf
    assert value > -math.inf
    assert not value == math.nan  # noqa: SIM201
    assert noted.needs == ["finite"] * 8


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: math.exp(x),
        lambda x: math.sqrt(x),
        lambda x: math.log(x, 2),
        lambda x: math.pow(2, x),
        lambda x: math.fsum(iter([1, x])),
    ],
)
def test_functions_of_math_keep_it(compute: Any, noted: Noted) -> None:
    assert isinstance(compute(UnknownFloat(noted)), UnknownFloat)
    assert type(compute(1.0)) is float
    assert not noted.needs


@pytest.mark.usefixtures("functions")
def test_functions_that_were_imported_before_are_replaced(noted: Noted) -> None:
    assert isinstance(statistics.fmean([1.0, UnknownFloat(noted)]), UnknownFloat)


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: x < 1.0,
        lambda x: x >= UnknownFloat(x.decisions),
        lambda x: bool(x),
        lambda x: int(x),
        lambda x: float(x),
        lambda x: math.floor(x),
        lambda x: round(x),
        lambda x: 1.0 == x,  # noqa: SIM300
        lambda x: max([x, 0.5], key=abs),
        lambda x: max((x, 0), (x * 2, 1)),
        lambda x: min(range(2), key=[x, 0.5].__getitem__),
        lambda x: sorted([x, 0.5]),
        lambda x: sorted([x, x * 2], key=abs),
        lambda x: x.is_integer(),
        lambda x: statistics.mean([x, 1.0]),
    ],
)
def test_each_decision_is_noted(decide: Any, noted: Noted) -> None:
    decide(UnknownFloat(noted))
    assert noted.needs


def test_the_larger_of_an_unknown_number_and_another_is_unknown(noted: Noted) -> None:
    one, other = UnknownFloat(noted), UnknownFloat(noted)
    results = [
        max(one, 0.9), max(0.1, one), max([0.1, one, 0.9]), min(one, 0.1), min(0.9, one),
        min([0.9, one, 0.1], default=None), max(one, other), sorted([one, other])[0],
        sorted([other, one], reverse=True)[0],
    ]  # fmt: skip
    assert all(isinstance(result, UnknownFloat) for result in results)
    assert not noted.needs


def assigned(x: Any) -> str:
    value = float(x)
    total = 0.0
    total += value * 2
    return f"{value:.1f} of {total / 2}"


def also_compared(x: Any) -> str:
    value = float(x)
    return f"{value}" if value > 1 else "small"


def also_returned(x: Any) -> tuple[str, float]:
    value = float(x)
    return f"{value}", value


@pytest.mark.parametrize(
    "makes",
    [
        lambda x: f"{float(x):.3f}",
        lambda x: f"{100 * float(x) - 1:.1f} of {2}",
        lambda x: print(float(x), round(float(x), 2)),
        lambda x: str(-float(x)),
        lambda x: "{:.2f}".format(float(x)),  # noqa: UP032
        lambda x: "%.2f" % float(x),  # noqa: UP031
        lambda x: "%s: %.2f" % ("loss", float(x)),  # noqa: UP031
        assigned,
    ],
)
def test_a_plain_number_that_only_becomes_text_is_no_decision(makes: Any, noted: Noted) -> None:
    makes(UnknownFloat(noted))
    assert set(noted.needs) == {"text"}


@pytest.mark.parametrize(
    "takes",
    [
        lambda x: [float(x)],
        lambda x: float(x) > 1,
        lambda x: f"{'much' if float(x) > 1 else 'little'}",
        lambda x: f"{round(float(x))}",
        lambda x: f"{not float(x)}",
        lambda x: math.floor(float(x)),
        also_compared,
        also_returned,
    ],
)
def test_other_uses_of_a_plain_number_are_noted(takes: Any, noted: Noted) -> None:
    takes(UnknownFloat(noted))
    assert "a plain number" in noted.needs


def test_numpy_meets_its_rules(noted: Noted) -> None:
    numpy = pytest.importorskip("numpy")
    value = UnknownFloat(noted)
    assert numpy.isfinite(value)
    assert not numpy.isnan(value)
    assert isinstance(numpy.sqrt(value), UnknownFloat)
    assert noted.needs == ["finite"] * 2
    noted.needs.clear()
    numpy.less(value, 1.0)
    assert noted.needs == ["numpy.less"]
    numpy.mean([value, 1.0])
    assert len(noted.needs) > 1


def test_it_is_printed_as_not_a_number_and_stored_as_a_number(noted: Noted) -> None:
    value = UnknownFloat(noted)
    assert f"{value:8.3f} {value}" == "     nan nan"
    assert repr([value]) == "[nan]"
    assert set(noted.needs) == {"text"}
    assert json.loads(json.dumps(value)) == PLACEHOLDER  # C code reads the value
    assert type(pickle.loads(pickle.dumps(value))) is float


class Added:
    """A tensor of one element, read by a program that may only add it to a sum."""

    def item(self) -> int:
        return int(passing.only_added(sys._getframe(1)))


def test_what_is_added_to_a_sum_is_no_decision() -> None:
    tensor = Added()
    right = 0
    right += tensor.item()
    right += 2 * tensor.item()
    right -= -tensor.item()
    assert right == 4
    rows = tensor.item()
    assert not rows
    right += [0, 1][tensor.item()]
    right *= 1 + tensor.item()
    assert right == 4
