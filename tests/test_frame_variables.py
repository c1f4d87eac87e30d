"""Reading a frame's variables: neither the frame nor the program can tell that it was done."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gpuprobe import frame_variables
from gpuprobe.frame_variables import variables, variables_elsewhere

KEEPS = sys.version_info < (3, 13)
GPUPROBE = Path(frame_variables.__file__).parent


class Thing:
    """Something that is told by its identity and by when it ends."""


def callers() -> dict[str, Any]:
    return variables(sys._getframe(1))


def test_parameters_locals_cells_and_the_closure() -> None:
    outer, unused = Thing(), Thing()

    def function(first: Any, *rest: Any, key: Any = 3, **others: Any) -> dict[str, Any]:
        shared, own = Thing(), Thing()

        def inner() -> Any:
            return first, shared, outer

        found = callers()
        assert found["shared"] is shared
        assert found["own"] is own
        assert found["inner"] is inner
        return found

    first = Thing()
    found = function(first, 1, 2, other=4)
    assert found.pop("first") is first
    assert found.pop("outer") is outer
    assert found.pop("rest") == (1, 2)
    assert found.pop("others") == {"other": 4}
    assert found.pop("key") == 3
    assert set(found) == {"shared", "own", "inner"}
    assert unused is not first


def test_variables_that_have_no_value_are_left_out() -> None:
    def function() -> set[str]:
        gone = cell = 1
        del gone, cell
        found = set(callers())
        later = 2

        def inner() -> Any:
            return later, cell  # noqa: F821

        assert inner
        return found

    assert function() <= {"inner"}  # a function is made where its def is: after the reading


def test_what_a_function_deletes_ends_at_once() -> None:
    def function() -> None:
        mine = Thing()
        shared = Thing()
        ends = weakref.ref(mine), weakref.ref(shared)

        def inner() -> Any:
            return shared  # noqa: F821

        assert set(callers()) >= {"mine", "shared", "inner"}
        del mine
        assert ends[0]() is None
        del shared
        assert ends[1]() is None

    function()


def test_a_name_that_is_used_again_lets_go_of_what_it_had() -> None:
    for thing in (Thing(), Thing()):
        end = weakref.ref(thing)
        callers()
    thing = Thing()
    assert end() is None
    assert thing


def test_what_the_programs_locals_returned_stays_as_it_was() -> None:
    def function() -> None:
        early = Thing()
        seen = locals()
        seen["added"] = 1
        keys, had = list(seen), seen["early"]
        end = weakref.ref(early)
        early = Thing()
        late = Thing()
        assert callers()["late"] is late
        assert list(seen) == keys
        assert seen["early"] is had is end()
        assert seen["added"] == 1

    function()


@pytest.mark.skipif(not KEEPS, reason="locals() returns a dict of its own since Python 3.13")
def test_a_snapshot_that_the_program_took_is_kept_as_the_interpreter_keeps_it() -> None:
    """Before 3.13 the program's own ``locals()`` keeps what it had until the function returns."""

    def function(read: bool) -> bool:
        thing = Thing()
        end = weakref.ref(thing)
        assert locals()["thing"] is thing
        if read:
            callers()
        del thing
        return end() is not None

    assert function(read=False)
    assert function(read=True)


def test_a_generators_variables_end_when_it_deletes_them() -> None:
    def generate(thing: Thing) -> Iterator[Any]:
        end = weakref.ref(thing)
        yield callers()["thing"] is thing
        del thing
        yield end

    running = generate(Thing())
    assert next(running)
    assert running.gi_frame is not None
    assert isinstance(variables(running.gi_frame)["thing"], Thing)
    assert next(running)() is None
    frame = running.gi_frame
    assert next(running, None) is None
    assert "thing" not in variables(frame)


def test_a_comprehensions_variables() -> None:
    things = [Thing(), Thing()]

    def function(outer: int) -> list[dict[str, Any]]:
        return [callers() for thing in things if [thing, outer]]

    for found, thing in zip(function(5), things, strict=True):
        assert found["thing"] is thing
        assert found["outer"] == 5


def test_a_comprehensions_variable_hides_the_closures() -> None:
    name = Thing()

    def function() -> Any:
        inside = [callers()["name"] for name in (1, 2)]
        return inside, callers()["name"], name

    assert function() == ([1, 2], name, name)


def test_the_body_of_a_class_gets_no_names() -> None:
    free = Thing()
    found = {}

    class Body:
        attribute = free
        found["in it"] = callers()

        def method(self) -> Any:
            return __class__  # type: ignore[name-defined]

    assert found["in it"]["attribute"] is free
    assert set(vars(Body)) - {"__static_attributes__", "__firstlineno__"} == {
        "__module__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "attribute",
        "method",
    }


def test_the_namespace_of_a_module_stays_as_it_is() -> None:
    namespace: dict[str, Any] = {"callers": callers, "thing": Thing()}
    exec("found = callers(); inside = [callers() for item in (1, 2)]; del thing", namespace)
    assert namespace["found"]["callers"] is callers
    assert isinstance(namespace["found"]["thing"], Thing)
    assert [found["item"] for found in namespace["inside"]] == [1, 2] or sys.version_info[:2] == (
        3,
        12,
    )
    assert set(namespace) == {"__builtins__", "callers", "found", "inside"}


def test_exec_with_names_of_two_kinds() -> None:
    outside: dict[str, Any] = {"callers": callers}
    inside: dict[str, Any] = {"thing": 1}
    exec("found = callers()", outside, inside)
    assert inside == {"thing": 1, "found": {"thing": 1}}
    assert set(outside) == {"__builtins__", "callers"}


class Strict(dict[str, Any]):
    """A class's namespace that does not like to be read."""

    def keys(self) -> Any:
        raise AssertionError

    __iter__ = items = keys


def test_a_namespace_with_code_of_its_own_does_not_run_it() -> None:
    namespace = Strict(thing=1)
    exec("found = callers()", {"callers": callers}, namespace)
    assert namespace["found"] == {"thing": 1}


def test_the_frames_of_an_exception_that_was_caught() -> None:
    def function() -> None:
        thing = Thing()
        ends.append(weakref.ref(thing))
        raise ValueError("here")

    ends: list[weakref.ref[Thing]] = []
    with pytest.raises(ValueError, match="here") as caught:
        function()
    frame = caught.tb.tb_next.tb_frame  # type: ignore[union-attr]
    assert variables(frame)["thing"] is ends[0]()
    frame.clear()
    assert "thing" not in variables(frame)
    assert ends[0]() is None


def test_every_variable_of_every_frame_is_what_the_interpreter_gives() -> None:
    """Against ``f_locals``, in all frames below: pytest's, and others of many kinds."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        found = variables(frame)
        expected = dict(frame.f_locals)
        assert found.keys() == expected.keys()
        assert all(value is expected[name] for name, value in found.items())
        count += len(found)
        frame = frame.f_back
    assert count > 100


@pytest.mark.skipif(not KEEPS, reason="f_locals keeps nothing since Python 3.13")
def test_an_interpreter_with_records_of_an_unknown_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_variables, "_LAYOUT", None)
    test_parameters_locals_cells_and_the_closure()
    test_what_a_function_deletes_ends_at_once()
    test_a_name_that_is_used_again_lets_go_of_what_it_had()
    test_a_generators_variables_end_when_it_deletes_them()
    test_the_namespace_of_a_module_stays_as_it_is()


@pytest.mark.skipif(not KEEPS, reason="read by other means since Python 3.13")
def test_this_interpreters_records_have_the_expected_layout() -> None:
    layout = frame_variables._LAYOUT
    assert layout is not None
    assert frame_variables._record(sys._getframe(), layout) is not None
    shifted = layout._replace(code=layout.code + 1)
    assert frame_variables._record(sys._getframe(), shifted) is None


def test_reading_leaves_no_object_behind() -> None:
    def function() -> int:
        thing = Thing()
        callers()
        before = sys.getrefcount(thing)
        for _ in range(10):
            callers()
        return sys.getrefcount(thing) - before

    assert function() == 0
    gc.collect()


def test_no_other_file_reads_the_variables_of_frames() -> None:
    readers = {"f_locals", "getargvalues", "getinnerframes", "getouterframes", "getgeneratorlocals"}
    readers |= {"getcoroutinelocals", "capture_locals", "PyFrame_GetLocals", "PyFrame_FastToLocals"}
    found = set()
    for file in GPUPROBE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "arg", None)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
            if name in readers:
                found.add(file.relative_to(GPUPROBE).as_posix())
    assert found == {"frame_variables.py"}


def test_the_variables_of_another_thread_end_when_it_deletes_them() -> None:
    steps = threading.Semaphore(0), threading.Semaphore(0)
    ends: list[weakref.ref[Thing]] = []

    def work() -> None:
        thing = Thing()
        ends.append(weakref.ref(thing))
        steps[0].release()
        steps[1].acquire()
        del thing
        steps[0].release()
        steps[1].acquire()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        steps[0].acquire()
        frame: FrameType | None = sys._current_frames()[thread.ident or 0]
        while frame is not None and frame.f_code is not work.__code__:
            frame = frame.f_back
        assert frame is not None
        assert variables_elsewhere(frame)["thing"] is ends[0]()
        steps[1].release()
        steps[0].acquire()
        assert ends[0]() is None
    finally:
        steps[1].release(2)
        thread.join()
