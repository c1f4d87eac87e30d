"""Settings of the allocator that a program makes itself."""

from __future__ import annotations

import os

import pytest
import torch

import gpuprobe

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


def test_those_that_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("t4"):
        monkeypatch.setenv(NAMES[0], "expandable_segments:maybe")
        with pytest.raises(ValueError, match="maybe"):
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


def test_they_do_not_count_after_a_gpu_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("t4"):
        assert not is_expandable()
        monkeypatch.setenv(NAMES[0], GROWING)
        assert not is_expandable()
