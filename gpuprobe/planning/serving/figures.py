"""A serving estimate, from the events of a vLLM and, if it failed, from its log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.model.plans.serving import PeakLine, ServingEstimate
from gpuprobe.model.values import Bytes
from gpuprobe.planning.serving.observer import Event

_STAGES: Final = {
    "init_device": "at the start",
    "load_model": "loading the weights",
    "determine_available_memory": "in the profiling run",
    "initialize_from_config": "allocating the KV cache",
    "compile_or_warm_up_model": "warming up and capturing CUDA graphs",
    "engine": "sizing the KV cache",
}
_ENGINE_FIELDS: Final = (
    "model",
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "tokens",
    "concurrency",
)
_ERROR: Final = re.compile(
    r"(?:^|\s)((?:[\w.]*(?:Error|Exception)|pydantic_core\S*): ?.+)$|error: (.+)$"
)
_PREFIX: Final = re.compile(r"^\(\w+ pid=\d+\)\s*(?:ERROR [\d-]+ [\d:]+ \[[^\]]*\]\s*)?")


def serving_estimate(
    events: Sequence[Event],
    log: str,
    *,
    command: str,
    gpu: str,
    vllm: str,
    torch: str,
    capacity: int,
    constants: Overheads,
    hangs: bool = False,
) -> ServingEstimate:
    """The estimate from the ``events`` of all processes, oldest first, and the ``log`` of vLLM.
    ``hangs``: vLLM was ended because it made no progress.
    """
    by_stage = {event["stage"]: event for event in events}
    fields: dict[str, Any] = {}
    device, load = by_stage.get("init_device"), by_stage.get("load_model")
    profile, cache = (
        by_stage.get("determine_available_memory"),
        by_stage.get("initialize_from_config"),
    )
    warm, engine = by_stage.get("compile_or_warm_up_model"), by_stage.get("engine")
    if device is not None:
        fields["requested"] = Bytes(device["requested"])
    if load is not None:
        fields["weights"] = Bytes(load["weights"])
    if profile is not None:
        if profile["activation"] is not None:
            fields["activation"] = Bytes(profile["activation"])
        fields["compile_cache"] = profile["said"].get("compile_cache", "")
        fields["non_torch"] = Bytes(profile["in_use"] - profile["reserved"])
        fields["non_torch_low"] = Bytes(constants.low)
        fields["non_torch_high"] = Bytes(constants.high)
    if cache is not None:
        fields["kv_cache"], fields["blocks"] = Bytes(cache["kv_bytes"]), cache["blocks"]
    graphs = by_stage.get("graphs")
    if graphs is not None:
        fields["graphs"], fields["graphs_captured"] = Bytes(graphs["bytes"]), graphs["count"]
    if warm is not None:
        fields["left"] = Bytes(max(capacity - warm["in_use"], 0))
    if engine is not None:
        fields |= {
            "utilization": engine["gpu_memory_utilization"],
            "quantization": engine["quantization"] or "",
            **{name: engine[name] for name in _ENGINE_FIELDS},
        }
    peak = by_stage.get("peak")
    if peak is not None:
        fields["peak"] = tuple(
            PeakLine(row["place"], row["function"], Bytes(row["bytes"])) for row in peak["rows"]
        )
    started = "up" in by_stage
    if not started:
        fields |= _failure(events, log, hangs)
    return ServingEstimate(
        command=command,
        gpu=gpu,
        vllm=vllm,
        torch=torch,
        capacity=Bytes(capacity),
        started=started,
        assumed=_assumed(by_stage),
        **fields,
    )


def _assumed(by_stage: Mapping[str, Event]) -> tuple[str, ...]:
    texts = [
        "memory outside of torch's allocator: a constant from public start-up logs of vLLM 0.19 "
        "on an H100, or from the catalogue for other GPUs",
        "the driver's memory for CUDA graphs is not included in 'left over': "
        "0.2 to 1.5 GiB in public logs",
    ]
    options = by_stage.get("options")
    if options is not None:
        if options["load_format"] != "dummy":
            texts.append("the weights were not read: their sizes come from config.json")
        if not options["tokenizer"]:
            texts.append("there is no tokenizer in the model's folder: none was loaded")
    if "not observed" in by_stage:
        texts.append(f"part of this vLLM is unknown: {by_stage['not observed']['error']}")
    return tuple(texts)


def _failure(events: Sequence[Event], log: str, hangs: bool) -> dict[str, object]:
    """The stage in which vLLM failed, its error, and advice."""
    failed = [event for event in events if event["stage"].endswith(": failed")]
    started = [event["stage"] for event in events if event["stage"].endswith(": begins")]
    if failed:
        stage = failed[0]["stage"].partition(":")[0]
        error = f"{failed[0]['error']}: {failed[0]['message']}"
    else:
        stage = started[-1].partition(":")[0] if started else ""
        error = "vLLM made no progress and was ended" if hangs else last_error(log)
    return {
        "stage": _STAGES.get(stage, "reading its options"),
        "error": error,
        "advice": advice(error, stage),
    }


def last_error(log: str) -> str:
    """The last error in vLLM's log, without the name of the process that printed it."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        match = _ERROR.search(lines[at])
        if match is None or "See root cause above" in lines[at]:
            continue
        text = str(match[1] or match[2])
        if "validation error" in text:  # pydantic's message continues in the lines below
            text = " ".join([text, *filter(None, lines[at + 1 : at + 3])])
        return text
    return "vLLM ended without a message"


def needs_compiler(error: str) -> bool:
    """Whether an error means that kernels could not be compiled, which depends on this machine,
    not on the GPU.
    """
    return "Ninja build failed" in error or "nvcc" in error


def advice(error: str, stage: str) -> tuple[str, ...]:
    """Options that may avoid an error of vLLM."""
    if "estimated maximum model length" in error or "larger than the available KV cache" in error:
        longest = re.search(r"estimated maximum model length is ([\d,]+)", error)
        return (
            f"--max-model-len {longest[1]}" if longest else "a smaller --max-model-len",
            "--kv-cache-dtype fp8 halves the KV cache per token",
            "a larger --gpu-memory-utilization, a quantised model, or more GPUs",
        )
    if "No available memory for the cache blocks" in error:
        return (
            "the weights and activations need all that is requested: a quantised model, a larger "
            "--gpu-memory-utilization, a smaller --max-num-batched-tokens, or a larger GPU",
        )
    if "OutOfMemory" in error or "out of memory" in error:
        if stage == "load_model":
            return ("the weights do not fit: a quantised model, a larger GPU, or more GPUs",)
        if stage == "compile_or_warm_up_model":
            return (
                "a smaller --gpu-memory-utilization or --max-num-seqs leaves room for the warm-up",
            )
        return ("a smaller --max-num-batched-tokens or --max-num-seqs",)
    if "max_position_embeddings" in error or "derived max_model_len" in error:
        return ("a --max-model-len of at most what the model was made for",)
    if "not a valid" in error or "LocalEntryNotFound" in error or "offline" in error.lower():
        return ("a folder with the model's config.json in place of its name",)
    return ()


# Memory of a vLLM process outside of torch's allocator, which no simulation can find. The figures
# are those of vLLM 0.19.0 on one H100 80GB, from public start-up logs. For other GPUs the
# catalogue has the context, which is divided in the same proportion.
#
# Source: llm-d-incubation/llm-d-planner, pull request 205, `accuracy/results/v0.19.0/logs`: 43
# starts on one GPU, split by model. The median of one half (29 starts) is used: 0.51 GiB at the
# start and 0.25 GiB more after the profiling run. In the other half (14 starts) the sum is off by
# 0.02 GiB on average. `tests/recorded/vllm/public_logs.json` has the figures and the rule of the
# split, and `tests/serving/test_serving_constants.py` repeats this.

_GIB: Final = 1 << 30
_START: Final = 0.51 * _GIB
"""Bytes in use when vLLM takes its first snapshot: the CUDA context."""
_FIRST_USE: Final = 0.25 * _GIB
"""Bytes added by its profiling run: the code of kernels, handles of libraries."""
_BELOW: Final = 0.02 * _GIB
_ABOVE: Final = 0.22 * _GIB
"""The distances of the least and the most in the public logs from the sum of both."""
_REFERENCE: Final = "NVIDIA H100 80GB HBM3"


class Overheads(NamedTuple):
    """Bytes of one process on one GPU outside of torch's allocator: at the start, added by the
    profiling run, and the range of both together.
    """

    start: int
    first_use: int
    low: int
    high: int


def overheads(gpu: GpuModel) -> Overheads:
    """The overheads on a GPU of the catalogue. A GPU without a context there is assumed to be like
    an H100.
    """
    total = _START + _FIRST_USE
    low, high = total - _BELOW, total + _ABOVE
    if gpu.title != _REFERENCE and gpu.context_high:
        middle = (gpu.context_low + gpu.context_high) / 2
        low, high = min(gpu.context_low, middle - _BELOW), max(gpu.context_high, middle + _ABOVE)
        total = middle
    start = int(total * _START / (_START + _FIRST_USE))
    return Overheads(start, int(total) - start, int(low), int(high))
