"""Every fake fleet, through the real nvidia-ml-py, as the table and as JSON."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from gpuprobe.api.devices import inventory
from gpuprobe.model.machine.devices import Inventory, MemoryWaterfall, WaterfallPart
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable
from gpuprobe.reporters.json import info as info_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.text import info as info_text
from gpuprobe.testing import fleets

FLEETS = sorted(fleets())
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUPROBE_PROCFS"):
        monkeypatch.delenv(name, raising=False)


def seen(fleet: str) -> Inventory:
    return inventory(("nvml", "cuda"), fleet)


def scrubbed(text: str) -> str:
    """The headline without the versions of this machine."""
    first, rest = text.split("\n", 1)
    parts = [p for p in first.split(" · ") if not p.startswith(("gpuprobe ", "torch ", "no torch"))]
    return " · ".join(parts) + "\n" + rest


@pytest.mark.parametrize("fleet", FLEETS)
def test_table_is_as_recorded(fleet: str) -> None:
    stream = io.StringIO()
    info_text.write(inventory(("nvml", "cuda"), fleet, detail="table"), stream)
    text = scrubbed(stream.getvalue())
    path = GOLDEN / f"{fleet}.txt"
    if os.environ.get("GPUPROBE_UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("fleet", FLEETS)
def test_lines_fit_and_cannot_harm_the_terminal(fleet: str) -> None:
    found = seen(fleet)
    for line in [*info_text.lines(found), *info_text.value_lines(found)]:
        assert info_text.width(line) <= info_text.WIDTH, line
        assert line.isprintable(), line


@pytest.mark.parametrize("columns", [1, 40, 59, 60, 61, 68, 79, 80, 91, 99, 101, 133, 200, 400])
def test_lines_fit_every_terminal(columns: int) -> None:
    most = max(columns, info_text.LEAST_WIDTH)
    for fleet in FLEETS:
        lines = list(info_text.lines(seen(fleet), columns=columns))
        assert all(info_text.width(line) <= most for line in lines), (fleet, columns)


def test_a_wide_terminal_is_used() -> None:
    found = seen("8xh100")
    assert max(map(info_text.width, info_text.lines(found, columns=200))) > 120


def test_colour_adds_nothing_but_colour() -> None:
    for fleet in FLEETS:
        found = seen(fleet)
        coloured = "\n".join(info_text.lines(found, colour=True))
        assert "\x1b[31m" in coloured or "\x1b[32m" in coloured
        assert re.sub(r"\x1b\[\d*m", "", coloured) == "\n".join(info_text.lines(found))


@pytest.mark.parametrize(
    ("fleet", "available", "sentence"),
    [
        ("8xh100", True, "CUDA is available on 7 of 8 GPUs (CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6)"),
        ("unified", True, "CUDA is available"),
        ("lost-gpu", True, "CUDA is available on 3 of 4 GPUs"),
        ("throttled", True, "CUDA is available on 3 GPUs"),
        (
            "no-driver",
            False,
            "CUDA is not available: the NVIDIA kernel driver is not loaded "
            "(NVML: Driver Not Loaded)",
        ),
        (
            "empty",
            False,
            "CUDA is not available: cuInit: no CUDA-capable device is visible (error 100)",
        ),
    ],
)
def test_the_first_question_is_answered_first(fleet: str, available: bool, sentence: str) -> None:
    assert info_text.verdict(seen(fleet)) == (available, sentence)


def test_a_torch_without_cuda_is_named() -> None:
    found = seen("throttled")
    host = replace(found.host, torch=Reading("2.13.0+cpu", "metadata"))
    assert info_text.verdict(replace(found, host=host, demo="")) == (
        False,
        "CUDA is not available to torch: torch 2.13.0+cpu is built without CUDA",
    )


def test_a_torch_without_kernels_for_a_gpu_is_named() -> None:
    """A fact of torch's build, which is known where torch was read: here without Volta's."""
    found = seen("ecc")  # an A100, and a P100
    host = replace(
        found.host,
        torch=Reading("2.13.0+cu130", "torch"),
        torch_archs=Reading(("sm_75", "sm_80", "compute_90"), "torch"),
    )
    lines = "\n".join(info_text.lines(replace(found, host=host)))
    assert lines.count("torch 2.13.0+cu130 has no kernels for compute capability 6.0: GPU") == 1
    assert lines.count("has no kernels") == 1
    assert "has no kernels" not in "\n".join(info_text.lines(found))


def test_hidden_gpus_are_named() -> None:
    found = seen("throttled")
    hidden = Unavailable("not visible", ReadStatus.UNSUPPORTED)
    devices = tuple(
        replace(device, identity=replace(device.identity, cuda_ordinal=hidden))
        for device in found.devices
    )
    found = replace(found, devices=devices, visibility=replace(found.visibility, setting="-1"))
    assert info_text.verdict(found) == (
        False,
        "CUDA is not available: none of 3 GPUs is visible (CUDA_VISIBLE_DEVICES=-1)",
    )


@pytest.mark.parametrize("fleet", FLEETS)
def test_json_is_valid_by_the_schema(fleet: str) -> None:
    document = json.loads(json.dumps(info_json.document(seen(fleet))))
    rules = schema("info-2")
    jsonschema.Draft202012Validator(rules).validate(document)
    known = set(rules["properties"])
    assert set(document) == known  # a key that the schema does not have would go unchecked


def test_parts_that_overlap_are_valid_by_the_schema() -> None:
    found = seen("8xh100")
    parts = {WaterfallPart.ALLOCATED: 12, WaterfallPart.UNEXPLAINED: -2}
    overlapping = MemoryWaterfall(found.devices[0].key, Bytes(10), parts)
    document = info_json.document(replace(found, waterfalls=(overlapping,)))
    jsonschema.Draft202012Validator(schema("info-2")).validate(json.loads(json.dumps(document)))


def test_every_fleet_tells_what_it_is_for() -> None:
    assert {"8xh100", "lost-gpu", "ecc", "throttled", "denied", "unified", "reordered"} <= set(
        FLEETS
    )
    assert all(about for about in fleets().values())


def test_one_lost_gpu_hides_no_other() -> None:
    found = seen("lost-gpu")
    assert len(found.devices) == 4
    names = [device.name.status.value for device in found.devices]
    assert names == ["ok", "lost", "ok", "ok"]
    healthy = found.devices[3]
    assert healthy.temperature.gpu.value == 30
    assert [p.pid for p in found.processes] == [3131]
    lost = {error.device for error in found.errors if error.status.value == "lost"}
    assert lost == {"nvml-1", found.devices[2].key}


def test_a_gpu_that_falls_off_leaves_the_numbers_of_the_others() -> None:
    """By NVML alone: the two that are left and the one lost just now are of one model."""
    found = inventory(("nvml",), "lost-gpu", detail="table")
    ordinals = [device.identity.cuda_ordinal for device in found.devices]
    assert (ordinals[0], ordinals[2], ordinals[3]) == (0, 1, 2)


def test_a_lost_gpu_is_asked_once() -> None:
    found = seen("lost-gpu")
    for key in ("nvml-1", found.devices[2].key):
        assert sum(1 for error in found.errors if error.device == key) == 1


def test_refused_values_are_denied_and_not_zero() -> None:
    found = seen("denied")
    first, second = found.devices
    assert first.power.draw.status.value == "denied"
    assert first.ecc.uncorrected_volatile.status.value == "denied"
    assert first.temperature.gpu.value == 31
    assert all(process.hidden for process in found.processes)
    assert found.processes[1].memory.status.value == "denied"
    refused = next(w for w in found.waterfalls if w.device == second.key)
    assert any("could not be listed" in note for note in refused.notes)


def test_unified_memory_still_lists() -> None:
    (device,) = seen("unified").devices
    assert device.unified_memory.value is True
    assert device.utilisation.gpu.value == 41
    # NVML has no total; the CUDA driver has, and says so.
    assert device.memory.total.source == "cuda"


def test_missing_functions_of_an_old_driver_are_unsupported() -> None:
    found = seen("old-driver")
    (device,) = found.devices
    assert device.architecture.status.value == "unsupported"
    assert device.throttling.value == ("idle",)  # by the function's older name
    assert device.memory.free.value is not None
    assert device.memory.reserved.status.value == "unsupported"
    assert [error.what for error in found.errors] == ["processes"]
    assert any("could not be listed" in note for note in found.waterfalls[0].notes)


def test_numbers_of_a_reordered_machine_are_named() -> None:
    found = seen("reordered")
    orders = [d for d in found.disagreements if d.kind == "order"]
    assert [d.message for d in orders] == ["cuda:0 is NVML 3, cuda:3 is NVML 0"]
    assert [d.identity.cuda_ordinal for d in found.devices] == [3, 1, 2, 0]
    assert [d.identity.torch_ordinal for d in found.devices] == [3, 1, 2, 0]


def test_pci_order_removes_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    found = seen("reordered")
    assert [d.identity.cuda_ordinal for d in found.devices] == [0, 1, 2, 3]
    assert not [d for d in found.disagreements if d.kind == "order"]


def test_hidden_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    found = seen("8xh100")
    hidden = next(d for d in found.disagreements if d.kind == "hidden")
    assert hidden.message == "the CUDA driver sees 2 of 8 GPUs (CUDA_VISIBLE_DEVICES=3,2)"
    assert hidden.expected
    order = next(d for d in found.disagreements if d.kind == "order")
    assert order.message == "cuda:0 is NVML 3, cuda:1 is NVML 2"
    assert not order.expected


def test_mig_instance_gets_the_ordinal(monkeypatch: pytest.MonkeyPatch) -> None:
    split = seen("8xh100").devices[7]
    small = split.identity.mig_instances[1]
    assert small.name == "1g.10gb"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", small.uuid)
    device = seen("8xh100").devices[7]
    assert device.identity.mig_instances[1].cuda_ordinal == 0
    assert device.identity.mig_instances[0].cuda_ordinal != 0


def test_processes_know_their_owner_container_and_rank() -> None:
    found = seen("8xh100")
    by_pid = {process.pid: process for process in found.processes}
    first = by_pid[41000]
    assert (first.user.value, first.rank.value, first.local_rank.value) == ("alice", 0, 0)
    assert first.container.value.runtime == "slurm"
    assert first.container.value.job == "918273.0"
    assert by_pid[52110].container.value.runtime == "docker"
    assert by_pid[70007].container.value.pod == "0a1b2c3d-1111-2222-3333-444455556666"
    assert by_pid[60999].kinds == ("compute", "graphics")
    assert by_pid[70007].mig == found.devices[7].identity.mig_instances[0].uuid


def test_topology_counts_links_and_names_paths() -> None:
    topology = seen("8xh100").topology
    assert topology is not None
    cell = topology.cells[0][5]
    assert cell is not None
    assert (cell.nvlinks.value, cell.ancestor.value, cell.p2p.value) == (18, "system", "ok")
    assert all(topology.cells[i][i] is None for i in range(8))
    lost = seen("lost-gpu").topology
    assert lost is not None
    gone = lost.cells[0][1]
    assert gone is not None
    assert gone.ancestor.status.value == "lost"


def test_hostile_names_stay_on_one_line_each() -> None:
    text = "\n".join(info_text.lines(inventory(("nvml",), "hostile", detail="table")))
    for bad in ("\x1b", "\x07", "\u202e", "\u2066", "\u2067"):
        assert bad not in text
    assert "\\x1b" in text
    verbose = "\n".join(info_text.value_lines(seen("hostile")))
    assert "\\u202eadmin" in verbose


def test_a_stream_that_is_not_utf8_is_no_reason_to_fail() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    info_text.write(seen("hostile"), stream)
    info_text.write(seen("hostile"), stream, full=True)
    stream.flush()
    raw.getvalue().decode("ascii")


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("漢字漢字", 5, "漢字…"),
        ("漢字漢字", 8, "漢字漢字"),
        ("e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301e\u0301"),
    ],
)
def test_text_is_cut_by_what_it_takes_on_a_terminal(text: str, columns: int, expected: str) -> None:
    assert info_text.cut(text, columns) == expected
    assert info_text.width(expected) <= columns


def test_stacked_combining_characters_are_cut() -> None:
    assert len(info_text.cut("a" + "\u0301" * 10_000, 20)) <= 81


def test_peer_access_is_what_cuda_says() -> None:
    """Both ends must allow it; a GPU that CUDA does not see has no answer."""
    found = inventory(("nvml", "cuda"), "throttled")
    assert found.topology is not None
    answers = [
        [cell and cell.peer.value for cell in row]  # None on the diagonal
        for row in found.topology.cells
    ]
    assert answers == [[None, True, False], [True, None, False], [False, False, None]]
    hidden = inventory(("nvml", "cuda"), "8xh100").topology
    assert hidden is not None
    cell = hidden.cells[0][7]
    assert cell is not None
    assert isinstance(cell.peer.value, Unavailable)
    assert cell.nvlinks.value == 18  # NVML's part is untouched
    alone = inventory(("cuda",), "throttled").topology
    assert alone is not None
    assert len(alone.devices) == 3
