"""Nothing that gpuprobe does changes a process: a sample of ``benchmarks/whole_programs.py``, which
runs as many random programs as wanted, and all faults of `tests/faults` at each level.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import whole_programs
from parts import PARTS
from planted import WAYS, nothing
from whole_programs import (
    PROGRAM,
    WATCHERS,
    Launch,
    Plan,
    Runs,
    changes,
    difference,
    drawn,
    running,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="what is observed is in /proc"),
]

PLANTED = str(PROGRAM.parent / "planted.py")
LEVELS = ("counters", "trace")


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with running("cpu") as made:
        yield made


@pytest.mark.parametrize("seed", range(1, 5))
def test_random_programs_are_the_same(runs: Runs, seed: int) -> None:
    plan = drawn(seed)
    assert not changes(runs, plan, [LEVELS[seed % 2]]), plan.text()


@pytest.mark.parametrize("name", [*PARTS][::16])
def test_faults_change_nothing_but_documented_lines(runs: Runs, name: str) -> None:
    part = PARTS[name]
    flags = () if part.started else None
    plan = Plan(7, (f"{name}@{part.places[0]}",), teardown=part.teardown, flags=flags)
    assert not changes(runs, plan, [LEVELS[len(name) % 2]])


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("counters", "replaces_functions_of_os@backward raises_at_exit@backward"),
        ("trace", "replaces_functions_of_os@step"),
        ("trace", "counts_calls_of_os@model"),
        ("trace", "replaces_the_import@step raises_syntax@step"),
        ("counters", "ends_at_exit@start forks_a_child_that_exits@step"),
        ("trace", "replaces_the_clocks_by_one_that_fails@start"),
    ],
)
def test_programs_that_replace_what_gpuprobe_calls(runs: Runs, level: str, words: str) -> None:
    assert not changes(runs, Plan(7, tuple(words.split())), [level])


@pytest.mark.parametrize("kind", ["closed", "broken", "full", "other"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_programs_are_the_same_whatever_their_streams_are(
    runs: Runs, stream: str, kind: str
) -> None:
    launch = Launch(**{stream: kind})
    assert not changes(runs, Plan(7, ("prints@step",), launch), ["counters"])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "keeps_a_history"])
def test_a_watcher_that_changes_a_process_is_reported(
    runs: Runs, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WATCHERS, "this", (PLANTED, way))
    plan = Plan(7, (WAYS[way][1],))
    assert difference(runs.run(plan, "bare"), runs.run(plan, "this"))


def test_a_watcher_that_changes_nothing_is_not(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WATCHERS, "this", (PLANTED, nothing.__name__))
    words = [word for _, word in WAYS.values() if "recurse" not in word and "exits" not in word]
    for word in words[::4]:
        assert not changes(runs, Plan(7, (word,)), ["this"]), word


def test_every_part_is_drawn_at_each_of_its_places() -> None:
    words = {word for seed in range(20_000) for word in drawn(seed).words}
    assert words == {f"{part.name}@{place}" for part in PARTS.values() for place in part.places}


def test_only_documented_lines_are_left_out() -> None:
    text = b"""a: gpuprobe: warning: one
  hint: of it
b
No stream hazards among 26 operations
  see the blind spots below for what was not checked

The host waits for the GPU at
      3 x  a.py:6  item

Blind spots
  - kernels outside torch's dispatcher
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    model(x)
  File "/lib/site-packages/torch/nn/modules/module.py", line 1776, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "b.py", line 2, in forward
nanobind: leaked 2 functions!
 - leaked function "get_block"
 - leaked function ""
1 stream hazard
"""
    assert whole_programs._others(text) == (
        b"a: b\nTraceback (most recent call last):\n"
        b'  File "a.py", line 1, in <module>\n    model(x)\n  File "b.py", line 2, in forward\n'
        b"nanobind: leaked 2 functions!\n1 stream hazard\n"
    )
