"""The sums says what a walk over every tensor says, and holds on to none of them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Mlp, seeded, train
from torch import nn

from examples import examples
from gpuprobe.model.memory import Category
from gpuprobe.model.run.session import KnownTensors
from gpuprobe.model.values import Unavailable
from gpuprobe.sampler.tracing.tensors import (
    FIRST_STEPS,
    INTERVAL,
    RepeatedWalk,
    TensorSums,
    category_sums,
    known_tensors,
    walk,
)

_ALLOCATED: dict[str, int | Unavailable] = {"cpu": Unavailable("not counted")}


def walked(models: list[Any], optimizers: list[Any]) -> tuple[KnownTensors, ...]:
    return known_tensors(category_sums(walk(models, optimizers)), _ALLOCATED)


class Program:
    """A model that is trained and changed, one change at a time."""

    def __init__(self) -> None:
        self.model = seeded(Mlp)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self) -> None:
        out = self.model(torch.randn(8, 16))
        out.square().mean().backward()
        self.optimizer.step()

    def no_gradients(self) -> None:
        self.optimizer.zero_grad()

    def wider_layer(self) -> None:
        self.model.last = nn.Linear(self.model.last.in_features, self.model.last.out_features + 4)

    def another_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def double(self) -> None:
        """New data for the same parameters, and back again: to half, double and float."""
        self.model.double().float()

    def bucket(self) -> None:
        """Gradients that are views of one storage, as DistributedDataParallel makes them."""
        parameters = list(self.model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters) + 64)
        at = 0
        for parameter in parameters:
            parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def shared_with_state(self) -> None:
        """A gradient in the storage of a buffer: it counts once."""
        self.model.norm.weight.grad = self.model.norm.running_mean

    def frozen(self) -> None:
        for parameter in self.model.first.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None

    def tied(self) -> None:
        self.model.register_buffer("mirror", self.model.norm.weight.detach())

    def sparse(self) -> None:
        weight = self.model.norm.weight
        weight.grad = torch.zeros_like(weight).to_sparse()

    def free(self) -> None:
        self.model.norm.running_var = torch.ones(self.model.norm.num_features)


CHANGES = [name for name in vars(Program) if not name.startswith("_")]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(CHANGES), max_size=12))
def test_a_look_says_what_a_walk_says(changes: list[str]) -> None:
    program = Program()
    sums = TensorSums()
    program.train()
    for change in changes:
        if change in ("train", "frozen") and program.model.norm.weight.grad is not None:
            program.no_gradients()  # Adam takes no sparse gradients, and may not share a buffer
        getattr(program, change)()
        models, optimizers = [program.model], [program.optimizer]
        found = sums.take(models, optimizers, _ALLOCATED, may_skip=False)
        assert found == walked(models, optimizers)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.LBFGS(p, history_size=2), torch.optim.SparseAdam]
)
def test_states_of_every_shape(make: Any) -> None:
    layer = nn.Embedding(50, 4, sparse=make is torch.optim.SparseAdam)
    optimizer = make(list(layer.parameters()))
    sums = TensorSums()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(torch.arange(10)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        found = sums.take([layer], [optimizer], _ALLOCATED)
        assert found == walked([layer], [optimizer])


def test_a_steady_program_is_looked_at_seldom_and_never_walked_again() -> None:
    model = seeded(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    sums = TensorSums()
    for _ in range(8 * INTERVAL):
        train(model, optimizer, 1)
        found = sums.take([model], [optimizer], _ALLOCATED)
        assert found == walked([model], [optimizer])
    assert sums.checks == FIRST_STEPS + 3  # after 8, 24 and 56 steps
    assert sums.walks == 1


def test_what_the_allocator_says_makes_it_look() -> None:
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sums = TensorSums()
    for _ in range(FIRST_STEPS + 1):
        sums.take([model], [optimizer], {"cpu": 10**6})
    model.register_buffer("late", torch.zeros(1000))
    (before,) = sums.take([model], [optimizer], {"cpu": 10**6})
    (after,) = sums.take([model], [optimizer], {"cpu": 10**6 + 4000})
    grown = after.by_category[Category.BUFFER] - before.by_category[Category.BUFFER]
    assert grown == 4000
    assert after.rest == before.rest


def test_no_tensor_is_kept_alive() -> None:
    model = seeded(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    sums = TensorSums()
    sums.take([model], [optimizer], _ALLOCATED)
    gradient = weakref.ref(model.last.weight.grad)
    weight = weakref.ref(model.last.weight)
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_parameters_that_are_not_made_yet_and_gradients_inside_torch_func() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    sums = TensorSums()
    found = sums.take([model], [], _ALLOCATED)
    assert found == walked([model], [])
    assert found[0].by_category[Category.PARAMETER] == 4 * (4 * 2 + 2)
    layer = nn.Linear(3, 1)

    def inside(x: torch.Tensor) -> torch.Tensor:
        layer.weight.grad = torch.ones_like(layer.weight) * x.sum()
        assert sums.take([layer], [], _ALLOCATED, may_skip=False) == walked([layer], [])
        layer.weight.grad = None
        return x.sum()

    torch.func.grad(inside)(torch.ones(3))


def test_a_repeated_walk_finds_what_a_walk_does() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    repeated = RepeatedWalk()

    def same() -> bool:
        found = repeated.take([model], [optimizer])
        return set(found.values()) == set(walk([model], [optimizer]).values())

    for _ in range(3):
        assert same()
        model(torch.ones(2, 4)).sum().backward()
        assert same()
        optimizer.step()
    model[0].weight = torch.nn.Parameter(torch.ones(4, 4))
    assert same()
    model[0].weight.grad = model[1].running_mean.expand(4, 4)  # a gradient that is a buffer, too
    assert same()
    model = torch.nn.Sequential(model)  # other names
    assert same()
    model._modules = {"first": model[0]}
    assert same()


def test_a_walk_is_repeated_only_if_a_tensor_has_moved() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    repeated = RepeatedWalk()
    model(torch.ones(2, 4)).sum().backward()
    first = repeated.take([model], [optimizer])
    assert repeated.take([model], [optimizer]) is first
    model.weight.grad = torch.zeros(4, 4)
    second = repeated.take([model], [optimizer])
    assert second is not first
    model.bias.grad = None
    third = repeated.take([model], [optimizer])
    assert len(second) - len(third) == 1
    assert repeated.take([model], [optimizer]) is third
