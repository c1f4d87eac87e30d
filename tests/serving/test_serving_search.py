"""The search for how far a deployment goes. A real vLLM takes a minute for each start, so starts
here follow a rule: weights are divided by the ranks, the KV cache gets what is left.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuprobe.api.render import render
from gpuprobe.api.serving import fit_serving
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.serving import ServingEstimate, ServingFit
from gpuprobe.model.values import Bytes
from gpuprobe.planning.commands import serving_command
from gpuprobe.planning.serving.search import search, sequences
from gpuprobe.reporters.json.schemas import schema

MEMORY = {"l4": 24, "h100-80gb": 80}
WEIGHTS, LIMIT = 40, 4096


class Starts:
    """Starts of a model with 40 units of weights and 100 tokens in each unit of KV cache."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def __call__(self, words: Sequence[str], machine: str) -> ServingEstimate:
        self.seen.append((machine, *words))

        def option(name: str, default: str) -> str:  # the last one counts
            at = [index for index, word in enumerate(words) if word == name]
            return words[at[-1] + 1] if at else default

        count, _, name = machine.rpartition("x")
        ranks = int(option("--tensor-parallel-size", "1"))
        assert int(count or 1) == ranks
        weights = WEIGHTS // ranks // (2 if "--quantization" in words else 1)
        cache = MEMORY[name] - weights
        tokens = cache * 100 * (2 if "--kv-cache-dtype" in words else 1)
        wanted = option("--max-model-len", str(LIMIT))
        length = min(LIMIT, tokens) if wanted == "auto" else int(wanted)
        started = cache > 0 and length <= tokens
        return ServingEstimate(
            command=" ".join(words), gpu=name, vllm="0", torch="0",
            capacity=Bytes(MEMORY[name]), started=started, error="" if started else "too large",
            weights=Bytes(weights), kv_cache=Bytes(cache) if started else None,
            tokens=tokens if started else None, block_size=16, max_model_len=length,
            max_num_seqs=64, max_num_batched_tokens=8192,
        )  # fmt: skip


def _search(
    words: Sequence[str], machines: Sequence[tuple[int, str]], **options: Any
) -> tuple[ServingFit, Starts]:
    starts = Starts()
    command = serving_command(words)
    assert command is not None
    return search(starts, words, command, machines, **options), starts


def test_the_smallest_machine_and_number_of_ranks() -> None:
    found, starts = _search(
        ["vllm", "serve", "m"], [(1, "l4"), (4, "l4"), (1, "h100-80gb")], changes=False
    )
    assert [seen[0] for seen in starts.seen] == ["l4", "l4", "2xl4"]
    assert found.found is not None
    assert found.found.machine == "2xl4"
    assert found.found.options == ("--max-model-len", "auto", "--tensor-parallel-size", "2")
    assert found.longest == 400  # what the KV cache holds
    assert [trial.started for trial in found.trials] == [False, False, True]


def test_changes_each_alone() -> None:
    found, _ = _search(["vllm", "serve", "m"], [(1, "h100-80gb")], input_len=100, output_len=28)
    by_option = {trial.options[2:]: trial for trial in found.trials}
    assert set(by_option) == {
        (),
        ("--kv-cache-dtype", "fp8"),
        ("--quantization", "fp8"),
        ("--enforce-eager",),
        ("--max-num-batched-tokens", "2048"),
    }
    assert found.longest == 4000
    assert by_option[()].sequences == 31  # 4,000 tokens
    assert by_option[("--kv-cache-dtype", "fp8")].sequences == 62
    assert by_option[("--quantization", "fp8")].tokens == 6000


def test_options_of_the_command_stay() -> None:
    words = [
        "vllm", "serve", "m", "--max-model-len", "512", "--kv_cache_dtype", "fp8", "-q", "awq",
        "--enforce-eager", "--max-num-batched-tokens", "4096",
    ]  # fmt: skip
    found, starts = _search(words, [(1, "h100-80gb")])
    assert [seen[1 + len(words) :] for seen in starts.seen] == [(), ("--max-model-len", "auto")]
    assert found.longest == 4000


def test_nothing_starts() -> None:
    found, _ = _search(["vllm", "serve", "m"], [(1, "l4")])
    assert found.found is None
    stream = io.StringIO()
    render(found, "text", stream)
    assert "does not start on any of these GPUs" in stream.getvalue()
    assert "too large" in stream.getvalue()


def test_ranks_of_the_command() -> None:
    words = ["vllm", "serve", "m", "--tensor-parallel-size", "2"]
    found, starts = _search(words, [(1, "l4"), (4, "l4")], changes=False)
    assert [seen[0] for seen in starts.seen] == ["2xl4"]
    assert found.found is not None


def test_sequences_are_whole_blocks_within_the_limits() -> None:
    estimate = Starts()(["vllm", "serve", "m", "--max-model-len", "auto"], "h100-80gb")
    assert sequences(estimate, 0) == 1
    assert sequences(estimate, 17) == 64  # max_num_seqs, not 125
    assert sequences(estimate, 65) == 50  # blocks of 16 tokens: 80
    assert sequences(estimate, 4001) is None


def test_the_document_and_the_text() -> None:
    found, _ = _search(["vllm", "serve", "m"], [(1, "h100-80gb")], input_len=100, output_len=28)
    stream = io.StringIO()
    render(found, "json", stream)
    rules = schema("serving-fit-1")
    jsonschema.Draft202012Validator(rules).validate(json.loads(stream.getvalue()))
    stream = io.StringIO()
    render(found, "text", stream)
    text = stream.getvalue()
    assert "longest --max-model-len: 4,000 tokens" in text
    assert "sequences of 128 tokens at one time: 31" in text
    assert "5 starts of vLLM" in text


def test_what_cannot_be_searched(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("from vllm import LLM\nLLM('m')\n")
    with pytest.raises(UsageError, match="script's vLLM"):
        fit_serving([str(script)])
    with pytest.raises(UsageError, match="needs 4 GPUs"):
        fit_serving(["vllm", "serve", "m", "-tp", "4"], "l4,2xl4")
    assert fit_serving(["train.py"]) is None
