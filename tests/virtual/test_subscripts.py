"""``tensor[key]``, ``tensor[key] = value`` and views: without operators of their own they do what
they do as operators, which they are where anyone watches.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpuprobe
from gpuprobe.errors import ValueNeeded

COMPUTE = ("real", "shapes")


class Names(TorchDispatchMode):
    """Lets every operator through, and keeps its name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def key_of(draw: random.Random) -> Any:
    def part() -> Any:
        kind = draw.randrange(6)
        if kind < 2:
            return draw.randrange(-5, 5)
        if kind < 4:
            ends = [draw.choice([None, torch.tensor(2), *range(-5, 6)]) for _ in range(2)]
            return slice(*ends, draw.choice([None, 1, 2]))
        return draw.choice([None, ..., True, torch.tensor(1)]) if kind == 4 else slice(None)

    return part() if draw.random() < 0.3 else tuple(part() for _ in range(draw.randrange(1, 4)))


def value_of(draw: random.Random, tensors: list[Any]) -> Any:
    if draw.random() < 0.4:
        return draw.choice([0, 2, True, 0.5, -1.25])
    source = draw.choice(tensors)
    return source[draw.randrange(len(source))] if draw.random() < 0.5 else source


def made(place: str) -> list[Any]:
    """Tensors of which all, or nothing, is known; one with gradients, and ones with more memory
    than they show.
    """
    known = torch.arange(16.0, device=place).reshape(4, 4)
    unknown = torch.empty(600, 600, device="cuda").normal_().to(place)
    lost = torch.zeros(4, 4)
    lost.copy_(unknown[:4, :4])
    return [
        known,
        torch.zeros(4, 4, dtype=torch.bool, device=place),
        torch.arange(32, device=place).reshape(4, 8)[:, ::2],
        unknown[:4, :4],
        unknown,
        unknown[:4, :4].clone(),
        unknown[0, :1].clone(),
        torch.ones(1, 4, device=place),
        torch.ones(4, 4, device=place, requires_grad=True) * 2,
        torch.ones(4, 4, device=place, requires_grad=True),
        torch.ones(4, 4),
        lost,
    ]


def looks(tensor: Any) -> tuple[Any, ...]:
    """All that a program can learn of a tensor."""
    try:
        values = tensor.detach().cpu().tolist() if tensor.numel() <= 32 else None
    except ValueNeeded:
        values = "unknown"
    shape = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    node = tensor.grad_fn
    return (
        shape,
        tensor._version,
        values,
        tensor.requires_grad,
        None if node is None else node.name(),
    )


def run(seed: int, compute: str, place: str) -> list[Any]:
    """What some random statements did to some tensors."""
    draw = random.Random(seed)
    torch.manual_seed(0)
    tensors = made(place)
    found: list[Any] = []
    for _ in range(12):
        tensor, key = draw.choice(tensors), key_of(draw)
        value = value_of(draw, tensors)
        try:
            if draw.random() < 0.4:
                found.append(looks(tensor[key]))
            else:
                tensor[key] = value
                found.append(looks(tensor))
        except (RuntimeError, IndexError, TypeError, ValueNeeded) as error:
            line = str(error).partition("\n")[0]
            found.append((type(error), re.sub(r"expand\([\w.]+", "expand(", line)))
    return [*found, *map(looks, tensors), torch.cuda.memory_stats()["allocated_bytes.all.current"]]


@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("compute", COMPUTE)
def test_subscripts_do_what_their_operators_do(compute: str, place: str) -> None:
    seeds = range(50)
    with gpuprobe.virtual_gpu("rtx3090", compute=compute):
        alone = [run(seed, compute, place) for seed in seeds]
    with gpuprobe.virtual_gpu("rtx3090", compute=compute), Names():
        watched = [run(seed, compute, place) for seed in seeds]
    for seed in seeds:
        assert alone[seed] == watched[seed], seed
    done = [item for found in alone for item in found if isinstance(item, tuple) and len(item) == 5]
    assert len(done) > 250


@pytest.mark.parametrize("compute", COMPUTE)
def test_who_watches_sees_every_operator(compute: str) -> None:
    with gpuprobe.virtual_gpu("rtx3090", compute=compute) as session:
        x = torch.zeros(4, 4, device="cuda")
        with Names() as names:
            x[1, 2] = 0.5
            x[1:, None]
        assert [name for name in names.found if name != "aten::lift_fresh"][-5:] == [
            "aten::select",
            "aten::select",
            "aten::copy_",
            "aten::slice",
            "aten::unsqueeze",
        ]
        counted: list[str] = []
        session.machine.meter = lambda func, *rest: counted.append(func._schema.name)
        x[1, 2] = 0.5
        x.t()
        assert counted[-2:] == ["aten::copy_", "aten::t"]


def test_copies_from_place_to_place_are_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpuprobe.virtual_gpu("rtx3090") as session:
        x, host = torch.zeros(4, 4, device="cuda"), torch.ones(4)
        kind = type(session.machine.dispatch)
        found: list[str] = []
        run = kind._run

        def noted(mode: Any, facts: Any, *rest: Any) -> Any:
            found.append(facts.name)
            return run(mode, facts, *rest)

        monkeypatch.setattr(kind, "_run", noted)
        x[0] = x[1]
        x[2, 2] = 1.5
        assert not found
        x[0] = host
        assert "copy_" in found


@pytest.mark.parametrize("compute", COMPUTE)
def test_races_are_found_in_what_subscripts_write(compute: str) -> None:
    with gpuprobe.virtual_gpu("rtx3090", compute=compute):
        x = torch.zeros(4, 4, device="cuda")
        torch.cuda.synchronize()
        with gpuprobe.detect_hazards() as watch:
            with torch.cuda.stream(torch.cuda.Stream()):
                x[1] = torch.ones(4, device="cuda")
            x[1, 2] = 0.5
    # A number that is assigned to one element is waited for.
    kinds = [finding.kind for finding in watch.findings]
    assert kinds == ["write-after-write", "implicit-sync"]


@pytest.mark.parametrize("compute", COMPUTE)
def test_what_subscripts_write_to_the_host_is_watched(compute: str) -> None:
    with gpuprobe.virtual_gpu("rtx3090", compute=compute):
        pinned = torch.zeros(4).pin_memory()
        with gpuprobe.detect_hazards() as watch:
            there = pinned.to("cuda", non_blocking=True)
            pinned[1] = 0.5
        assert there.is_cuda
    assert [finding.kind for finding in watch.findings] == ["host-race"]


def test_what_a_graph_writes_is_unknown_until_it_is_replayed() -> None:
    with gpuprobe.virtual_gpu("rtx3090", compute="shapes"):
        x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        x[1] = 0.5
        graph.capture_end()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            y[1] = 0.5
        for written in (x, y):
            with pytest.raises(ValueNeeded):
                written.tolist()


def test_unknown_values_make_what_they_are_written_to_unknown() -> None:
    with gpuprobe.virtual_gpu("rtx3090", compute="shapes"):
        unknown = torch.empty(600, 600, device="cuda").normal_()
        lost, host = torch.zeros(4, 4), torch.ones(4, 4)
        lost.copy_(unknown[:4, :4])
        host[1] = lost[0]
        lost[2] = 1.0
        for tensor in (lost, host):
            with pytest.raises(ValueNeeded):
                tensor.tolist()
        with pytest.raises(ValueNeeded):
            host[unknown[0, 0].long() :]


VIEWS: list[Any] = [
    lambda x: x.t() if x.dim() <= 2 else x.transpose(0, 1),
    lambda x: x.flatten(),
    lambda x: x.unsqueeze(0).expand(2, *x.shape),
    lambda x: x.detach(),
    lambda x: x.split(2)[0],
    lambda x: x.unbind()[-1],
    lambda x: x.view(torch.int32),
    lambda x: x.squeeze(),
    lambda x: x.permute(*reversed(range(x.dim()))),
    lambda x: x.view(3, 5),  # which fails
    lambda x: x + 1,
    lambda x: torch.complex(x.float(), x.float()).real,
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("compute", COMPUTE)
def test_views_are_what_they_are_where_a_meter_counts(compute: str, inference: bool) -> None:
    def views(seed: int) -> list[Any]:
        draw = random.Random(seed)
        torch.manual_seed(0)
        x = draw.choice(made("cuda"))
        found = []
        for _ in range(6):
            try:
                x = draw.choice(VIEWS)(x)
            except (RuntimeError, IndexError, ValueError) as error:
                found.append((type(error), str(error).partition("\n")[0]))
            else:
                found.append((*_looks(x), x._is_view()))
        return [*found, torch.cuda.memory_stats()["allocated_bytes.all.current"]]

    def _looks(x: Any) -> tuple[Any, ...]:
        return (x.shape, x.device, x.stride()) if inference else looks(x)

    with gpuprobe.virtual_gpu("rtx3090", compute=compute) as session:
        machine = session.machine
        for seed in range(20):
            with torch.inference_mode(inference):
                machine.meter = None
                alone = views(seed)
                machine.meter = lambda *call: None
                assert alone == views(seed), seed


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_a_number_put_in_places_that_a_tensor_names_within_vmap(compute: str) -> None:
    def marked(row: torch.Tensor) -> torch.Tensor:
        made = row.new_zeros(4)
        made[row] = 1
        return made

    rows = [[0, 2], [3, 3]]
    with gpuprobe.virtual_gpu("t4", compute=compute):
        found = torch.vmap(marked)(torch.tensor(rows, device="cuda"))
        assert found.is_cuda
        if compute == "real":
            assert found.tolist() == [[1, 0, 1, 0], [0, 0, 0, 1]]
