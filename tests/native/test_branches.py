"""Which way a branch on an unknown condition goes, by what its two sides do."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from gpuprobe.native.values.conditions import branches, source

logger = logging.getLogger(__name__)


class Undecided(Exception):
    """Both sides of a branch do work."""


class Unknown:
    """A condition that is decided where it is tested."""

    def __init__(self, bounds: bool = False) -> None:
        self.verdicts: list[branches.Verdict] = []
        self._bounds = bounds

    def __bool__(self) -> bool:
        code = sys._getframe().f_code
        verdict = branches.decide(sys._getframe(), lambda frame: frame.f_code is code)
        if verdict is None or (verdict.bound and not self._bounds):
            raise Undecided
        self.verdicts.append(verdict)
        return verdict.value

    def any(self) -> Unknown:
        return self

    all = item = any

    def __contains__(self, item: object) -> bool:
        return bool(self.any().item())

    def __lt__(self, other: object) -> Any:
        return self

    def __invert__(self) -> Unknown:
        return self


class Error(Exception):
    pass


# Each goes on ("works") where the branch is taken the right way.


def raises_where_true(x: Any) -> str:
    if x.any():
        raise Error
    return "works"


def raises_where_false(x: Any) -> str:
    if not x.all():
        message = "text"
        raise Error(message)
    return "works"


def raises_in_else(x: Any) -> str:
    if x.all():
        found = "works"
    else:
        raise Error
    return found


def raises_in_elif(x: Any) -> str:
    if 1 > 2:
        return "no"
    elif x.any():  # noqa: RET505
        raise Error
    return "works"


def returns_before_raising(x: Any) -> str:
    if x.all():
        return "works"
    raise Error


def goes_on_before_raising(x: Any) -> str:
    for _ in range(2):
        if x.all():
            continue
        raise Error
    return "works"


def asserted(x: Any) -> str:
    assert x.all(), "text"
    return "works"


def asserted_not(x: Any) -> str:
    assert not x.any()
    return "works"


def one_of_two(x: Any) -> str:
    if len("ab") == 2 and (len("a") == 2 or not x.all()):
        raise Error
    return "works"


def over_lines(x: Any) -> str:
    if (
        len("ab") == 2
        and not x.all()
    ):  # fmt: skip
        raise Error
    return "works"


def compared_with_true(x: Any) -> str:
    if bool(x.all()) is not True:
        raise Error
    return "works"


def compared(x: Any) -> str:
    if x < 3:
        raise Error
    return "works"


def contained(x: Any) -> str:
    if 0 in x:
        raise Error
    return "works"


def ends_the_process(x: Any) -> str:
    if x.any():
        print("stopping")
        sys.exit(1)
    return "works"


def calls_what_raises(x: Any) -> str:
    if x.any():
        _raise_error("text")
    return "works"


def _raise_error(text: str) -> None:
    raise Error(text)


def raises_on_both_of_two_ways(x: Any) -> str:
    if x.any():
        if len("a") == 1:
            raise Error("a")
        else:  # noqa: RET506
            raise Error("b")
    return "works"


def by_a_name(x: Any) -> str:
    valid = bool(x.all())
    number = 3
    if not valid:
        raise Error(number)
    return "works"


def by_a_walrus(x: Any) -> str:
    if not (valid := x.all()):
        raise Error(valid)
    return "works"


def by_a_helper(x: Any) -> str:
    if not _all(x):
        raise Error
    return "works"


def _all(x: Any) -> bool:
    return bool(x.all())


def by_a_helper_that_negates(x: Any) -> str:
    if _any_missing(x):
        raise Error
    return "works"


def _any_missing(x: Any) -> bool:
    return not _all(x)


def of_several(x: Any) -> str:
    if any(bool(item.any()) for item in (x, x)):
        raise Error
    return "works"


def of_all(x: Any) -> str:
    assert all([x, x])
    return "works"


def warns(x: Any) -> str:
    if x.any():
        warnings.warn("text", stacklevel=1)
    return "works"


def logs(x: Any) -> str:
    if not x.all():
        text = "text"
        if len(text) > 2:
            text += " and more"
        logger.warning(text)
    return "works"


def prints(x: Any) -> str:
    if x.any():
        print("text")
    return "works"


def prints_behind_and(x: Any) -> str:
    x.any() and print("text")  # type: ignore[func-returns-value]
    return "works"


def only_printed(x: Any) -> str:
    print(f"all there: {bool(x.all())}")
    return "works"


def only_printed_by_name(x: Any) -> str:
    there = bool(x.all())
    logger.info("all there: %s", there)
    return "works"


def not_used(x: Any) -> str:
    bool(x.any())
    return "works"


def reraised(x: Any) -> str:
    try:
        if x.any():
            raise Error
    except Error as error:
        raise ValueError from error
    return "works"


def isnan(x: Any) -> Any:
    return x


def isfinite(x: Any) -> Any:
    return x


def warns_or_raises(x: Any, strict: bool = True) -> str:
    if x.any():
        text = "text"
        if strict:
            raise Error(text)
        warnings.warn(text, stacklevel=1)
    return "works"


def raises_by_a_flag(x: Any) -> str:
    bad = None
    if x.any():
        bad = "bad"
    if bad is not None:
        bad = f"it is {bad}"
        raise Error(bad)
    return "works"


def warns_by_a_message(x: Any, strict: bool = False) -> str:
    """As ``check_min_max_scaling`` of botorch has it."""
    msg = None
    if x.any() or x.any():
        msg = "contained"
    if msg is not None:
        msg = f"not {msg}"
        if strict:
            raise Error(msg)
        warnings.warn(msg, stacklevel=1)
    return "works"


def raises_without_the_flag(x: Any) -> str:
    found = False
    for _ in range(2):
        if x.any():
            found = True
    if not found:
        raise Error
    return "works"


def is_finite(x: Any) -> str:
    if isnan(x).any() or isnan(x):
        found = "does not"
    else:
        found = "works"
    return found


def is_finite_by_name(x: Any) -> str:
    good = isfinite(x)
    return _step(x) if good.all() else "does not"


def is_finite_inverted(x: Any) -> str:
    bad = (~isfinite(x)).any()
    found = "works"
    if bad:
        found = _step(x, "does not")
    return found


def _step(x: Any, result: str = "works") -> str:
    return result


DECIDED: list[Callable[[Any], str]] = [
    raises_where_true,
    raises_where_false,
    raises_in_else,
    raises_in_elif,
    returns_before_raising,
    goes_on_before_raising,
    asserted,
    asserted_not,
    one_of_two,
    over_lines,
    compared_with_true,
    compared,
    contained,
    ends_the_process,
    calls_what_raises,
    raises_on_both_of_two_ways,
    by_a_name,
    by_a_walrus,
    by_a_helper,
    by_a_helper_that_negates,
    of_several,
    of_all,
    warns,
    logs,
    prints,
    prints_behind_and,
    only_printed,
    only_printed_by_name,
    not_used,
    reraised,
    warns_or_raises,
    raises_by_a_flag,
    warns_by_a_message,
    raises_without_the_flag,
    is_finite,
    is_finite_by_name,
    is_finite_inverted,
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("program", DECIDED, ids=lambda program: program.__name__)
def test_a_branch_goes_where_no_error_and_no_warning_is(
    program: Callable[[Any], str], capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = Unknown()
    assert program(unknown) == "works"
    assert unknown.verdicts
    for verdict in unknown.verdicts:
        assert verdict.file == __file__
        first = program.__code__.co_firstlineno
        assert first < verdict.line <= first + 12


# Nothing decides between the two sides of these.


def keeps_what_it_makes(x: Any) -> None:
    if x.any():
        cache = [0] * 1000  # noqa: F841 (memory that lives to the end of the function)


def keeps_what_it_makes_and_says_so(x: Any) -> None:
    if x.any():
        cache = [0] * 1000  # noqa: F841
        print("filled")


def computes_without_a_word(x: Any) -> None:
    if x.any():
        first = [0] * 1000
        second = first * 2  # noqa: F841


def works_on_both(x: Any) -> int:
    if x.any():
        return 1
    return 2


def works_in_one_line(x: Any) -> int:
    return 1 if x.any() else 2


def caught(x: Any) -> int:
    try:
        if x.any():
            raise Error
    except Error:
        return 1
    return 2


def suppressed(x: Any) -> int:
    from contextlib import suppress

    with suppress(Error):
        if x.any():
            raise Error
        return 1
    return 2


def loops(x: Any) -> int:
    while not x.all():
        x = _step(x)
    return 1


def a_size(x: Any) -> int:
    return [1, 2][bool(x.any())]


def warns_and_works(x: Any) -> int:
    found = 1
    if x.any():
        print("text")
        found = 2
    return found


def keeps_the_best(x: Any) -> int:
    best = 3
    for _ in range(2):
        if x < best:
            best = 2
    return best


def raises_on_both(x: Any) -> None:
    if x.any():
        raise Error
    raise ValueError


def used_for_both(x: Any) -> int:
    valid = bool(x.all())
    if not valid:
        raise Error
    return 1 if valid else 2


def handed_on(x: Any) -> Any:
    return _step(bool(x.any()))  # type: ignore[arg-type]


def sets_a_flag_that_works(x: Any) -> int:
    found = False
    if x.any():
        found = True
    if found:
        return 1
    return 2


def sets_a_flag_that_is_caught(x: Any) -> int:
    found = False
    if x.any():
        found = True
    try:
        if found:
            raise Error
    except Error:
        return 1
    return 2


def filters(x: Any) -> list[int]:
    return [1 for _ in range(2) if x.any()]


UNDECIDED: list[Callable[[Any], Any]] = [
    keeps_what_it_makes,
    keeps_what_it_makes_and_says_so,
    computes_without_a_word,
    works_on_both,
    works_in_one_line,
    caught,
    suppressed,
    loops,
    a_size,
    warns_and_works,
    keeps_the_best,
    raises_on_both,
    used_for_both,
    handed_on,
    sets_a_flag_that_works,
    sets_a_flag_that_is_caught,
    filters,
]


@pytest.mark.parametrize("program", UNDECIDED, ids=lambda program: program.__name__)
def test_where_both_sides_work_nothing_is_made_up(program: Callable[[Any], Any]) -> None:
    with pytest.raises(Undecided):
        program(Unknown())


def does_more(x: Any) -> str:
    return "more" if _does_more(x) else "less"


def _does_more(x: Any) -> bool:
    found = [0]
    if x.any():
        found[0] = 1
    return bool(found[0])


def does_more_where_false(x: Any) -> str:
    found = "less"
    if len(found) == 4 and not x.all():
        found = "more"
    return found


MORE: list[Callable[[Any], Any]] = [does_more, does_more_where_false]


@pytest.mark.parametrize("program", MORE, ids=lambda program: program.__name__)
def test_a_bound_is_what_does_more(program: Callable[[Any], Any]) -> None:
    unknown = Unknown(bounds=True)
    assert program(unknown) == "more"
    assert [verdict.bound for verdict in unknown.verdicts] == [True]
    with pytest.raises(Undecided):
        program(Unknown())


@pytest.mark.parametrize(
    "program",
    [works_on_both, works_in_one_line, caught, suppressed, loops, a_size, filters, raises_on_both],
    ids=lambda program: program.__name__,
)
def test_where_neither_side_does_more_nothing_is_made_up(program: Callable[[Any], Any]) -> None:
    with pytest.raises(Undecided):
        program(Unknown(bounds=True))


@pytest.mark.parametrize("program", DECIDED, ids=lambda program: program.__name__)
def test_lines_alone_tell_most_of_it(
    program: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10 keeps no columns."""
    monkeypatch.setattr(source, "_position", lambda code, at: None)
    try:
        assert program(Unknown()) == "works"
    except Undecided:
        assert program in (contained, by_a_helper_that_negates, prints_behind_and)


@pytest.mark.parametrize("program", UNDECIDED, ids=lambda program: program.__name__)
def test_lines_alone_make_nothing_up(
    program: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_position", lambda code, at: None)
    with pytest.raises(Undecided):
        program(Unknown())


def test_code_without_a_source_is_undecided() -> None:
    code = compile("def f(x):\n    if x.any():\n        raise ValueError\n", "<nowhere>", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(Undecided):
        names["f"](Unknown())
