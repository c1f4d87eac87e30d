"""Every case of the truth suite trains, in a reduced size."""

from __future__ import annotations

import math

import pytest
import torch
from reference_models import Case, Training, Work, case, cases
from reference_models.other import mlp

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


@pytest.mark.parametrize(
    "name", ["llama-accumulate-fp32", "resnet50-fp32-sgd", "mlp-at-1mib", "recommender-adagrad"]
)
def test_a_virtual_gpu_computes_what_the_cpu_does(name: str) -> None:
    with gpuprobe.virtual_gpu("h200"):
        step = ALL[name].build("cuda", tiny=True)
        found = [float(step()) for _ in range(2)]
    on_cpu = ALL[name].build("cpu", tiny=True)  # afterwards: optimizers ask torch for a GPU
    assert found == [float(on_cpu()) for _ in range(2)]


@pytest.mark.parametrize("name", ["gpt2-small-fp32", "moe-bf16", "gan-fp32", "llama-generate"])
def test_a_case_is_the_same_each_time(name: str) -> None:
    first, again = ([], [])
    for losses in (first, again):
        step = ALL[name].build("cpu", tiny=True)
        losses += [float(step()) for _ in range(2)]
    assert first == again


def test_training_learns() -> None:
    """The steps are real: on one batch again and again, the loss falls."""
    made = mlp(width=8, batch=4)
    step = Training("sgd").start(
        lambda: type(made)(made.model, lambda _: made.data(0), made.loss), "cpu"
    )
    losses = [float(step()) for _ in range(5)]
    assert losses[-1] < losses[0]


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


def test_accumulation_adds_up() -> None:
    """Gradients of micro-batches add to those of the whole batch."""
    gradients = []
    for accumulate in (1, 2):
        torch.manual_seed(0)
        work = mlp(width=8, batch=4)
        whole = work.data(0)[0]
        parts = [whole] if accumulate == 1 else list(whole.chunk(2))
        same = Work(
            work.model,
            lambda step, parts=parts: (parts[step],),
            lambda model, x: model(x) * len(parts),  # noqa: B023 - used within the iteration
        )
        Training("sgd", accumulate=accumulate).start(lambda same=same: same, "cpu")()
        gradients.append([p.grad.clone() for p in work.model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("name", "elements"), [("mlp-at-1mib", 1 << 18), ("mlp-over-20mib", None)])
def test_threshold_cases_meet_the_threshold(name: str, elements: int | None) -> None:
    full = case(name).full
    size = full["batch"] * full["width"]
    assert size == elements if elements else size * 4 > 20 << 20


def test_a_case_needs_something_to_build() -> None:
    with pytest.raises(TypeError, match="neither"):
        Case("empty", "", {}, {}).build("cpu")
