"""Model values survive the way to JSON text and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_strategies import UNDECODABLE, model_classes, values_of

from examples import examples
from gpuprobe.errors import ConfigError, DataError
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.io.codec import closed, from_plain, to_plain
from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.machine.monitor import ProcessWork
from gpuprobe.model.memory import Category
from gpuprobe.model.plans.step_time import StepTime
from gpuprobe.model.run.session import Environment, HostWindow, KnownTensors, Session, Step
from gpuprobe.model.trace import AllocatorSettings
from gpuprobe.model.values import (
    Bounds,
    Bytes,
    Nanoseconds,
    Parsed,
    Peak,
    ReadStatus,
    Unavailable,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def through_text(value: Any) -> Any:
    return json.loads(json.dumps(to_plain(value), allow_nan=False))


@pytest.mark.parametrize("cls", model_classes(), ids=lambda cls: cls.__name__)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_round_trip_of_every_model_class(cls: type, data: st.DataObject) -> None:
    value = data.draw(values_of(cls))
    back = from_plain(cls, through_text(value))
    assert back == value
    assert to_plain(back) == to_plain(value)


def test_every_record_type_is_among_those_classes() -> None:
    assert {Step, Session, Environment, Finding, Peak} <= set(model_classes())


@settings(max_examples=examples(150), deadline=None)
@given(plain=JSON, data=st.data())
def test_foreign_data_is_a_value_or_a_data_error(plain: Any, data: st.DataObject) -> None:
    cls = data.draw(st.sampled_from([Step, Session, Finding, AllocatorSettings, KnownTensors]))
    if isinstance(plain, dict) and plain:
        # Keys that exist, with values that do not fit: those get furthest.
        names = list(cls.__dataclass_fields__)
        plain = dict(zip(names, plain.values(), strict=False))
    try:
        value = from_plain(cls, plain)
    except DataError:
        return
    assert isinstance(value, cls)


def test_defaults_are_left_out_and_unknown_keys_ignored() -> None:
    step = Step(index=3, start_ns=0, duration_ns=5)
    assert to_plain(step) == {"index": 3, "start_ns": 0, "duration_ns": 5}
    assert from_plain(Step, {**to_plain(step), "added_in_1_7": [1]}) == step


def test_unavailable_keeps_reason_and_status() -> None:
    window = HostWindow(rss_start=Unavailable("not permitted", ReadStatus.DENIED))
    plain = to_plain(window)
    assert plain == {"rss_start": {"unavailable": "not permitted", "status": "denied"}}
    assert from_plain(HostWindow, plain) == window


def test_zero_is_not_confused_with_a_missing_value() -> None:
    window = HostWindow(rss_start=Bytes(0))
    assert to_plain(window) == {"rss_start": 0}
    assert from_plain(HostWindow, {"rss_start": 0}).rss_start == 0


def test_dict_keys_are_enum_values() -> None:
    tensors = KnownTensors("cpu", {Category.PARAMETER: Bytes(4)}, rest=Bytes(1))
    plain = to_plain(tensors)
    assert plain["by_category"] == {"parameter": 4}
    assert from_plain(KnownTensors, plain) == tensors


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_floats_that_json_has_no_word_for(number: float) -> None:
    settings = AllocatorSettings(garbage_collection_threshold=number)
    back = from_plain(AllocatorSettings, through_text(settings))
    assert repr(back.garbage_collection_threshold) == repr(number)


@pytest.mark.parametrize(
    ("cls", "plain", "message"),
    [
        (Step, [], "not a valid Step: expected an object, found a list"),
        (
            Step,
            {"index": "1"},
            "not a valid Step: index: expected a whole number from 0 to ",
        ),
        (Step, {"index": True}, "index: expected a whole number from 0 to "),
        (Step, {"index": 1}, "not a valid Step: 'start_ns' is missing"),
        (Step, {"index": -1}, "index: expected a whole number from 0 to "),
        (Step, {"index": 1 << 53}, "index: expected a whole number from 0 to 9007199254740991"),
        (Step, {"duration_ns": 10**400}, "duration_ns: expected a whole number from 0 to 10000000"),
        (
            HostWindow,
            {"rss_start": 1 << 60},
            "rss_start: expected a whole number from 0 to 1152921",
        ),
        (HostWindow, {"rss_start": -1}, "rss_start: expected a whole number from 0 to 115"),
        (ProcessWork, {"pid": 1 << 64}, "pid: expected a number of at most 64 bits"),
        (ProcessWork, {"pid": -(1 << 63) - 1}, "pid: expected a number of at most 64 bits"),
        (Inventory, {"taken_at": 1e18}, "taken_at: expected a number from -62135596800 to"),
        (Session, {"started_at": 10**400}, "started_at: expected a number from -62135596800 to"),
        (Session, {"started_at": math.inf}, "started_at: expected a number from"),
        (Session, {"started_at": {"float": "nan"}}, "started_at: expected a number from"),
        (Session, {"started_at": {"float": 1}}, "started_at: expected a number from"),
        (AllocatorSettings, {"garbage_collection_threshold": {"float": 1}}, "expected text, found"),
        (AllocatorSettings, {"garbage_collection_threshold": {"float": "1e400"}}, "one of inf, "),
        (AllocatorSettings, {"roundup_power2_divisions": {"9" * 40: 1}}, "at most 64 bits"),
        (Session, {"argv": ["x", 3]}, "argv[1]: expected text, found 3"),
        (Session, {"argv": None}, "argv: expected a list, found nothing"),
        (Peak, {"at_least": 1, "at_most": 1.5}, "at_most: expected a whole number from -"),
        (KnownTensors, {"by_category": {"soul": 1}}, "by_category.soul: expected one of parameter"),
        (KnownTensors, {"by_category": {"activation": "x"}}, "by_category.activation: expected"),
        (Finding, {"level": "loud"}, "level: expected one of error, warning, note, found 'loud'"),
        (
            Finding,
            {"evidence": [{"name": "a", "value": 1}]},
            "evidence[0][1]: expected text, found 1",
        ),
        (Finding, {"related": [{"line": "x"}]}, "related[0].line: expected a whole number"),
        (HostWindow, {"rss_start": {"unavailable": 3, "status": "ok"}}, "rss_start: expected text"),
        (HostWindow, {"rss_start": {"unavailable": "x"}}, "rss_start: 'status' is missing"),
        (Step, {"windows": [{}, {"end": {"a b": 1}}]}, "windows[0]: 'device' is missing"),
    ],
)
def test_what_is_wrong_is_said_with_the_path_to_it(cls: type, plain: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        from_plain(cls, plain)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@closed
@dataclass(frozen=True)
class _Oven:
    """What somebody writes by hand."""

    degrees: Annotated[int, Bounds(1, 300)]
    share: Annotated[float, Bounds(0, 1)] = 0.5
    size: Annotated[tuple[int, int], Parsed(str, lambda text: tuple(map(int, text.split("x"))))] = (
        1,
        1,
    )
    shelves: dict[str, Annotated[int, Bounds(0)]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("plain", "message", "hint"),
    [
        ({"degree": 3}, "oven.toml: unknown key 'degree'", "did you mean 'degrees'?"),
        ({"zebra": 3}, "unknown key 'zebra'", "known: degrees, share, shelves, size"),
        ({"degrees": 0}, "oven.toml: degrees: expected a whole number from 1 to 300, found 0", ""),
        ({"degrees": 301}, "from 1 to 300, found 301", ""),
        ({"degrees": True}, "degrees: expected a whole number from 1 to 300, found True", ""),
        ({"degrees": 1, "share": 1.01}, "share: expected a number from 0 to 1, found 1.01", ""),
        ({"degrees": 1, "share": math.nan}, "share: expected a number from 0 to 1", ""),
        ({"degrees": 1, "size": 3}, "size: expected text, found 3", ""),
        ({"degrees": 1, "size": "3xa"}, "size: invalid literal", ""),
        ({"degrees": 1, "shelves": {"the top": -1}}, "shelves['the top']: expected a whole", ""),
        ({"share": 1}, "'degrees' is missing", ""),
    ],
)
def test_what_people_write_is_checked_closely(plain: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_plain(_Oven, plain, "oven.toml", ConfigError)
    assert message in str(caught.value)
    assert caught.value.hint == hint


def test_bounds_are_part_of_the_range() -> None:
    for degrees, share in ((1, 0), (300, 1)):
        found = from_plain(_Oven, {"degrees": degrees, "share": share, "size": "2x3"})
        assert found == _Oven(degrees, share, (2, 3))
    for number in (0, (1 << 60) - 1):
        assert from_plain(HostWindow, {"rss_start": number}).rss_start == number
    for number in (-(1 << 63), (1 << 64) - 1):
        assert from_plain(ProcessWork, {"pid": number}).pid == number


def test_bounds_of_a_union_are_those_of_its_number() -> None:
    unknown = Unavailable("no matrix products")
    time = StepTime("t4", 2, *(Nanoseconds(at) for at in (1, 2, 3, 2)), 0.5, (), (), (), (), ())
    for used in (unknown, 0.25):
        assert from_plain(StepTime, to_plain(replace(time, used=used))).used == used
    with pytest.raises(DataError, match="used: expected a number from 0 to"):
        from_plain(StepTime, {**to_plain(time), "used": -1.0})


def test_file_names_that_are_not_utf8() -> None:
    session = Session(1.0, 2, (UNDECODABLE,), "trace", ("cpu",), cwd=f"/{UNDECODABLE}")
    assert from_plain(Session, through_text(session)) == session


def test_values_outside_the_model_are_refused() -> None:
    with pytest.raises(TypeError, match="not a model value: object"):
        to_plain(object())


def test_fingerprint_is_kept_as_written() -> None:
    finding = Finding("GP001", "host-race", Level.ERROR, "message")
    assert from_plain(Finding, to_plain(finding)).fingerprint == finding.fingerprint
