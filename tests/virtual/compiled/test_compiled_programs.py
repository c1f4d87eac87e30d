"""``torch.compile`` on the virtual GPU: Inductor's wrapper is what runs, the values are a CPU's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuprobe.virtual import session
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gpuprobe
from gpuprobe.torch_support.version import installed

pytest.importorskip("triton", reason="Inductor writes CUDA code with Triton: gpuprobe[compile]")

# torch's own, as it imports and runs its compiler
pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH = 64


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.wide(self.norm(x)), approximate="tanh")
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.back(hidden)


def losses(
    device: str, code: Any, model: nn.Module, *, steps: int = 2, amp: bool = False, rows: int = 512
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = model.to(device)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = code(model)
    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).to(device)
    found = []
    for _ in range(steps):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
            loss = run(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


WAYS = {
    "whole": (lambda model: torch.compile(model, fullgraph=True), Block, False),
    "broken": (torch.compile, lambda: Block(breaks=True), False),
    "autocast": (torch.compile, Block, True),
    "checkpoint": (
        lambda model: lambda x: checkpoint(torch.compile(model), x, use_reentrant=False),
        Block,
        False,
    ),
    "aot_eager": (lambda model: torch.compile(model, backend="aot_eager"), Block, False),
    "reduce-overhead": (lambda model: torch.compile(model, mode="reduce-overhead"), Block, False),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_a_cpus_and_memory_is_the_same_with_and_without(way: str) -> None:
    code, make, amp = WAYS[way]
    expected = [float(loss) for loss in losses("cpu", lambda model: model, make(), amp=amp)]
    peaks = []
    for compute in ("real", "shapes"):
        with gpuprobe.virtual_gpu("a100-40gb", compute=compute):
            found = losses("cuda", code, make(), amp=amp)
            if compute == "real":
                rough = 1e-2 if amp else 1e-5
                assert [float(loss) for loss in found] == pytest.approx(expected, rel=rough)
            current = session.current()
            assert current is not None
            assert [text for text in current.machine.assumed if "eagerly" in text] == []
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] == peaks[1]


COMPOSITE = {
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(4, device=x.device)),
    "hinge_embedding_loss": lambda x: functional.hinge_embedding_loss(x, (x > 0) * 2.0 - 1),
    "margin_ranking_loss": lambda x: functional.margin_ranking_loss(
        x, x.roll(1), (x > 0) * 2.0 - 1
    ),
    "pairwise_distance": lambda x: functional.pairwise_distance(x, x.roll(1, 0)).sum(),
    "relu6": lambda x: functional.relu6(8 * x).sum(),
    "selu": lambda x: functional.selu(x).sum(),
    "prelu": lambda x: functional.prelu(x, x[0, :1]).sum(),
    "std": lambda x: x.std(1).sum() + x.std(),
    "var": lambda x: x.var(1).sum() + x.var(),
    "var_mean": lambda x: sum(part.sum() for part in torch.var_mean(x, 1)),
    "where": lambda x: torch.where(x > 0, x * x, 1.0).sum(),
    "interpolate": lambda x: functional.interpolate(x[None, None], scale_factor=2.0).square().sum(),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0].square().sum(),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x[0], x[1, :2]]).square().sum(),
    "fft": lambda x: torch.fft.rfft(x).abs().sum(),
}
"""Operators made of others, which torch's Python code implements for ``meta``, too."""


def test_operators_made_of_others_have_gradients() -> None:
    def compute(inputs: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(COMPOSITE.values(), inputs, strict=True)
        return torch.stack([function(x) for function, x in pairs]).sum()

    def gradients(device: str, code: Any) -> dict[str, torch.Tensor]:
        start = torch.linspace(-1, 1, 16).view(4, 4)
        inputs = [start.to(device, copy=True).requires_grad_() for _ in COMPOSITE]
        code(compute)(inputs).backward()
        return {name: x.grad.cpu() for name, x in zip(COMPOSITE, inputs, strict=True)}

    expected = gradients("cpu", lambda function: function)
    with gpuprobe.virtual_gpu("a100-40gb", compute="real"):
        whole = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
        found = gradients("cuda", whole)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], msg=name)


def test_compiled_code_needs_less_than_eager_code() -> None:
    peaks = []
    for code in (lambda model: model, torch.compile):
        with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
            losses("cuda", code, nn.Sequential(Block(), Block()), rows=1 << 15)
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]


def test_code_compiled_before_the_device_was_there_and_after() -> None:
    @torch.compile
    def double(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu()

    for _ in range(2):
        with gpuprobe.virtual_gpu("a100-40gb", compute="real"):
            found = double(torch.ones(3, device="cuda"))
            assert found.is_cuda
            assert found.tolist() == [2.0, 2.0, 2.0]
    torch._dynamo.reset()


def test_what_the_program_asks_of_its_tensors_in_compiled_code() -> None:
    @torch.compile(fullgraph=True)
    def ask(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available():
            return x + torch.arange(3, device=x.device) + torch.full((3,), 10.0, device="cuda")
        return x

    with gpuprobe.virtual_gpu("a100-40gb", compute="real"):
        assert ask(torch.zeros(3, device="cuda")).tolist() == [10.0, 11.0, 12.0]


def test_a_function_of_torchs_that_compiled_code_cannot_contain_breaks_its_graph() -> None:
    @torch.compile
    def ask(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.cuda.is_current_stream_capturing() else x + 2

    with gpuprobe.virtual_gpu("a100-40gb", compute="real") as session:
        assert ask(torch.zeros(2, device="cuda")).tolist() == [2.0, 2.0]
        assert any("graph break" in text for text in session.machine.compiler_notes)


def test_a_race_between_compiled_kernels_is_found() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"), gpuprobe.detect_hazards() as watch:
        compiled = torch.compile(lambda x: (x * 2).relu())
        first = compiled(torch.ones(1 << 20, device="cuda"))
        with torch.cuda.stream(torch.cuda.Stream()):
            compiled(first)
        torch.cuda.synchronize()
    assert [finding.kind for finding in watch.findings] == ["read-after-write"]


def test_blocks_of_compiled_code_are_laid_to_lines_of_the_program() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        torch.cuda.memory._record_memory_history()
        losses("cuda", torch.compile, Block(), steps=1, rows=1 << 15)
        (trace,) = torch.cuda.memory._snapshot()["device_traces"]
    # The output of `wide` (32768 rows of 256 floats): each of its blocks is made in Block.forward.
    made = [e for e in trace if e["action"] == "alloc" and e["size"] == (1 << 15) * 4 * WIDTH * 4]
    assert made
    code = Block.forward.__code__
    for event in made:
        own = [f for f in event["frames"] if f["filename"] == __file__]
        assert own[0]["name"] == "forward"
        first, last = code.co_firstlineno, max(line for *_, line in code.co_lines() if line)
        assert first < own[0]["line"] <= last
    assert not any("torchinductor" in f["filename"] for e in trace for f in e["frames"])


def test_graphs_graph_breaks_and_recompilations_are_noted_with_their_lines() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        compiled = torch.compile(Block(breaks=True).cuda(), dynamic=False)
        for rows in (8, 8, 16, 16):
            compiled(torch.ones(rows, WIDTH, device="cuda"))
        current = session.current()
        assert current is not None
        notes = list(current.machine.compiler_notes)
    assert any(note.startswith("forward graph: ") for note in notes)
    (broken,) = [note for note in notes if note.startswith("graph break at ")]
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.strip() == "torch._dynamo.graph_break()"
    )
    assert f"{Path(__file__).name}:{line}: " in broken
    again = [note for note in notes if "compiled again" in note]
    assert again
    assert all("size mismatch" in note for note in again)
    assert not any(note.endswith(" times)") for note in again)  # nor for the same size


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_what_inductor_cannot_compile_runs_eagerly_and_is_said(
    monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    from torch._inductor.graph import GraphLowering

    def refuse(*args: Any) -> None:
        raise RuntimeError("no lowering today")

    @torch.compile
    def loss_of(table: Any, tokens: Any) -> Any:  # with what AOTAutograd writes in prims
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = torch.nn.functional.dropout(table(tokens) + table(places), 0.5)
        return hidden.float().logsumexp(-1).mean()

    monkeypatch.setattr(GraphLowering, "run", refuse)
    with gpuprobe.virtual_gpu("a100-40gb", compute=compute):
        found = torch.compile(lambda x: x * 2)(torch.ones(3, device="cuda"))
        values = found.tolist()
        table = torch.nn.Embedding(10, 16).cuda()
        loss_of(table, torch.randint(0, 10, (4, 8), device="cuda")).backward()
        assert table.weight.grad.shape == (10, 16)
        current = session.current()
        assert current is not None
        (assumed,) = current.machine.assumed
    assert values == [2.0, 2.0, 2.0]
    assert assumed.startswith("code that cannot be compiled here runs eagerly: ")
    assert "no lowering today" in assumed


@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_a_backward_pass_without_operators(compute: str) -> None:
    """Its graph hands on what it is given: there is nothing to compile."""

    @torch.compile
    def same_shape(x: torch.Tensor) -> torch.Tensor:
        return x.view(4) + 1

    with gpuprobe.virtual_gpu("a100-40gb", compute=compute):
        x = torch.ones(4, device="cuda", requires_grad=True)
        same_shape(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (4,)
    torch._dynamo.reset()


def test_what_a_graph_only_moves_to_the_device_lies_there() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="real"):
        found = torch.compile(lambda: torch.arange(4).cuda())()
        assert found.is_cuda
        assert found.tolist() == [0, 1, 2, 3]
    torch._dynamo.reset()


@pytest.mark.skipif(installed() < (2, 7), reason="torch 2.6 does not compile it for CPUs either")
@pytest.mark.parametrize("compute", ["real", "shapes"])
def test_gradients_of_a_compiled_sparse_embedding(compute: str) -> None:
    tokens = torch.tensor([[1, 3], [3, 5]])
    with gpuprobe.virtual_gpu("a100-40gb", compute=compute) as session:
        table = nn.Embedding(10, 4, sparse=True).cuda()
        torch.compile(table)(tokens.cuda()).sum().backward()
        found = table.weight.grad
        assert found is not None
        assert found.is_cuda
        assert found.layout is torch.sparse_coo
        assert not any("eagerly" in text for text in session.machine.assumed)
        if compute == "real":
            assert found.to_dense().sum(1).tolist() == [0, 4, 0, 8, 0, 4, 0, 0, 0, 0]
    torch._dynamo.reset()


def test_compiled_code_in_a_captured_graph_runs_at_replay_only() -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="real"):
        norm = nn.BatchNorm1d(4).cuda()
        batch = torch.full((2, 4), 3.0, device="cuda")
        run = torch.compile(norm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(batch)
        assert norm.num_batches_tracked is not None
        assert norm.running_mean is not None
        assert norm.num_batches_tracked.item() == 0
        assert norm.running_mean.tolist() == [0.0] * 4
        batch.copy_(torch.tensor([[1.0], [3.0]]).expand(2, 4))
        for replays in (1, 2):
            graph.replay()
            assert norm.num_batches_tracked.item() == replays
        assert found.mean(0).tolist() == pytest.approx([0.0] * 4, abs=1e-6)
        assert found[1].tolist() == pytest.approx([1.0] * 4, rel=1e-4)
    torch._dynamo.reset()


def test_a_generator_within_compiled_code_breaks_its_graph() -> None:
    @torch.compile
    def draw(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        y = x + 1
        generator.manual_seed(5)
        return y * 2

    with gpuprobe.virtual_gpu("a100-40gb", compute="real") as session:
        generator = torch.Generator("cuda")
        assert draw(torch.ones(2, device="cuda"), generator).tolist() == [4.0, 4.0]
        assert generator.initial_seed() == 5
        assert any("graph break" in text for text in session.machine.compiler_notes)
    torch._dynamo.reset()
