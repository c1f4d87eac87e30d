"""`gpuprobe diff` of a program without and with ``torch.compile``."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import gpuprobe
from gpuprobe.analysis.compare.diff import Diff
from gpuprobe.api.recordings import diff, load
from gpuprobe.api.views import write_diff
from gpuprobe.model.memory import TraceAction
from gpuprobe.model.report import ShareTable
from gpuprobe.recording.summary import summarize
from gpuprobe.reporters.json import diff as diff_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.diff import diff_sections
from gpuprobe.reporters.text import draw

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.simulated]

if "GPUPROBE_TEST_SIMULATED" in os.environ:  # once, not in each test: they are forks
    import torch._inductor.compile_fx
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # without a process that compiles

SOURCE = Path(__file__).read_text().splitlines()
BREAK = "        torch._dynamo.graph_break()"
LINE = SOURCE.index(BREAK)  # the one before it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(x).sin().cos().tanh()  # each saves what it needs; fused, all do once
        torch._dynamo.graph_break()
        return x + self.back(hidden)


def train(path: Path, code: Callable[[nn.Module], Any]) -> None:
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        model = nn.Sequential(Block(), Block(), Block()).cuda()
        run = code(model)
        optimizer = torch.optim.SGD(model.parameters())
        with gpuprobe.record(path, level="trace", trace_steps="all"):
            for _ in range(2):
                run(torch.randn(1 << 14, 64, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    torch._dynamo.reset()


def test_a_diff_names_what_was_compiled(tmp_path: Path) -> None:
    before, after = tmp_path / "eager", tmp_path / "compiled"
    train(before, lambda model: model)
    train(after, torch.compile)
    found = diff(before, after)
    check_figures(found)
    check_views(before, after, found)
    train(tmp_path / "later", lambda model: model)  # in the same process as the compiled one
    assert diff(after, tmp_path / "later").compiled[1] == ()
    train(tmp_path / "again", torch.compile)  # torch has all of its code in a cache
    assert diff(after, tmp_path / "again").compiled == (found.compiled[1], found.compiled[1])


def check_figures(found: Diff) -> None:
    """Peak and saved activations are smaller; compiled code has the program's lines."""
    (peak,) = found.peaks
    assert isinstance(peak.delta, int)
    assert peak.delta < 0
    categories = peak.rows["category"]
    assert isinstance(categories, tuple)
    saved = next(row for row in categories if row.key == "activation")
    assert saved.delta < 0
    lines = peak.rows["line"]
    assert isinstance(lines, tuple)
    assert not any("torch_dynamo_resume" in row.key for row in lines)
    assert any(row.key.endswith(f"{Path(__file__).name}:{LINE} in forward") for row in lines)
    before, after = found.compiled
    assert before == ()
    number = SOURCE.index(BREAK) + 1
    assert any(
        text.startswith("graph break at ") and f"{Path(__file__).name}:{number}: " in text
        for text in after
    )
    assert sum("forward graph: " in text for text in after) >= 1
    assert any("in the memory of others" in text for text in after)


def check_views(before: Path, after: Path, found: Diff) -> None:
    document = json.loads(json.dumps(diff_json.document(found)))
    jsonschema.validate(document, schema("diff-2"))
    assert document["compiled"] == {"before": [], "after": list(found.compiled[1])}
    text = io.StringIO()
    draw.write(diff_sections(found), text)
    assert "Compiled\n" in text.getvalue()
    assert "nothing was compiled" in text.getvalue()
    assert "graph break at " in " ".join(text.getvalue().split())
    page = write_diff(load(before), load(after), after.with_suffix(".html")).read_text()
    assert "nothing was compiled" in page
    assert "forward graph: " in page


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.wide(x).sin())


def modules_of(path: Path, model: nn.Module) -> dict[str, int]:
    """Of the peak of the step, not of the copies of tensors with which kernels are tuned."""
    untuned = torch._inductor.config.patch({"triton.autotune_pointwise": False})
    with untuned, gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        code = torch.compile(model.cuda())
        with gpuprobe.record(path, level="trace", trace_steps="all") as recorder:
            with recorder.step():
                kept = code(torch.randn(1 << 14, 64, device="cuda"))
            del kept
    torch._dynamo.reset()
    table = summarize(load(path), top=100).top_modules
    assert isinstance(table, ShareTable)
    return {str(row.key): row.bytes for row in table.rows}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_of_compiled_code_belong_to_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As before torch 2.15, so that the peak is where all outputs are.
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    found = modules_of(tmp_path / "of-ours", nn.Sequential(Plain(), Plain()))
    for name in ("Sequential.0", "Sequential.1"):
        # The outputs of `wide`; and a workspace of cuBLAS in the first.
        assert 16 << 20 <= found[f"{name}.wide"] < 26 << 20
        assert found[f"{name}.back"] == 4 << 20
    assert found["(no module)"] == 4 << 20  # the batch

    found = modules_of(tmp_path / "own-forward", Stack())
    assert found.keys() >= {
        f"Stack.blocks.{at}.{name}" for at in (0, 1) for name in ("wide", "back")
    }

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    found = modules_of(tmp_path / "of-torchs", model)
    assert found["Sequential.0"] >= 16 << 20
    assert found["Sequential.2"] >= 4 << 20
    assert found["(no module)"] == 4 << 20  # the batch


def allocated_by_phase(path: Path, kind: type[nn.Module]) -> Counter[tuple[str, str]]:
    """Bytes allocated in the second training step, by phase and module."""
    with gpuprobe.virtual_gpu("a100-40gb", compute="shapes"):
        model = Deep(kind).cuda()
        code = torch.compile(model)
        with gpuprobe.record(path, level="trace", trace_steps="1") as recorder:
            for _ in range(2):
                with recorder.step():
                    loss = code(torch.randn(1 << 14, 64, device="cuda")).square().mean()
                    loss.backward()
                model.zero_grad()
    torch._dynamo.reset()
    (trace,) = load(path).ranks[0].traces
    columns, found = trace.events, Counter[tuple[str, str]]()
    gradients = False
    for action, size, stack, module in zip(
        columns.action, columns.size, columns.stack, columns.module, strict=True
    ):
        frames = trace.stacks.frames_of(stack)
        gradients = gradients or any(frame.name == "backward" for frame in frames)
        if action == TraceAction.ALLOC.code:
            phase = "backward" if gradients else "forward"
            found[phase, trace.stacks.strings[module]] += size
    return found


class Deep(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_backward_passes_and_resumed_functions_have_the_paths_of_the_model(
    tmp_path: Path,
) -> None:
    for kind in (Plain, Block):  # without and with graph breaks
        check_paths(kind, allocated_by_phase(tmp_path / kind.__name__, kind))


def check_paths(kind: type[nn.Module], found: Counter[tuple[str, str]]) -> None:
    hidden, width = 16 << 20, 4 << 20  # bytes of a layer's wide and narrow activations
    names = {name for _, name in found if name}
    assert all(name.startswith("Deep.layers.") for name in names)
    for at in range(3):
        layer = f"Deep.layers.{at}"
        assert found["forward", f"{layer}.wide"] >= hidden
        assert found["forward", f"{layer}.back"] >= width
        assert found["backward", f"{layer}.wide"] > 0  # of its weights at least
        assert found["backward", f"{layer}.back"] > 0
    # The gradient of the last layer's hidden activations; where each layer is a graph of its own,
    # the memory is not used again by the others.
    assert found["backward", "Deep.layers.2.back"] >= hidden
    if kind is Block:
        assert found["backward", "Deep.layers.0.back"] >= hidden
    # Eager code: the batch and the squares, then what the loss makes in its backward pass.
    assert found["forward", ""] <= 2 * width + 1024
    assert found["backward", ""] <= 4 * width + 1024
