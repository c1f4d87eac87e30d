"""``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``: the rules, case by case.

Sources: [guide] CUDA C++ Programming Guide, environment variables; [mig] MIG User Guide, device
enumeration; [torch] ``torch.cuda._parse_visible_devices``, which is also run on the same cases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.machine.devices import Device, DeviceIdentity
from gpuprobe.model.values import Reading, ReadStatus, Unavailable
from gpuprobe.probes.visibility import Candidate, MigCandidate, candidates, resolve

A = "GPU-aaaa1111-0000-0000-0000-000000000000"
B = "GPU-aaaa2222-0000-0000-0000-000000000000"
C = "GPU-cccc3333-0000-0000-0000-000000000000"
D = "GPU-dddd4444-0000-0000-0000-000000000000"
M1 = "MIG-1111aaaa-0000-0000-0000-000000000000"
M2 = "MIG-2222bbbb-0000-0000-0000-000000000000"

FOUR = tuple(
    Candidate(key, key, f"00000000:{bus}:00.0", "H100")
    for key, bus in ((A, "0a"), (B, "1b"), (C, "2c"), (D, "3d"))
)
SPLIT = (
    *FOUR[:3],
    replace(FOUR[3], mig=(MigCandidate(M1, 1, 0), MigCandidate(M2, 2, 0))),
)

WHOLE = [
    # setting, what is visible, source of the rule
    (None, "ABCD", "guide: not set, all devices"),
    ("", "", "guide: empty, no device"),
    (" ", "", "torch: no number in it"),
    ("-1", "", "guide: an invalid index hides what follows"),
    ("NoDevFiles", "", "torch: no number; what container runtimes set for no GPU"),
    ("none", "", "torch"),
    ("0", "A", "guide"),
    ("3", "D", "guide"),
    ("4", "", "guide: no such index"),
    ("2,1", "CB", "guide: in the order of the sequence"),
    ("3,2,1,0", "DCBA", "guide"),
    ("0,2,-1,1", "AC", "guide: its own example"),
    ("0,9,1", "A", "guide: an invalid index hides what follows"),
    ("9,0", "", "guide"),
    ("0,,1", "A", "guide: an empty entry is invalid"),
    ("0,1,", "AB", "guide: an empty last entry hides nothing"),
    (",0", "", "guide"),
    (" 1 , 2 ", "BC", "torch: spaces around an index"),
    ("1,1", "", "torch: a repeated ordinal selects nothing"),
    ("0,1,0", "", "torch"),
    ("0,-1,0", "A", "torch: parsing stops before the repetition"),
    ("1gpu2,2ampere", "BC", "torch: as strtoul reads it"),
    ("+1", "B", "torch: strtoul takes a sign"),
    ("0x1", "A", "torch: strtoul in base ten stops at x"),
    ("00", "A", "torch"),
    (A, "A", "guide: a UUID"),
    (f"{D},{A}", "DA", "guide"),
    ("GPU-c", "C", "guide: a unique beginning"),
    ("GPU-aaaa", "", "guide: two devices begin so"),
    ("GPU-aaaa1,GPU-aaaa2", "AB", "guide"),
    (f"{C},GPU-9,{D}", "C", "guide: an unknown UUID hides what follows"),
    (f"{C},{C}", "", "torch: a repeated id selects nothing"),
    (f"{C},GPU-c", "", "torch: the same device by another name"),
    (f"{C},1", "C", "torch: the first entry decides the kind"),
    (f"1,{C}", "B", "torch"),
    (f"{C}, {D}", "C", "torch: a space before a UUID makes it unknown"),
    ("gpu-c", "", "torch: case matters"),
    ("GPU-", "", "guide: every device begins so"),
]


def keys(letters: str) -> tuple[str, ...]:
    return tuple({"A": A, "B": B, "C": C, "D": D}[letter] for letter in letters)


@pytest.mark.parametrize(("setting", "visible", "source"), WHOLE)
def test_whole_gpus(setting: str | None, visible: str, source: str) -> None:
    result = resolve(setting, None, FOUR)
    assert result.devices == keys(visible), source
    if setting is not None:
        texts = [entry.text for entry in result.entries]
        assert ",".join(texts) == setting
        assert all(bool(entry.device) != bool(entry.reason) for entry in result.entries)


@pytest.mark.parametrize(("setting", "visible", "source"), WHOLE)
def test_torch_reads_the_same(
    setting: str | None, visible: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own parser of the variable, given the same four GPUs."""
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    parsed = cuda._parse_visible_devices()
    uuids = [gpu.uuid for gpu in FOUR]
    if parsed and isinstance(parsed[0], str):
        parsed = cuda._transform_uuid_to_ordinals(parsed, uuids)
    else:
        parsed = parsed[: next((i for i, n in enumerate(parsed) if n >= len(FOUR)), len(parsed))]
    assert tuple(uuids[n] for n in parsed) == keys(visible), source


MIG = [
    (None, (M1,), "mig: one instance, and no whole GPU beside it"),
    ("0,1", (A, B), "mig: no instance is selected"),
    ("3", (M1,), "mig: the first instance of the GPU"),
    ("0,3", (M1,), "mig: no whole GPU beside an instance"),
    (M2, (M2,), "guide: an instance's UUID"),
    ("MIG-2", (M2,), "guide: a unique beginning"),
    ("MIG-", (), "guide: two instances begin so"),
    (f"{M2},{M1}", (M2,), "guide: one instance is enumerated"),
    (f"MIG-{D}/2/0", (M2,), "guide: parent, GPU instance, compute instance"),
    ("MIG-GPU-dddd/1/0", (M1,), "guide: the parent may be shortened"),
    (f"MIG-{D}/5/0", (), "guide: no such instance"),
    (f"MIG-{A}/1/0", (), "guide: that GPU has none"),
    (f"MIG-{D}", (), "guide: no instance is named"),
    (f"{M1},{A}", (M1,), "torch: the first entry decides the kind"),
    (f"{A},{M1}", (A,), "torch"),
    (D, (M1,), "mig: a partitioned GPU stands for its first instance"),
]


@pytest.mark.parametrize(("setting", "visible", "source"), MIG)
def test_mig(setting: str | None, visible: tuple[str, ...], source: str) -> None:
    assert resolve(setting, None, SPLIT).devices == visible, source


def test_a_partitioned_gpu_without_instances_is_named() -> None:
    empty = (replace(FOUR[0], mig=()), FOUR[1])
    result = resolve(None, None, empty)
    assert result.devices == (B,)
    assert any("has no instance" in problem for problem in result.problems)


def test_pci_order_is_by_address_not_by_position() -> None:
    backwards = tuple(reversed(FOUR))
    assert resolve("0", "PCI_BUS_ID", backwards).devices == (A,)


def test_fastest_first_among_different_models_is_not_guessed() -> None:
    mixed = (FOUR[0], replace(FOUR[1], model="T400"))
    assert isinstance(resolve(None, None, mixed).devices, Unavailable)
    assert isinstance(resolve("1", "FASTEST_FIRST", mixed).devices, Unavailable)
    # A UUID needs no order, and neither does an answer that no order can change.
    assert resolve(B, None, mixed).devices == (B,)
    assert resolve("", None, mixed).devices == ()
    assert resolve("1", "PCI_BUS_ID", mixed).devices == (B,)
    # CUDA's own order decides.
    assert resolve("0", None, mixed, known_order=[B, A]).devices == (B,)


def test_a_lost_compute_capability_makes_no_other_model() -> None:
    """A GPU that falls off after its name was read must not make the others' order unknown."""

    def device(uuid: str, bus: str, capability: Any, name: str = "H100") -> Device:
        return Device(
            DeviceIdentity(uuid=uuid, pci_bus_id=f"00000000:{bus}:00.0"),
            name=Reading(name, "nvml"),
            compute_capability=Reading(capability, "nvml"),
        )

    lost = Unavailable("GPU is lost", ReadStatus.LOST)
    first, second = device(A, "0a", (9, 0)), device(B, "1b", lost)
    for pair in ((first, second), (second, first)):
        assert resolve(None, None, candidates(pair)).devices == (A, B)
    other = device(C, "2c", lost, "T400")
    assert isinstance(resolve(None, None, candidates((first, other))).devices, Unavailable)
    same_name = device(C, "2c", (7, 5))
    assert isinstance(resolve(None, None, candidates((first, same_name))).devices, Unavailable)


def test_bad_entries_are_named_even_where_the_order_is_not_known() -> None:
    mixed = (FOUR[0], replace(FOUR[1], model="T400"))
    problems = resolve("1,7,0", None, mixed).problems
    assert len(problems) == 1
    assert "'7'" in problems[0]
    assert "hides the 1 after it" in problems[0]


def test_an_unknown_order_is_a_problem_and_falls_back() -> None:
    result = resolve(None, "pci_bus_id", FOUR)
    assert result.order == "FASTEST_FIRST"
    assert len(result.problems) == 1


@pytest.mark.parametrize("setting", ["", "-1", "NoDevFiles", " "])
def test_asking_for_no_gpu_is_no_mistake(setting: str) -> None:
    assert resolve(setting, None, FOUR).problems == ()


@given(st.text(alphabet="0123456789,-+ GPUMIabcd/x", max_size=40))
def test_any_text_selects_distinct_known_devices(setting: str) -> None:
    result = resolve(setting, None, SPLIT)
    assert not isinstance(result.devices, Unavailable)
    assert len(set(result.devices)) == len(result.devices)
    assert set(result.devices) <= {A, B, C, D, M1, M2}
    assert len([e for e in result.entries if e.device]) >= len(result.devices)


def test_the_table_is_as_long_as_promised() -> None:
    assert len(WHOLE) + len(MIG) >= 25
