"""Serving estimates from what real vLLMs did and printed, as recorded in `tests/recorded/vllm`."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuprobe.api.render import render
from gpuprobe.api.serving import check_version, compile_caches, estimate_serving, with_later_start
from gpuprobe.catalogue.gpus import find
from gpuprobe.errors import EnvironmentUnavailable, UsageError
from gpuprobe.model.plans.serving import ServingEstimate
from gpuprobe.model.values import Bytes
from gpuprobe.planning.serving.figures import (
    advice,
    last_error,
    minor_version,
    needs_compiler,
    overheads,
    serving_estimate,
    unquantized,
)
from gpuprobe.planning.serving.observer import rows_at_peak
from gpuprobe.planning.serving.search import sequences
from gpuprobe.reporters.json.plans import SERVING
from gpuprobe.reporters.json.schemas import schema

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def _recorded(name: str, log: str = "", tensor: int = 1, vllm: str = "0.19.1") -> ServingEstimate:
    text = (ROOT / f"tests/recorded/vllm/{name}.events").read_text()
    gpu = find("h100-80gb")
    return serving_estimate(
        [json.loads(line) for line in text.splitlines()],
        log,
        command="vllm serve m",
        gpu=gpu.title,
        vllm=vllm,
        torch="2.10.0+cu128",
        capacity=gpu.total_memory,
        constants=overheads(gpu, tensor),
    )


def _text(found: ServingEstimate) -> str:
    stream = io.StringIO()
    render(found, "text", stream)
    return stream.getvalue()


def test_a_version_that_sets_memory_aside_for_cuda_graphs() -> None:
    """Of Llama-3.1-8B, 8192 tokens, 0.95, with compiled code. It captures graphs twice."""
    found = _recorded("llama-3.1-8b-0.33", vllm="0.33.0")
    assert found.started
    assert found.activation == 1_918_940_672
    assert found.graphs_reserved == 1_044_381_696
    assert (found.graphs, found.graphs_captured, found.graph_nodes) == (924_844_032, 1734, 34_425)
    assert (found.blocks, found.tokens) == (29_015, 29_015 * 16)
    assert found.requested is not None
    assert found.kv_cache is not None
    parts = (found.weights, found.activation, found.graphs_reserved, found.kv_cache)
    assert sum(part or 0 for part in parts) < found.requested
    text = _text(found)
    assert "graphs, reserved    996.0 MiB  for CUDA graphs, which the KV cache" in text
    assert "not tried" not in text
    assert "graphs, reserved" not in _text(_recorded("llama-3.1-8b"))


def test_an_8b_model_against_the_log_of_an_h100() -> None:
    """The public log of Llama-3.1-8B, 8192 tokens, 0.95: weights 14.99, activations 1.89, KV cache
    58.11 GiB, 476,016 tokens.
    """
    found = _recorded("llama-3.1-8b")
    assert found.started
    assert found.weights is not None
    assert round(found.weights / GIB, 2) == 14.99
    assert found.activation is not None
    assert round(found.activation / GIB, 2) == 1.89
    assert found.kv_cache is not None
    assert abs(found.kv_cache / GIB - 58.11) < 0.02
    assert found.tokens is not None
    assert abs(found.tokens / 476_016 - 1) < 0.003
    assert found.blocks is not None
    assert found.block_size is not None
    assert found.tokens == found.blocks * found.block_size
    assert found.graphs is not None
    assert found.graphs_captured == 51 * 34
    text = _text(found)
    for part in ("starts", "weights              15.0 GiB", "KV cache", "random_sample", "Assumed"):
        assert part in text


def test_two_ranks_against_the_log_of_two_h100s() -> None:
    """The public log of Llama-3.1-8B with TP 2: weights 7.51, activations 1.89, non-torch 1.51 and
    2.07, KV cache 63.76 GiB, 1,044,688 tokens.
    """
    found = _recorded("llama-3.1-8b-tp2", tensor=2)
    assert found.started
    assert [one.rank for one in found.ranks] == [0, 1]
    first = found.ranks[0]
    assert first.weights is not None
    assert first.activation is not None
    assert first.non_torch is not None
    assert first.kv_cache is not None
    assert round(first.weights / GIB, 2) == 7.51
    assert round(first.activation / GIB, 2) == 1.89
    assert round(first.non_torch / GIB, 2) == 1.51 + 2.07
    assert abs(first.kv_cache / GIB - 63.76) < 0.02
    assert found.tokens is not None
    assert abs(found.tokens / 1_044_688 - 1) < 0.001
    # The figures outside of the list are those of the rank with the most memory.
    assert (found.weights, found.kv_cache) == (first.weights, first.kv_cache)
    text = " ".join(_text(found).split())
    assert "the CUDA context, NCCL and kernels" in text
    assert "rank weights activations non-torch KV cache graphs left over 0 7.5 GiB" in text


def test_a_context_that_is_too_long() -> None:
    found = _recorded("kv-cache-too-small")
    assert not found.started
    assert found.stage == "sizing the KV cache"
    assert found.weights is not None
    assert found.kv_cache is None
    assert any(text.startswith("--max-model-len ") for text in found.advice)
    assert "does not start: it fails sizing the KV cache" in " ".join(_text(found).split())


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-8b-tp2", "kv-cache-too-small"])
def test_the_document_is_valid(name: str) -> None:
    document = SERVING.plain(_recorded(name))
    rules = schema("serving-1")
    jsonschema.Draft202012Validator(rules).validate(json.loads(json.dumps(document)))
    assert set(document) == set(rules["properties"])
    added = set(SERVING.added)
    assert set(rules["required"]) == set(document) - added


def test_an_error_before_any_stage() -> None:
    log = (
        "(APIServer pid=7) INFO 11-26 08:44:54 [utils.py:299] version 0.19.1\n"
        "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error\n"
        "(APIServer pid=7) ValueError: 'org/m' is not a valid model\n"
    )
    found = serving_estimate(
        [], log, command="c", gpu="g", vllm="v", torch="t", capacity=1,
        constants=overheads(find("h100-80gb")),
    )  # fmt: skip
    assert found.stage == "reading its options"
    assert found.error == "ValueError: 'org/m' is not a valid model"
    assert found.advice
    below = "ValidationError: 1 validation error for ModelConfig\n  Value error, 9 is too long\n"
    assert last_error(below).endswith("for ModelConfig Value error, 9 is too long")
    assert needs_compiler("RuntimeError: Ninja build failed.")
    assert last_error("nothing\n") == "vLLM ended without a message"


@pytest.mark.parametrize(
    ("model", "method", "quantized", "reason"),
    [
        ("/m/Llama-3.1-8B-AWQ", None, False, "named AWQ"),
        ("org/Llama-3.1-8B-Instruct-quantized.w4a16", None, False, "named w4a16"),
        ("org/Llama-3.1-8B-AWQ", "awq_marlin", True, ""),
        ("org/model", "compressed-tensors", False, "config_groups"),
        ("org/flawed-bitter-fp80", None, False, ""),
        ("org/Llama-3.1-8B", None, False, ""),
    ],
)
def test_a_quantised_model_without_its_method(
    model: str, method: str | None, quantized: bool, reason: str
) -> None:
    found = unquantized(
        {
            "engine": {"model": model, "quantization": method},
            "parameters": {"quantized": quantized},
        }
    )
    assert reason in found
    assert bool(found) == bool(reason)


def test_advice_for_memory_that_runs_out() -> None:
    error = "OutOfMemoryError: CUDA out of memory."
    assert "do not fit" in advice(error, "load_model")[0]
    assert "--gpu-memory-utilization" in advice(error, "compile_or_warm_up_model")[0]
    for error in (
        "ValueError: No available memory for the cache blocks.",
        "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available",
    ):
        assert "--gpu-memory-utilization" in advice(error, "engine")[0]
    assert advice("KeyError: 1", "engine") == ()


def test_advice_for_a_multimodal_model_without_its_processor() -> None:
    """It is given if vLLM failed before its first stage; a later failure has another reason."""
    gpu = find("h100-80gb")

    def found(*stages: str) -> ServingEstimate:
        lacking = {"stage": "processor", "missing": ["preprocessor_config.json", "tokenizer.json"]}
        events: list[dict[str, Any]] = [{"time": 0, "rank": -1, **lacking}] * 2
        events += [{"time": 1, "rank": 0, "stage": stage} for stage in stages]
        return serving_estimate(
            events,
            "OSError: Can't load image processor for './m'",
            command="vllm serve ./m",
            gpu=gpu.title,
            vllm="0.19.1",
            torch="2.10.0+cu128",
            capacity=gpu.total_memory,
            constants=overheads(gpu),
        )

    (text,) = found().advice
    assert "no preprocessor_config.json and tokenizer.json;" in text
    assert "image processor" in found().error
    assert found("load_model: begins").advice == ()


def test_advice_for_a_processor_that_rejects_what_vllm_passes() -> None:
    error = "ValueError: Failed to apply Gemma3Processor on data={'text': '<start_of_image>'}"
    assert "another version of transformers" in advice(error, "")[0]


def test_the_highest_moment_of_a_history() -> None:
    def event(action: str, address: int, size: int, file: str) -> dict[str, Any]:
        frames = [
            {"filename": "/x/torch/nn.py", "line": 1, "name": "call"},
            {"filename": file, "line": 5, "name": "forward"},
        ]
        return {"action": action, "addr": address, "size": size, "frames": frames}

    rows = rows_at_peak(
        [
            event("alloc", 1, 10, "a.py"),
            event("alloc", 2, 30, "b.py"),
            event("free_completed", 2, 30, "b.py"),
            event("alloc", 2, 20, "c.py"),
            event("free_completed", 9, 99, "before.py"),
        ]
    )
    assert [tuple(row) for row in rows] == [
        ("b.py:5", "forward", 30, False),
        ("a.py:5", "forward", 10, False),
    ]


def test_arguments_of_kernels_that_the_compiler_tries_are_its_own() -> None:
    """Inductor's frames when vLLM first compiles Llama 3.1 8B: a copy of the embedding."""
    site = "/v/lib/python3.11/site-packages"
    graph = f"{site}/torch/_inductor/graph.py"
    trying = [
        {"filename": f"{site}/torch/_dynamo/testing.py", "line": 462, "name": "rand_strided"},
        {
            "filename": f"{site}/torch/_inductor/graph.py",
            "line": 2422,
            "name": "_compile_to_module",
        },
        {"filename": f"{site}/vllm/tracing/otel.py", "line": 178, "name": "sync_wrapper"},
    ]
    running = [
        {"filename": f"{site}/torch/_inductor/output_code.py", "line": 9, "name": "__call__"},
        {"filename": f"{site}/vllm/model.py", "line": 5, "name": "forward"},
    ]
    rows = rows_at_peak(
        [
            {"action": "alloc", "addr": 1, "size": 10, "frames": running},
            {"action": "alloc", "addr": 2, "size": 1_050_673_152, "frames": trying},
        ]
    )
    assert [tuple(row) for row in rows] == [
        (f"{graph}:2422", "_compile_to_module", 1_050_673_152, True),
        (f"{site}/vllm/model.py:5", "forward", 10, False),
    ]


def _compiling(first: ServingEstimate, second: ServingEstimate) -> ServingEstimate:
    starts = iter([second])
    return with_later_start(replace(first, compiling=True), lambda: next(starts), lambda text: None)


def test_a_start_that_needed_most_as_it_compiled_is_repeated() -> None:
    first = _recorded("llama-3.1-8b")
    assert "later" not in _text(first)
    second = replace(first, kv_cache=Bytes(60 * GIB), tokens=491_520)
    found = _compiling(first, second)
    assert found.later is not None
    assert (found.kv_cache, found.later.kv_cache) == (first.kv_cache, 60 * GIB)
    text = " ".join(_text(found).split())
    assert "KV cache, later 60.0 GiB 491,520 tokens in later starts" in text
    document = SERVING.plain(found)
    assert document["later"]["tokens"] == 491_520
    assert sequences(found, 4096) == 491_520 // 4096


def test_a_start_that_needed_most_for_the_model_is_not_repeated() -> None:
    def start() -> ServingEstimate:
        raise AssertionError

    first = _recorded("llama-3.1-8b")
    assert with_later_start(first, start, lambda text: None) is first


def test_a_later_start_may_come_up_or_fail_too() -> None:
    fails, starts = _recorded("kv-cache-too-small"), _recorded("llama-3.1-8b")
    text = " ".join(_text(_compiling(fails, starts)).split())
    assert "KV cache, later 58.1 GiB 475,9" in text
    assert "- a second start: it finds the code" in text
    assert "a later start fails too" in " ".join(_text(_compiling(fails, fails)).split())


def test_compiled_code_is_kept_apart_from_that_of_real_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = compile_caches("0.19.1", ["vllm", "serve", "m"], "l4")
    assert {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} == set(folders)
    assert all(Path(folder).is_relative_to(tmp_path) for folder in folders.values())


def test_what_inductor_compiled_is_that_of_the_same_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()

    def folders(gpu: str = "l4", *options: str) -> dict[str, str]:
        words = ["vllm", "serve", str(model), "--hf-overrides", "x" * 5000, "\0", *options]
        return compile_caches("0.19.1", words, gpu)

    kinds = [folders(), folders("l40s"), folders("l4", "--max-num-seqs", "8")]
    (model / "config.json").write_text("{}")
    kinds.append(folders())
    assert folders() == kinds[-1]
    assert len({found["TORCHINDUCTOR_CACHE_DIR"] for found in kinds}) == 4
    assert len({(found["VLLM_CACHE_ROOT"], found["TRITON_CACHE_DIR"]) for found in kinds}) == 1


@pytest.mark.parametrize(
    ("words", "gpu", "problem"),
    [
        (["-tp", "2"], "h100", "needs 2 GPUs, and --gpu names 1"),
        (["-dp", "2"], "2xh100", "data parallelism"),
        (["-pp", "2"], "h100,a100-80gb", "several kinds"),
    ],
)
def test_gpus_that_do_not_fit_the_command(words: list[str], gpu: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        estimate_serving(["vllm", "serve", "m", *words], gpu)


def test_the_constants_of_other_gpus_hold_their_context() -> None:
    for name in ("h100-80gb", "h200-141gb", "a100-40gb", "t4"):
        gpu = find(name)
        for tensor, pipeline in ((1, 1), (2, 1), (8, 1), (1, 2), (2, 2)):
            found = overheads(gpu, tensor, pipeline)
            assert 0 < found.low <= found.start + found.first_use <= found.high
            assert found.context <= found.start
            without_nvls = tensor > 1 and name in ("a100-40gb", "t4")
            assert len(found.notes) == without_nvls + ((tensor, pipeline) in ((8, 1), (2, 2)))


def test_nccl_on_gpus_without_nvlink_sharp() -> None:
    """The KV cache of four L40S in a public log, with the weights and activations found here."""
    gpu = find("l40s")
    found = overheads(gpu, 4)
    requested = 0.9 * gpu.total_memory
    cache = requested - (33.98 + 0.636) * (1 << 30) - found.first_use
    assert abs(cache / (5.11 * (1 << 30)) - 1) < 0.005
    assert overheads(gpu).first_use == found.first_use
    assert overheads(find("h100-80gb"), 4).first_use > 1 << 30


@pytest.mark.slow
@pytest.mark.skipif(not list(distributions(name="vllm")), reason="vllm is not installed")
def test_a_real_vllm(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
        "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = estimate_serving(["vllm", "serve", str(tmp_path), "--enforce-eager"], "l4")
    assert found is not None
    assert found.started, found.error
    assert found.weights
    assert found.tokens
    assert found.concurrency


def test_versions_of_vllm() -> None:
    assert minor_version("0.20.2rc1.dev9+g01d4d1ad3") == (0, 20)
    check_version("0.8.0")
    with pytest.raises(EnvironmentUnavailable, match=r"vLLM 0.7.3 starts its V0 engine.* 0.33"):
        check_version("0.7.3")


def test_a_version_that_was_not_tried_is_named() -> None:
    def estimate(version: str) -> str:
        found = serving_estimate(
            [], "", command="", gpu="", vllm=version, torch="", capacity=1,
            constants=overheads(find("h100-80gb")),
        )  # fmt: skip
        return "\n".join(found.assumed)

    assert "vLLM 0.34.1 was not tried: vLLM 0.19, " in estimate("0.34.1")
    assert "not tried" not in estimate("0.33.0")
