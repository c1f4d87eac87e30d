"""Programs that only infer have steps, too: each outermost call of a model in inference_mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import gpuprobe
from gpuprobe.analysis.trace.parts import full_steps
from gpuprobe.model.memory import Category, TraceAction
from gpuprobe.model.run.session import Step
from gpuprobe.sampler.hooks.inference import InferenceSteps


def steps(path: Path) -> list[Step]:
    return list(gpuprobe.load(path).ranks[0].steps)


def ends(path: Path) -> list[str]:
    return [step.ended_by for step in steps(path)]


class Pair(torch.nn.Module):
    """A model that calls another one, which is no part of it."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.own = torch.nn.Linear(4, 4)
        self._other = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self._other[0](x))


def test_each_outermost_call_is_a_step(tmp_path: Path) -> None:
    model = Pair(torch.nn.Linear(4, 4))
    with gpuprobe.record(tmp_path / "a.gpuprobe"), torch.inference_mode():
        for _ in range(3):
            model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["inference"] * 3


def test_other_calls_are_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with gpuprobe.record(tmp_path / "a.gpuprobe"):
        model(torch.ones(2, 4))
        with torch.no_grad():
            model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["end"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuprobe.record(tmp_path / "b.gpuprobe"), torch.inference_mode():
        model(torch.ones(2, 4))
    assert ends(tmp_path / "b.gpuprobe") == ["end"]
    del optimizer


class Decorated(torch.nn.Linear):
    """Has a ``generate`` under `torch.no_grad`, as models of transformers do."""

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def test_functions_with_the_decorator_of_generate_are_not_generate(tmp_path: Path) -> None:
    """Torch's decorators run the same code around every function."""
    model = Decorated(4, 4)

    @torch.inference_mode()
    def infer() -> None:
        for _ in range(3):
            model(torch.ones(2, 4))

    with gpuprobe.record(tmp_path / "a.gpuprobe"):
        infer()
        model.generate(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["inference"] * 4


def test_marked_steps_are_the_programs_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with gpuprobe.record(tmp_path / "a.gpuprobe") as rec, torch.inference_mode():
        for _ in range(2):
            with rec.step():
                model(torch.ones(2, 4))
                model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["user"] * 2


def test_training_after_an_inference_has_its_own_steps_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with gpuprobe.record(tmp_path / "a.gpuprobe"):
        with torch.inference_mode():
            model(torch.ones(2, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            with torch.inference_mode():
                model(torch.ones(2, 4))
    assert ends(tmp_path / "a.gpuprobe") == ["inference", "optimizer", "optimizer", "end"]
    assert [step.index for step in full_steps(steps(tmp_path / "a.gpuprobe"))] == [1, 2]


class Attention(torch.nn.Module):
    """Keys that grow with every call, as a decoder keeps them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, past: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        made = self.key(x)
        kept = made if past is None else torch.cat([past, made], dim=1)
        return x + kept.mean(dim=1, keepdim=True), kept


class DynamicCache:
    """Keeps tensors in attributes, as transformers' class of the name does."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []


class Decoder(torch.nn.Module):
    """Generates with a cache that is passed as an object, or as nested tuples."""

    def __init__(self, width: int = 256, *, objects: bool = False) -> None:
        super().__init__()
        self.first, self.second = Attention(width), Attention(width)
        self.objects = objects

    def forward(self, x: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, Any]:
        earlier: Any = (None, None)
        if past is not None:
            earlier = past.layers if self.objects else past
        x, first = self.first(x, earlier[0])
        x, second = self.second(x, earlier[1])
        if not self.objects:
            return x, (first, second)
        cache = DynamicCache()
        cache.layers = [first, second]
        return x, cache

    @torch.no_grad()
    def generate(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """As transformers': decorated, one call of the model for each token."""
        past = None
        for _ in range(tokens):
            x, past = self(x, past)
            x = x.softmax(-1)  # the next token: made by the program, not by the model
        return x


def test_each_call_of_generate_is_a_step(tmp_path: Path) -> None:
    model = Decoder(8)
    original = Decoder.generate
    with gpuprobe.record(tmp_path / "a.gpuprobe"):
        for _ in range(3):
            model.generate(torch.ones(1, 1, 8), 4)
    # The first began before it was known; what followed it shows where it ended.
    assert ends(tmp_path / "a.gpuprobe") == ["inference"] * 3
    assert Decoder.generate is original
    with gpuprobe.record(tmp_path / "b.gpuprobe", model), torch.inference_mode():
        for _ in range(2):
            model.generate(torch.ones(1, 1, 8), 4)
        model(torch.ones(1, 1, 8))
    assert ends(tmp_path / "b.gpuprobe") == ["inference"] * 3


def test_generating_while_training_is_no_step(tmp_path: Path) -> None:
    model = Decoder(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuprobe.record(tmp_path / "a.gpuprobe", model, optimizer):
        for _ in range(2):
            model.generate(torch.ones(1, 1, 8), 2)
            model(torch.ones(1, 1, 8))[0].sum().backward()
            optimizer.step()
    assert ends(tmp_path / "a.gpuprobe") == ["optimizer"] * 2


class Transcriber(Decoder):
    """Encodes once, then decodes; ``generate`` calls both parts."""

    def __init__(self) -> None:
        super().__init__(8)
        self.encoder = torch.nn.Linear(8, 8)

    @torch.no_grad()
    def generate(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        past = None
        x = self.encoder(x)
        for _ in range(tokens):
            x, past = self(x, past)
        return x


class Assisted(Decoder):
    """Speculative decoding: another model drafts, this one verifies."""

    def __init__(self) -> None:
        super().__init__(8)
        self.drafts = [Decoder(8)]  # in a list: no submodule

    @torch.no_grad()
    def generate(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        for _ in range(tokens):
            x, _ = self(self.drafts[0].generate(x, 2))
        return x


def decoding_calls(model: torch.nn.Module, call: Callable[[], object]) -> tuple[list[bool], bool]:
    """Which outermost calls of modules decode a token, and whether several models are called."""
    inference = InferenceSteps(lambda: None)
    found: list[bool] = []
    depth = 0

    def begins(module: torch.nn.Module, args: object) -> None:
        nonlocal depth
        if not depth:
            found.append(inference.decodes(module))
        depth += 1

    def ends(module: torch.nn.Module, args: object, result: object) -> None:
        nonlocal depth
        depth -= 1

    handles = [register_module_forward_pre_hook(begins), register_module_forward_hook(ends)]
    inference.watch([model])
    try:
        call()
    finally:
        inference.remove()
        for handle in handles:
            handle.remove()
    return found, inference.mixed


def test_each_call_of_the_model_after_the_prefill_decodes_a_token() -> None:
    x = torch.ones(1, 1, 8)
    model = Decoder(8)

    def twice() -> None:
        model.generate(x, 4)
        model.generate(x, 2)

    assert decoding_calls(model, twice) == ([False, True, True, True, False, True], False)
    assert decoding_calls(model, lambda: [model(x) for _ in range(3)]) == ([False] * 3, False)
    encoded = Transcriber()
    # The encoder, and the first call of the decoder.
    assert decoding_calls(encoded, lambda: encoded.generate(x, 3)) == (
        [False, False, True, True],
        False,
    )


def test_a_draft_model_makes_calls_no_tokens() -> None:
    model = Assisted()
    _, mixed = decoding_calls(model, lambda: model.generate(torch.ones(1, 1, 8), 3))
    assert mixed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.simulated)])
@pytest.mark.parametrize("objects", [False, True])
def test_caches_are_a_category(tmp_path: Path, objects: bool, device: str) -> None:
    here = gpuprobe.virtual_gpu("h100-80gb", compute="real") if device == "cuda" else nullcontext()
    with here:
        model = Decoder(objects=objects).to(device)
        with gpuprobe.record(tmp_path / "a.gpuprobe", model, level="trace"):
            for _ in range(2):
                model.generate(torch.ones(4, 1, 256, device=device), 6)
    (first, *_) = gpuprobe.load(tmp_path / "a.gpuprobe").ranks[0].traces
    kept = Category.KV_CACHE.code
    sizes = [
        size
        for action, code, size in zip(
            first.events.action, first.events.category, first.events.size, strict=True
        )
        if action == TraceAction.ALLOC.code and code == kept
    ]
    # Both layers, with 1 to 6 tokens, 4 kB each; nothing that was dropped at once.
    expected = [4 * 256 * 4 * tokens for tokens in range(1, 7) for _ in range(2)]
    assert sizes[: len(expected)] == expected
    assert len(sizes) in (len(expected), 2 * len(expected))  # of one call of generate, or of both
    parameters = [c for c in first.baseline.category if c == Category.PARAMETER.code]
    assert len(parameters) == 4


def test_caches_in_attributes_are_found(tmp_path: Path) -> None:
    class Static(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.nn.Linear(16, 16)
            self.register_buffer("k_cache", torch.zeros(64, 16))
            self.register_buffer("running_mean", torch.zeros(16))
            self.cache_v = torch.zeros(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x)

    model = Static()
    with gpuprobe.record(tmp_path / "a.gpuprobe", model), torch.inference_mode():
        model(torch.ones(2, 16))
    (tensors,) = steps(tmp_path / "a.gpuprobe")[0].tensors
    assert tensors.by_category[Category.KV_CACHE] == (64 + 32) * 16 * 4
    assert tensors.by_category[Category.BUFFER] == 16 * 4
