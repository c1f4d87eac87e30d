"""Random numbers on a device are the device's own, as on CUDA."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


@pytest.fixture(autouse=True)
def gpus() -> Iterator[None]:
    with gpuprobe.virtual_gpu("2xa100-80gb"):
        yield


def _attention() -> Any:
    q = torch.ones(1, 2, 4, 8, device="cuda", dtype=torch.half)
    return F.scaled_dot_product_attention(q, q, q + torch.arange(8).cuda(), dropout_p=0.5)


def _lstm() -> Any:
    torch.manual_seed(1)
    model = nn.LSTM(4, 4, num_layers=2, dropout=0.5).cuda()
    return model(torch.ones(3, 2, 4, device="cuda"))[0]


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(8, device="cuda"),
    "randn": lambda: torch.randn(8, device="cuda"),
    "randn_like": lambda: torch.randn_like(torch.zeros(8, device="cuda")),
    "randint": lambda: torch.randint(1 << 30, (8,), device="cuda"),
    "randperm": lambda: torch.randperm(64, device="cuda"),
    "normal": lambda: torch.normal(0.0, 1.0, (8,), device="cuda"),
    "normal_": lambda: torch.zeros(8, device="cuda").normal_(),
    "uniform_": lambda: torch.zeros(8, device="cuda").uniform_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device="cuda")),
    "multinomial": lambda: torch.multinomial(torch.ones(64, device="cuda"), 32),
    "dropout": lambda: F.dropout(torch.ones(64, device="cuda")),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(64, device="cuda"), training=True),
    "dropout2d": lambda: F.dropout2d(torch.ones(4, 16, 2, 2, device="cuda")),
    "rrelu": lambda: F.rrelu(-torch.ones(8, device="cuda"), training=True),
    "attention": _attention,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_draws_are_the_devices(draw: Callable[[], Any], mode: Callable[[], Any]) -> None:
    host = torch.get_rng_state()
    with mode():
        torch.cuda.manual_seed(7)
        first, second = draw().cpu(), draw().cpu()
        torch.cuda.manual_seed(7)
        torch.rand(5)  # on the host, between them
        torch.rand(5, device="cuda:1")
        assert torch.equal(draw().cpu(), first)
        assert torch.equal(draw().cpu(), second)
    assert not torch.equal(first, second)
    torch.set_rng_state(host)


def test_draws_leave_the_hosts_generator_alone() -> None:
    host = torch.get_rng_state()
    for draw in DRAWS.values():
        draw()
    model = nn.LSTM(4, 4, num_layers=2, dropout=0.5, device="cuda")
    model(torch.ones(3, 2, 4, device="cuda"))[0].sum().backward()
    assert torch.equal(torch.get_rng_state(), host)


def test_the_hosts_draws_leave_the_devices_generator_alone() -> None:
    state = torch.cuda.get_rng_state()
    torch.rand(3), torch.randperm(9), F.dropout(torch.ones(8))
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_recurrent_dropout_is_drawn_on_the_device() -> None:
    host = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    model, x = host.cuda(), torch.ones(3, 2, 4, device="cuda", requires_grad=True)
    state = torch.cuda.get_rng_state()
    first = model(x)[0]
    first.sum().backward()
    torch.cuda.set_rng_state(state)
    assert torch.equal(model(x)[0], first)


def test_manual_seed_seeds_host_and_devices_alike() -> None:
    torch.manual_seed(3)
    host = [torch.rand(4), torch.randn(20)]
    for index in range(2):
        found = [torch.rand(4, device=f"cuda:{index}"), torch.randn(20, device=f"cuda:{index}")]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, host, strict=True))
    assert torch.cuda.initial_seed() == 3


def test_one_device_is_seeded_by_itself() -> None:
    torch.cuda.manual_seed_all(1)
    other = torch.cuda.get_rng_state(1)
    with torch.cuda.device(0):
        torch.cuda.manual_seed(2)
    assert torch.equal(torch.cuda.get_rng_state(1), other)
    assert not torch.equal(torch.cuda.get_rng_state(0), other)


def test_fork_rng_and_states_put_back_what_was() -> None:
    states = torch.cuda.get_rng_state_all()
    with torch.random.fork_rng(devices=[0, 1]):
        torch.cuda.manual_seed_all(9)
        inside = torch.rand(4, device="cuda")
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), states))
    assert not torch.equal(torch.rand(4, device="cuda"), inside)
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.cuda.get_rng_state(), states[0])


def test_a_seed_from_before_there_was_a_device_holds(gpus: None) -> None:
    """Within the fixture's machine the seed was unknown: a new one sees the host's."""
    from gpuprobe.virtual.generators import Generators

    torch.manual_seed(11)
    assert Generators(1).default[0].initial_seed() == 11


def test_a_generator_of_the_programs_own() -> None:
    default, host = torch.cuda.get_rng_state(), torch.get_rng_state()
    mine = torch.Generator("cuda").manual_seed(4)
    first = torch.randn(6, device="cuda", generator=mine)
    second = torch.zeros(6, device="cuda").normal_(generator=mine)
    mine.manual_seed(4)
    assert torch.equal(torch.randn(6, device="cuda", generator=mine), first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.cuda.get_rng_state(), default)
    assert torch.equal(torch.get_rng_state(), host)


def test_generators_of_the_other_kind_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found"):
        torch.randn(2, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found"):
        torch.randn(2, generator=torch.Generator("cuda"))
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type"):
        torch.ones(2, device="cuda").normal_(generator=torch.Generator())


def test_checkpointing_draws_the_same_numbers_again() -> None:
    x = torch.ones(64, device="cuda", requires_grad=True)
    out = checkpoint(lambda value: F.dropout(value * 1, 0.5), x, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_a_graph_draws_anew_at_each_replay() -> None:
    x = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    with torch.cuda.graph(graph):
        x.normal_()
    assert torch.equal(torch.cuda.get_rng_state(), state)  # a capture runs nothing
    graph.replay()
    first = x.cpu()
    graph.replay()
    assert not torch.equal(x.cpu(), first)
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.randn(16, device="cuda").cpu(), first)


def test_a_devices_state_is_its_seed_and_offset() -> None:
    torch.cuda.manual_seed(6)
    assert torch.cuda.get_rng_state().view(torch.int64).tolist() == [6, 0]
    torch.rand(1000, device="cuda")
    state = torch.cuda.get_rng_state()
    assert state.view(torch.int64).tolist() == [6, 4]
    # 108 processors of 2048 threads take 4 numbers each: beyond that, each takes 4 more.
    threads = 108 * 2048
    torch.empty(threads * 4, device="cuda").uniform_()
    torch.empty(threads * 4 + 1, device="cuda").normal_()
    assert torch.cuda.default_generators[0].get_offset() == 4 + 4 + 8
    assert torch.get_rng_state().numel() == 5056


def test_a_state_comes_back_from_a_file() -> None:
    mine = torch.Generator("cuda").manual_seed(8)
    torch.rand(5, device="cuda", generator=mine)
    file = io.BytesIO()
    torch.save(mine.get_state(), file)
    copies = [copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), mine.clone_state()]
    expected = torch.rand(5, device="cuda", generator=mine)
    file.seek(0)
    mine.set_state(torch.load(file))
    for generator in (mine, *copies):
        assert generator.device == torch.device("cuda", 0)
        assert generator.initial_seed() == 8
        assert torch.equal(torch.rand(5, device="cuda", generator=generator), expected)
        assert generator.get_offset() == 8


def test_offsets_of_the_programs_own_begin_the_same_numbers_each_time() -> None:
    mine, other = (torch.Generator("cuda").manual_seed(seed) for seed in (8, 9))

    def drawn(generator: Any, offset: int) -> Any:
        assert generator.set_offset(offset).get_offset() == offset
        return torch.rand(5, device="cuda", generator=generator)

    first = drawn(mine, 4096)
    assert torch.equal(drawn(mine, 4096), first)
    assert not torch.equal(drawn(mine, 4100), first)
    assert not torch.equal(drawn(other, 4096), first)
    assert torch.equal(
        drawn(mine, 0), torch.rand(5, generator=torch.Generator().manual_seed(8)).cuda()
    )
    written = mine.get_state()
    written.view(torch.int64)[1] = 4096  # DTensor's way
    mine.set_state(written)
    assert torch.equal(torch.rand(5, device="cuda", generator=mine), first)
    with pytest.raises(RuntimeError, match="offset must be a multiple of 4"):
        mine.set_offset(2)
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        mine.set_state(torch.get_rng_state())


def test_a_state_held_is_exact_however_many_were_made_since() -> None:
    torch.cuda.manual_seed(1)
    torch.rand(3, device="cuda")
    held = torch.cuda.get_rng_state()
    expected = torch.rand(3, device="cuda")
    for _ in range(600):  # more than are remembered by their contents
        torch.rand(1, device="cuda")
        torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(held)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
