"""What is on the wrong device is found, on simulated GPUs; what is right is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conservation import check_steps
from programs import Net, Rows
from report_builders import rank_recording
from sinks import KeepingSink
from test_several_devices import Split
from torch import nn

import gpuprobe
from gpuprobe.analysis.placement import RULES, misplaced, placement_of
from gpuprobe.model.findings import Finding
from gpuprobe.sampler.recorder import Recorder

pytestmark = [pytest.mark.simulated, pytest.mark.filterwarnings("ignore")]


def trained(net: nn.Module, to: str | None = "cuda", **loading: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x in torch.utils.data.DataLoader(Rows(), batch_size=8, **loading):
        optimizer.zero_grad()
        y = net(x if to is None else x.to(to))
        y.square().mean().backward()
        optimizer.step()


def findings(program: Callable[[], None], gpus: str = "2xa100-40gb") -> list[Finding]:
    sink = KeepingSink()
    with gpuprobe.virtual_gpu(gpus), Recorder(sink):
        program()
    assert sink.ends[0].gpuprobe_faults == ()
    assert placement_of(sink.rank)
    check_steps(sink.steps, sink.traces)
    return misplaced(rank_recording(sink.steps))


def rules(found: list[Finding]) -> list[str]:
    return [finding.rule for finding in found]


def test_a_program_that_does_it_right() -> None:
    assert findings(lambda: trained(Net().cuda(), pin_memory=True)) == []


def test_without_a_gpu_nothing_is_wrong() -> None:
    sink = KeepingSink()
    with Recorder(sink):
        trained(Net(), to=None)
    assert {item.device for item in placement_of(sink.rank)} == {"cpu"}
    assert {item.what for item in placement_of(sink.rank)} == {"module", "input", "batch"}
    assert misplaced(rank_recording(sink.steps)) == []


def test_a_module_left_on_the_cpu() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 64)
            self.head = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x)).cpu())

    def program() -> None:
        net = Forgets()
        net.body.cuda()
        trained(net, pin_memory=True)

    (found,) = findings(program, "a100-40gb")
    assert found.rule == "GP301"
    assert "Forgets.head (Linear, 1.0 KiB) is on the CPU" in found.message
    assert dict(found.evidence)["bytes"] == str((64 * 4 + 4) * 4)


def test_the_counter_of_an_averaged_model_may_be_on_the_cpu() -> None:
    kept: list[nn.Module] = []

    def program() -> None:
        net = Net().cuda()
        kept.append(torch.optim.swa_utils.AveragedModel(net))
        kept[-1](torch.randn(8, 16, device="cuda"))
        assert kept[-1].n_averaged.device.type == "cpu"
        trained(net, pin_memory=True)

    assert findings(program, "a100-40gb") == []


def test_a_model_on_the_cpu_counts_if_the_program_calls_or_trains_it() -> None:
    kept: list[Any] = []  # an average of the weights, say, or a model of an earlier program

    def program(teach: Callable[[nn.Module], None] | None) -> list[Finding]:
        def train() -> None:
            kept.append(nn.Sequential(nn.Linear(16, 1), nn.ReLU()))
            if teach is not None:
                teach(kept[-1])
            trained(Net().cuda(), pin_memory=True)

        return findings(train, "a100-40gb")

    def call(teacher: nn.Module) -> None:
        teacher(torch.randn(8, 16))

    def call_a_part(teacher: nn.Module) -> None:
        call(teacher.get_submodule("0"))

    def train(teacher: nn.Module) -> None:
        kept.append(torch.optim.SGD(teacher.parameters(), 0.1))
        kept[-1].step()

    assert program(None) == []
    for teach in (call, call_a_part, train):
        kept.clear()
        found = program(teach)
        assert rules(found) == ["GP301"], teach
        assert "Sequential (Sequential, 68 B) is on the CPU" in found[0].message


def test_batches_that_are_not_pinned() -> None:
    (found,) = findings(lambda: trained(Net().cuda()), "a100-40gb")
    assert found.rule == "GP303"
    assert dict(found.evidence) == {"bytes per step": str(8 * 16 * 4)}
    assert found.fix is not None
    assert "pin_memory=True" in found.fix.code


def test_a_split_model_is_mentioned_and_a_forgotten_part_warned_about() -> None:
    even = findings(lambda: trained(Split(), "cuda:0", pin_memory=True))
    assert [(f.rule, f.level.value) for f in even] == [("GP302", "note")]

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 512).to("cuda:0")
            self.head = nn.Linear(512, 1).to("cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).to("cuda:1"))

    (found,) = findings(lambda: trained(Uneven(), "cuda:0", pin_memory=True))
    assert (found.rule, found.level.value) == ("GP302", "warning")
    assert "Uneven.head is on cuda:1" in found.message


def test_inputs_and_memory_on_a_gpu_that_is_not_the_models() -> None:
    class Moves(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to("cuda:1"))

    found = findings(lambda: trained(Moves().to("cuda:1"), "cuda:0", pin_memory=True))
    assert rules(found) == ["GP304"]
    assert "inputs on cuda:0" in found[0].message
    kept = []

    def stray() -> None:
        kept.append(torch.ones(1 << 18, device="cuda"))  # meant for the model's GPU
        trained(Net().to("cuda:1"), "cuda:1", pin_memory=True)

    (found_stray,) = findings(stray)
    assert found_stray.rule == "GP304"
    assert "1.0 MiB are allocated on cuda:0" in found_stray.message
    kept.clear()


def test_the_output_device_of_data_parallel() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 1 << 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    found = findings(lambda: trained(nn.DataParallel(Wide().cuda()), pin_memory=True))
    assert rules(found) == ["GP305"]
    assert dict(found[0].evidence)["output device"] == "cuda:0"


def test_every_rule_has_a_number_of_its_own() -> None:
    assert len({rule.id for rule in RULES}) == len({rule.kind for rule in RULES}) == len(RULES)


class Layers(nn.Module):
    """A model that its pipeline is cut from, and that stays where it was built: on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("pipelined", [True, False])
def test_layers_of_other_stages_of_a_pipeline_are_not_misplaced(pipelined: bool) -> None:
    kept: list[Any] = []

    def program() -> None:
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage

        whole = Layers()
        kept.append(whole)
        first = nn.Sequential(*list(whole.layers)[:2]).cuda()
        if pipelined:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            kept.append(PipelineStage(first, 0, 1, torch.device("cuda:0")))
            dist.destroy_process_group()
        optimizer = torch.optim.SGD(whole.parameters(), 0.1)
        for _ in range(2):
            first(torch.randn(8, 32, device="cuda")).sum().backward()
            optimizer.step()

    rules = {finding.rule for finding in findings(program)}
    assert ("GP301" in rules) is not pipelined
