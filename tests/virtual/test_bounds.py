"""Sizes that depend on values which compute="shapes" does not compute: the largest possible."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuprobe.virtual.session import VirtualSession

import gpuprobe
from gpuprobe.errors import ProgramFailed, TooLarge, ValueNeeded
from gpuprobe.model.plans.estimate import Estimate
from gpuprobe.planning.trials import estimate_with

WIDTH = 1024  # squares of this many floats are too large to be computed
SHAPE = (WIDTH, WIDTH)


@pytest.fixture
def session() -> Iterator[VirtualSession]:
    """A virtual GPU without values, which makes up what `gpuprobe estimate` makes up."""
    with gpuprobe.virtual_gpu("t4", "shapes") as found:
        found.machine.unknown_as_nan = True
        yield found


def shapes(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return tuple(found.shape), found.dtype
    return [shapes(item) for item in found]


def selected_and_put_back(x: Any) -> Any:
    y = x.clone()
    y[y > 0] = (y * 2)[y > 0]
    return y


def selected_by_rows(x: Any) -> Any:
    return x[x[:, 0] > 0, 3:5]


def of_gradients(x: Any) -> Any:
    weight = x.clone().requires_grad_()
    weight[weight > 0].square().sum().backward()
    return weight.grad


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[x > 0],
    "index of rows": selected_by_rows,
    "put": selected_and_put_back,
    "functional put": lambda x: torch.ops.aten.index_put(x, [x > 0], x.sum()),
    "gradient": of_gradients,
    "nonzero": lambda x: x.nonzero(),
    "nonzero, a tuple": lambda x: x.nonzero(as_tuple=True),
    "argwhere": torch.argwhere,
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "masked_select, repeated": lambda x: torch.masked_select(x[:1], x > 0),
    "unique": torch.unique,
    "unique, unsorted": lambda x: torch.unique(x, sorted=False, return_inverse=True),
    "unique, all": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique rows": lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
    "in a row": lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
    "rows in a row": lambda x: torch.unique_consecutive(x, return_counts=True, dim=1)[0],
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """By operator: shapes of the largest result, those of shapes mode, and what that notes."""
    # float32 tells them apart: there are fewer than 2 ** 24.
    largest = torch.arange(1, 1 + WIDTH * WIDTH, dtype=torch.float32).view(SHAPE)
    results: dict[str, Any] = {name: [shapes(of(largest))] for name, of in OPERATORS.items()}
    with gpuprobe.virtual_gpu("t4", "shapes") as session:
        machine = session.machine
        machine.unknown_as_nan = True
        unknown = torch.randn(SHAPE, device="cuda")
        for name, of in OPERATORS.items():
            machine.bounded = ""
            machine.assumed.clear()
            results[name] += [shapes(of(unknown)), machine.bounded, " ".join(machine.assumed)]
    return results


@pytest.mark.parametrize("name", OPERATORS)
def test_a_size_is_that_of_elements_that_are_all_different_and_positive(
    name: str, found: dict[str, Any]
) -> None:
    expected, bound, place, assumed = found[name]
    assert bound == expected
    if not name.endswith("put"):
        assert Path(__file__).name in place
        assert "the most that can be" in assumed


def peak(compute: str, share: float) -> int:
    """Of a step that works on what a mask selects, of which this share is true."""
    with gpuprobe.virtual_gpu("t4", compute) as session:  # type: ignore[arg-type]
        machine = session.machine
        machine.unknown_as_nan = True
        torch.manual_seed(0)
        weight = torch.rand(SHAPE, device="cuda", requires_grad=True)
        mask = weight.detach() < share
        found = weight[mask].exp() * torch.where(mask)[1]
        found.sum().backward()
        if (weight.detach() < share).all():
            torch.empty(1 << 22, device="cuda")
        return int(machine.devices[0].sim.peak_allocated)


def test_a_bound_is_what_all_elements_take_and_no_less_than_some() -> None:
    bound = peak("shapes", 0.5)
    assert bound == peak("real", 1.0)
    assert bound > peak("real", 0.5) > peak("real", 0.0)


def test_known_masks_select_what_they_do(session: VirtualSession) -> None:
    mask = torch.arange(WIDTH, device="cuda") < 3
    assert torch.randn(SHAPE, device="cuda")[mask].shape == (3, WIDTH)
    assert not session.machine.bounded


def test_what_is_done_only_where_a_value_says_so_is_done(session: VirtualSession) -> None:
    done = []
    if torch.randn(SHAPE, device="cuda").sum() > 0:
        done.append(1)
    assert done
    assert session.machine.bounded
    with pytest.raises(ValueNeeded):
        1 if torch.randn(SHAPE, device="cuda").sum() > 0 else 2


def test_without_an_estimate_nothing_is_bounded(session: VirtualSession) -> None:
    session.machine.unknown_as_nan = False
    for operator in ("index", "nonzero", "masked_select", "unique"):
        with pytest.raises(ValueNeeded):
            OPERATORS[operator](torch.randn(SHAPE, device="cuda"))
    with pytest.raises(ValueNeeded):
        test_what_is_done_only_where_a_value_says_so_is_done(session)


# -- with all values, where the run is small enough


@pytest.fixture(scope="module")
def exact() -> Estimate:
    return gpuprobe.estimate(lambda: torch.empty(8, device="cuda"), gpu="t4", steps=1)


def test_a_bound_stands_where_the_run_is_too_large_for_all_values(exact: Estimate) -> None:
    bound = replace(exact, steps=2)
    asked: list[str] = []

    def again(why: str) -> Any:
        asked.append(why)
        return exact

    def too_large(why: str) -> Any:
        raise TooLarge("it needs more than 2e+13 floating-point operations")

    def attempt(how: str, why: str) -> Any:
        return bound, "train.py:3"

    assert estimate_with("auto", attempt, again) is exact
    assert "train.py:3 has a size that depends on values" in asked[0]
    assert estimate_with("shapes", attempt, too_large) is bound
    found = estimate_with("auto", attempt, too_large)
    assert found == replace(bound, compute_why=found.compute_why)
    assert "train.py:3" in found.compute_why
    assert "2e+13" in found.compute_why
    assert estimate_with("auto", lambda how, why: (bound, ""), too_large) is bound


def test_a_bound_stands_where_a_second_run_fails(exact: Estimate) -> None:
    def again(why: str) -> Any:
        raise ProgramFailed("FileExistsError: [Errno 17] File exists: 'out'")

    found = estimate_with("auto", lambda how, why: (exact, "train.py:3"), again)
    assert found.peak_allocated == exact.peak_allocated
    assert "train.py:3" in found.compute_why
    assert "File exists: 'out'" in found.compute_why


# -- scipy's assignment

STAND_IN = """\
import itertools
import numpy as np


def linear_sum_assignment(cost_matrix, maximize=False):
    costs = np.asarray(cost_matrix)
    if np.isnan(costs).any():
        raise ValueError("matrix contains invalid numeric entries")
    rows = np.arange(min(costs.shape))
    sign = -1 if maximize else 1
    best = min(
        itertools.permutations(range(costs.shape[1]), len(rows)),
        key=lambda columns: sign * costs[rows, list(columns)].sum(),
    )
    return rows, np.array(best)
"""
"""What scipy has by this name, for a few rows, where it is not installed."""


@pytest.fixture
def scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """scipy, or what stands in for it, that is not imported yet."""
    before = {name for name in sys.modules if name.partition(".")[0] == "scipy"}
    if importlib.util.find_spec("scipy") is None:
        (tmp_path / "scipy").mkdir()
        (tmp_path / "scipy" / "__init__.py").write_text("")
        (tmp_path / "scipy" / "optimize.py").write_text(STAND_IN)
        monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        if name not in before:
            del sys.modules[name]


@pytest.mark.usefixtures("scipy")
@pytest.mark.parametrize("imported", ["before", "after"])
def test_an_assignment_of_unknown_costs_is_any(imported: str) -> None:
    program: dict[str, Any] = {"__name__": "program"}
    line = "from scipy.optimize import linear_sum_assignment as assign"
    if imported == "before":
        exec(line, program)
    with gpuprobe.virtual_gpu("t4", "shapes") as session:
        session.machine.unknown_as_nan = True
        exec(line, program)
        assign = program["assign"]
        costs = torch.cdist(*torch.randn(2, 1024, WIDTH, device="cuda"))[:2, :4].cpu()
        for given in (costs, costs.numpy()):
            rows, columns = assign(given)
            assert rows.tolist() == [0, 1]
            assert len(set(columns.tolist())) == 2
        assert any("the assignment of least cost" in text for text in session.machine.assumed)
        known = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]], device="cuda").cpu()
        assert assign(known)[1].tolist() == [1, 0]
        assert 2 in assign(known, maximize=True)[1].tolist()
    with pytest.raises(ValueError, match="invalid numeric"):
        assign(torch.full((2, 2), torch.nan))
