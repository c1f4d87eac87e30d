"""`gpuprobe.model.record`: dataclasses in all but the cost of defining them."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.machine.devices import Container, DeviceIdentity, VisibleEntry
from gpuprobe.model.record import record


def test_it_is_a_dataclass() -> None:
    entry = VisibleEntry("0", device="GPU-1")
    assert dataclasses.is_dataclass(entry)
    assert [f.name for f in dataclasses.fields(entry)] == ["text", "device", "reason"]
    assert dataclasses.replace(entry, text="1") == VisibleEntry("1", "GPU-1")
    assert dataclasses.asdict(entry) == {"text": "0", "device": "GPU-1", "reason": ""}
    assert repr(entry) == "VisibleEntry(text='0', device='GPU-1', reason='')"
    match entry:
        case VisibleEntry(text, device):
            assert (text, device) == ("0", "GPU-1")


def test_equal_means_the_same_class_and_values() -> None:
    assert Container("docker", "1") == Container("docker", "1")
    assert Container("docker", "1") != Container("docker", "2")
    assert Container("docker", "", "") != VisibleEntry("docker", "", "")
    assert len({Container("docker", "1"), Container("docker", "1")}) == 1


def test_it_cannot_be_changed() -> None:
    entry = VisibleEntry("0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.text = "1"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del entry.text
    with pytest.raises(TypeError, match="frozen"):
        record(frozen=False)


@pytest.mark.parametrize(
    ("args", "values"),
    [((), {}), (("a", "b", "c", "d"), {}), (("a",), {"text": "b"}), (("a",), {"other": 1})],
)
def test_wrong_arguments_are_refused(args: tuple[str, ...], values: dict[str, str]) -> None:
    with pytest.raises(TypeError):
        VisibleEntry(*args, **values)


def test_copies_and_other_processes_get_the_same() -> None:
    identity = DeviceIdentity(uuid="GPU-1", nvml_index=3)
    assert pickle.loads(pickle.dumps(identity)) == identity
    assert copy.deepcopy(identity) == identity
    assert from_plain(DeviceIdentity, to_plain(identity)) == identity
    assert identity.key == "GPU-1"


def test_defaults_made_by_a_factory_are_not_shared() -> None:
    @record(frozen=True)
    class Bag:
        """A list of its own."""

        items: list[int] = dataclasses.field(default_factory=list)

    first, second = Bag(), Bag()
    first.items.append(1)
    assert second.items == []


def test_a_record_may_extend_a_record() -> None:
    @record(frozen=True)
    class Base:
        one: int

    @record(frozen=True)
    class Extended(Base):
        two: int = 2

    made = Extended(1)
    assert (made.one, made.two, dataclasses.replace(made, one=3)) == (1, 2, Extended(3, 2))
    assert made != Base(1)
    for value in (made, Base(1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.one = 4  # type: ignore[misc]
        assert value.__dataclass_params__.frozen  # type: ignore[attr-defined]
