"""Settings of the allocator that a program makes itself."""

from __future__ import annotations

import os

import pytest
import torch

import gpuprobe
from gpuprobe.errors import ConfigError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.simulated]
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GROWING = "expandable_segments:True"


@pytest.fixture(autouse=True)
def no_setting_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def is_expandable() -> bool:
    torch.empty(1, device="cuda")
    return bool(torch.cuda.memory_snapshot()[-1]["is_expandable"])


@pytest.mark.parametrize("name", NAMES)
def test_they_count_until_a_gpu_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("t4"):
        assert torch.cuda.device_count() == 1
        monkeypatch.setenv(name, GROWING)
        assert is_expandable()
        assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    monkeypatch.delenv(name)
    with gpuprobe.virtual_gpu("t4"):
        assert not is_expandable()
        monkeypatch.setenv(name, GROWING)
        assert not is_expandable()


def test_those_that_are_asked_for_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("t4", conf="max_split_size_mb:64"):
        monkeypatch.setenv(NAMES[0], GROWING)
        assert not is_expandable()


def test_the_estimate_goes_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        monkeypatch.setenv(NAMES[0], GROWING)
        torch.empty(11 << 20, dtype=torch.uint8, device="cuda")  # 12 MiB, or a page of 20

    found = gpuprobe.estimate(step, "t4", steps=1)
    assert found.settings == GROWING
    monkeypatch.delenv(NAMES[0])
    assert found.peak_reserved == gpuprobe.estimate(step, "t4", steps=1).peak_reserved
    given = gpuprobe.estimate(step, "t4", steps=1, conf="")
    assert given.settings == ""
    assert given.peak_reserved != found.peak_reserved


def test_those_that_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("t4"):
        monkeypatch.setenv(NAMES[0], "expandable_segments:maybe")
        for _ in range(2):
            with pytest.raises(ConfigError, match="expandable_segments:maybe"):
                is_expandable()


def test_a_call_changes_them_at_any_time() -> None:
    with gpuprobe.virtual_gpu("t4"):
        assert not is_expandable()
        torch.cuda.memory._set_allocator_settings(GROWING)
        torch.empty(30 << 20, device="cuda")
        kinds = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    assert kinds == {False, True}
    assert not any(name in os.environ for name in NAMES)


def test_a_call_leaves_a_limit_that_was_set_by_itself() -> None:
    with gpuprobe.virtual_gpu("t4"):
        torch.cuda.set_per_process_memory_fraction(0.5)
        torch.cuda.memory._set_allocator_settings(GROWING)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.5)
