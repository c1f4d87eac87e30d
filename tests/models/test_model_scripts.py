"""The scripts that gpuprobe writes: Python that a person can read, for each choice."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuprobe.api.models import DTYPES, METHODS, OPTIMIZERS, SHARDINGS
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.errors import GpuprobeError, MissingExtra, UsageError
from gpuprobe.model.plans.estimate import EstimatedChange
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.model.values import Bytes
from gpuprobe.planning import alternatives as alternatives_module
from gpuprobe.planning.models import run as run_module
from gpuprobe.planning.models import script as script_module
from gpuprobe.planning.models.alternatives import ModelChanges
from gpuprobe.planning.models.configs import ModelConfig, find_model, known_models
from gpuprobe.planning.models.run import ModelRun
from gpuprobe.planning.models.script import script
from gpuprobe.planning.suggestions import Alternative, Skipped

LLAMA = find_model("llama-3.1-8b")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is written without importing what it imports."""
    for module in (run_module, alternatives_module):
        monkeypatch.setattr(module, "find_spec", lambda name: object())


def names_in(text: str) -> set[str]:
    """The names that a module reads, and checks that it defines or imports each."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    stored |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    builtin = {
        "int",
        "float",
        "list",
        "range",
        "type",
        "isinstance",
        "setattr",
        "__doc__",
        "__name__",
    }
    assert loaded - stored - builtin == set()
    return loaded


CASES = list(itertools.product(METHODS, OPTIMIZERS, DTYPES, (False, True), [None, *SHARDINGS]))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "bert-base", "t5-small", "vit-base"])
def test_every_allowed_choice_is_a_module_that_uses_what_it_imports(model: str) -> None:
    written = 0
    for method, optimizer, dtype, checkpointing, sharding in CASES:
        run = ModelRun(
            find_model(model),
            method=method,
            optimizer=optimizer,
            dtype=dtype,
            checkpointing=checkpointing,
            ranks=4 if sharding else 1,
            sharding=sharding or "fsdp",
        )
        try:
            run.check()
        except UsageError:
            continue
        text = script(run)
        written += 1
        loaded = names_in(text)
        tree = ast.parse(text)
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert imported <= loaded
        assert "gpuprobe" not in text.replace("Written by: gpuprobe", "")
        assert max(map(len, text.splitlines())) <= 100
    assert written > 300


@pytest.mark.parametrize("name", sorted(known_models()))
def test_every_known_model_has_a_script_to_train_and_to_run_it(name: str) -> None:
    for inference in (False, True):
        run = ModelRun(find_model(name), inference=inference)
        run.check()
        names_in(script(run, "gpuprobe estimate"))


@pytest.mark.parametrize(
    ("version", "dtype", "checkpointing"),
    [
        ("4.55.4", "torch_dtype=", "gradient_checkpointing_enable("),
        ("4.56.0", "dtype=", "gradient_checkpointing_enable("),
        ("5.22.2", "dtype=", "gradient_checkpointing_enable("),
        ("5.23.0", "dtype=", "activation_checkpointing_enable("),
        ("unknown", "dtype=", "activation_checkpointing_enable("),
    ],
)
def test_a_script_has_the_names_of_the_installed_transformers(
    monkeypatch: pytest.MonkeyPatch, version: str, dtype: str, checkpointing: str
) -> None:
    monkeypatch.setattr(
        script_module.metadata, "version", lambda name: {"transformers": version}[name]
    )
    text = script(ModelRun(find_model("llama-3.2-1b"), checkpointing=True))
    assert f"model.{checkpointing}" in text
    assert f" {dtype}torch.bfloat16" in text or f"({dtype}torch.bfloat16" in text


def test_a_script_shows_its_command_and_choices() -> None:
    run = ModelRun(LLAMA, method="lora", lora_rank=8, lora_targets=("q_proj",), batch_size=3)
    text = script(run, "gpuprobe estimate --model llama-3.1-8b")
    assert "Written by: gpuprobe estimate --model llama-3.1-8b" in text
    assert '"--batch-size", type=int, default=3' in text
    assert '"--lora-rank", type=int, default=8' in text
    assert 'target_modules=["q_proj"]' in text
    assert '"hidden_size": 4096' in text


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (ModelRun(find_model("gpt2"), sequence_length=1025), "gpt2 has 1024 positions"),
        (ModelRun(find_model("roberta-base"), sequence_length=513), "has 512 positions"),
        (ModelRun(find_model("vit-base"), sequence_length=64), "reads images"),
        (ModelRun(LLAMA, method="qlora", dtype="fp32"), "computes in bf16"),
        (ModelRun(find_model("gpt2"), method="qlora"), "Conv1D"),
        (ModelRun(LLAMA, inference=True, method="lora"), "without adapters"),
        (ModelRun(LLAMA, inference=True, ranks=2), "one GPU"),
        (ModelRun(LLAMA, inference=True, dtype="bf16-mixed"), "for training"),
        (ModelRun(LLAMA, method="qlora", ranks=2), "not sharded"),
        (ModelRun(LLAMA, optimizer="adamw-8bit", ranks=2), "8-bit optimizer"),
    ],
)
def test_choices_that_exclude_each_other(run: ModelRun, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run.check()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "package"),
    [
        ({}, "transformers"),
        ({"method": "lora"}, "peft"),
        ({"method": "qlora"}, "bitsandbytes"),
        ({"optimizer": "adamw-8bit"}, "bitsandbytes"),
        ({"attention": "flash_attention_2"}, "flash_attn"),
    ],
)
def test_a_package_that_is_missing_is_named(
    changes: dict[str, str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(GpuprobeError, match=f"^{package} is not installed") as caught:
        ModelRun(LLAMA, **changes).check()  # type: ignore[arg-type]
    assert caught.value.hint
    assert isinstance(caught.value, MissingExtra) is (package != "flash_attn")


def test_sequences_are_as_long_as_the_model_allows() -> None:
    assert ModelRun(LLAMA).tokens == 2048
    assert ModelRun(find_model("gpt2")).tokens == 1024
    assert ModelRun(find_model("gpt2"), inference=True, new_tokens=24).tokens == 1000
    assert ModelRun(find_model("gpt2"), sequence_length=16).tokens == 16


# -- what would make it fit

REQUEST = EstimateRequest("train.py", gpu="rtx-4090")


def tried(run: ModelRun, folder: Path, fitting: str = "") -> list[Alternative | Skipped]:
    """What the provider yields, if the change of that name fits."""
    changes = ModelChanges(run, folder)(replace(REQUEST, ranks=run.ranks))
    found: list[Alternative | Skipped] = []
    result: EstimatedChange | None = None
    while True:
        try:
            change = changes.send(result) if found else next(changes)
        except StopIteration:
            return found
        found.append(change)
        result = None
        if isinstance(change, Alternative):
            verdict = "fits" if change.name == fitting else "does not fit"
            result = EstimatedChange(change.name, change.how, verdict, Bytes(0))


def test_changes_are_other_scripts_and_end_with_more_gpus(tmp_path: Path) -> None:
    found = tried(ModelRun(LLAMA), tmp_path)
    names = [change.name for change in found if isinstance(change, Alternative)]
    assert names == [
        "LoRA",
        "activation checkpointing and LoRA",
        "activation checkpointing and QLoRA",
        "8 GPUs with FSDP2",
        "activation checkpointing and 8 GPUs with FSDP2",
        "activation checkpointing and 64 GPUs with FSDP2",
    ]
    skipped = {change.name: change.reason for change in found if isinstance(change, Skipped)}
    assert "alone are 59.8 GiB" in skipped["activation checkpointing"]
    for change in found:
        if isinstance(change, Alternative):
            text = Path(change.request.script).read_text(encoding="utf-8")
            enabled = "checkpointing_enable" in text or "use_gradient_checkpointing=True" in text
            assert enabled is ("checkpointing" in change.how)
            assert ("fully_shard" in text) is ("GPUs" in change.name)
            assert (change.request.ranks > 1) is ("GPUs" in change.name)


def test_a_change_that_is_enough_is_not_combined(tmp_path: Path) -> None:
    small = find_model("llama-3.2-1b")
    found = tried(ModelRun(small, batch_size=8), tmp_path, "activation checkpointing")
    names = [change.name for change in found if isinstance(change, Alternative)]
    assert names[:5] == [
        "batch size 4, with gradient accumulation",
        "batch size 2, with gradient accumulation",
        "batch size 1, with gradient accumulation",
        "activation checkpointing",
        "8-bit optimizer",
    ]
    first = "batch size 1, with gradient accumulation and activation checkpointing"
    assert first not in names


def test_batches_that_need_too_much_by_the_two_before_are_not_tried(tmp_path: Path) -> None:
    small = find_model("llama-3.2-1b")
    changes = ModelChanges(ModelRun(small, batch_size=64), tmp_path)(REQUEST)
    assert isinstance(changes, Generator)
    (model,) = parse_spec(REQUEST.gpu)
    tried_sizes, skipped = [], []
    change = next(changes)
    while change.name.startswith("batch size"):
        result = None
        size = int(change.name.split()[2].rstrip(","))
        if isinstance(change, Skipped):
            skipped.append(size)
        else:
            tried_sizes.append(size)
            needed = model.total_memory * (1 + size) // 6
            verdict = "fits" if needed < model.total_memory else "does not fit"
            result = EstimatedChange(change.name, change.how, verdict, Bytes(needed))
        change = changes.send(result)
    assert (tried_sizes, skipped) == ([32, 16, 4], [8])


def test_inference_has_smaller_weights_and_batches(tmp_path: Path) -> None:
    run = ModelRun(LLAMA, inference=True, batch_size=4)
    names = [change.name for change in tried(run, tmp_path)]
    assert names == [
        "batch size 2",
        "batch size 1",
        "4-bit weights",
        "batch size 1 and 4-bit weights",
    ]


def test_weights_of_an_unknown_model_are_not_compared(tmp_path: Path) -> None:
    unknown = ModelConfig("mine", LLAMA.fields)
    found = tried(ModelRun(unknown), tmp_path)
    assert not [change for change in found if isinstance(change, Skipped)]


def test_the_least_memory_of_a_rank_is_what_it_holds() -> None:
    """A run is not tried if this exceeds the GPU: it must not be more than the run needs."""
    model = known_models()["llama-3.1-70b"]
    gib = model.parameters / 2**30

    def least(**fields: Any) -> float:
        return ModelRun(model, **fields).least_memory / 2**30

    assert least() == pytest.approx(8 * gib)
    assert least(ranks=8) == pytest.approx(gib)
    assert least(ranks=8, sharding="ddp") == pytest.approx(8 * gib)
    assert least(ranks=8, sharding="zero1") == pytest.approx((2 + 2 + 4 / 8) * gib)
    assert least(ranks=8, sharding="zero2") == pytest.approx((2 + 2 / 8 + 4 / 8) * gib)
    assert least(method="lora") == pytest.approx(2 * gib)
    assert least(method="lora", ranks=8) == pytest.approx(2 / 8 * gib)
    assert least(method="qlora") == pytest.approx(0.5 * gib)
    assert least(inference=True) == pytest.approx(2 * gib)
