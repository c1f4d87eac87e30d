"""Every case of the truth suite trains, in a reduced size."""

from __future__ import annotations

import math

import pytest
import torch
from reference_models import Case, case, cases

import gpuprobe

pytestmark = pytest.mark.simulated

ALL = cases()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ALL)
def test_case_steps(name: str) -> None:
    """On a simulated GPU, with what only CUDA runs: fused optimizers, the scaler, inputs that are
    copied there.
    """
    with gpuprobe.virtual_gpu("h200"):
        step = ALL[name].build("cuda", tiny=True)
        losses = [step() for _ in range(2)]
        assert all(loss.is_cuda for loss in losses)
        assert all(math.isfinite(float(loss)) for loss in losses)
        assert torch.cuda.max_memory_reserved() >= torch.cuda.max_memory_allocated() > 0


def test_the_suite_covers_what_it_should() -> None:
    trainings = [one.training for one in ALL.values() if one.whole is None]
    assert len(ALL) >= 20
    assert {training.precision for training in trainings} == {"fp32", "bf16", "fp16", "pure-bf16"}
    assert {"adamw", "adamw-fused", "adamw-loop", "sgd", "adafactor"} <= {
        training.optimizer for training in trainings
    }
    assert {training.set_to_none for training in trainings} == {True, False}
    assert any(training.accumulate > 1 for training in trainings)
    assert any(one.full.get("checkpointed") for one in ALL.values())


@pytest.mark.parametrize(("name", "elements"), [("mlp-at-1mib", 1 << 18), ("mlp-over-20mib", None)])
def test_threshold_cases_meet_the_threshold(name: str, elements: int | None) -> None:
    full = case(name).full
    size = full["batch"] * full["width"]
    assert size == elements if elements else size * 4 > 20 << 20


def test_a_case_needs_something_to_build() -> None:
    with pytest.raises(TypeError, match="neither"):
        Case("empty", "", {}, {}).build("cpu")
