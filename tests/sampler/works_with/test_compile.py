"""torch.compile stays what it was: the same graphs, none more, and no break that was not there."""

from __future__ import annotations

import pytest
import torch
from conservation import check_steps
from programs import Net, batches, no_hooks_left, plain, seeded_net
from sinks import KeepingSink
from torch import nn

from gpuprobe.sampler.recorder import Recorder

# dynamo looks at deprecated things, and at .grad of what is no leaf, while it traces.
pytestmark = pytest.mark.filterwarnings("ignore")


def graphs() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "recompiled": sum(counters["recompiles"].values()),
    }


def whole_model() -> list[float]:
    net = seeded_net()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    return plain(compiled, torch.optim.SGD(net.parameters(), 0.1))


def part_of_it() -> list[float]:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    torch.manual_seed(3)
    net = Outer()
    net.inner.compile(backend="eager")
    return plain(net, torch.optim.SGD(net.parameters(), 0.1))


def with_a_break() -> list[float]:
    class Talks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            torch._dynamo.graph_break()
            return self.head(x)

    torch.manual_seed(3)
    net = Talks()
    return plain(torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters(), 0.1))


def the_step() -> list[float]:
    """The optimizer's step is compiled too."""
    net = seeded_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    update = torch.compile(optimizer.step, backend="eager")
    losses = []
    for x in batches(2):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("program", [whole_model, part_of_it, with_a_break, the_step])
def test_the_compiled_region_is_still_compiled(program: object) -> None:
    assert callable(program)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = program()
    alone = graphs()
    assert alone["graphs"] >= 1
    for level in ("counters", "trace"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        sink = KeepingSink()
        warnings: list[str] = []
        with no_hooks_left(), Recorder(sink, level=level, warn=warnings.append):
            assert program() == expected
        assert graphs() == alone, level
        assert warnings == []
        assert sink.ends[0].gpuprobe_faults == ()
        check_steps(sink.steps, sink.traces)
