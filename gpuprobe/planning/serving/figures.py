"""A serving estimate, from the events of a vLLM and, if it failed, from its log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.model.plans.serving import PeakLine, ServingEstimate, ServingRank
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
_QUANTIZED_NAME: Final = re.compile(
    r"(?<![a-z0-9])(?:awq|gptq|gguf|bnb|fp8|fp4|nvfp4|mxfp4|nf4|w\d+a\d+|int[48]|[48]-?bit)"
    r"(?![a-z0-9])",
    re.IGNORECASE,
)
"""Words for quantised weights in names of models on the Hugging Face Hub."""
_OF_RANKS: Final = (
    "init_device",
    "load_model",
    "peak",
    "determine_available_memory",
    "initialize_from_config",
    "graphs",
    "compile_or_warm_up_model",
)
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


TRIED: Final = "vLLM 0.19, 0.31, 0.32 and 0.33"
"""The versions with which starts were compared or run to the end."""
_TRIED: Final = ((0, 19), (0, 31), (0, 32), (0, 33))


def minor_version(version: str) -> tuple[int, int]:
    """The major and minor number of a version such as ``0.20.2rc1.dev9+g01d4d1ad3``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


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
    by_rank: dict[int, dict[str, Event]] = {}
    for event in events:
        if event["stage"] in _OF_RANKS:
            by_rank.setdefault(event["rank"], {})[event["stage"]] = event
    ranks = {rank: _rank(rank, found, capacity) for rank, found in sorted(by_rank.items())}
    if ranks:
        fullest = max(ranks.values(), key=_outside_of_the_cache)
        fields |= asdict(fullest)
        fields.pop("rank")
        fields["ranks"] = tuple(ranks.values()) if len(ranks) > 1 else ()
        fields |= _of_fullest(by_rank[fullest.rank], constants)
    engine = by_stage.get("engine")
    if engine is not None:
        fields |= {
            "utilization": engine["gpu_memory_utilization"],
            "quantization": engine["quantization"] or "",
            **{name: engine[name] for name in _ENGINE_FIELDS},
        }
    fields["unquantized"] = unquantized(by_stage)
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
        assumed=_assumed(by_stage, constants, vllm),
        **fields,
    )


def unquantized(by_stage: Mapping[str, Event]) -> str:
    """The reason why a model that was estimated without quantisation seems to be a quantised one;
    ``""`` if none.
    """
    engine, parameters = by_stage.get("engine"), by_stage.get("parameters")
    if engine is None or parameters is None or parameters["quantized"]:
        return ""
    if engine["quantization"]:
        return (
            f"no weight is quantised, although the method is {engine['quantization']}: "
            "quantization_config in config.json may lack fields, such as config_groups, or "
            "modules_in_block_to_quantize of GPTQ, which vLLM takes from the weights otherwise"
        )
    name = Path(engine["model"]).name
    found = _QUANTIZED_NAME.search(name)
    if found is None:
        return ""
    return (
        f"no weight is quantised, although {name} is named {found[0]}: its config.json has no "
        "quantization_config"
    )


def _rank(rank: int, by_stage: Mapping[str, Event], capacity: int) -> ServingRank:
    """The memory of one rank, from its events by stage."""

    def value(stage: str, name: str) -> Bytes | None:
        found = by_stage.get(stage, {}).get(name)
        return None if found is None else Bytes(found)

    profile, warm = (
        by_stage.get("determine_available_memory"),
        by_stage.get("compile_or_warm_up_model"),
    )
    return ServingRank(
        rank=rank,
        weights=value("load_model", "weights"),
        activation=value("determine_available_memory", "activation"),
        non_torch=None if profile is None else Bytes(profile["in_use"] - profile["reserved"]),
        kv_cache=value("initialize_from_config", "kv_bytes"),
        graphs=value("graphs", "bytes"),
        graphs_reserved=value("determine_available_memory", "graphs"),
        left=None if warm is None else Bytes(max(capacity - warm["in_use"], 0)),
    )


def _outside_of_the_cache(found: ServingRank) -> int:
    parts = (found.weights, found.activation, found.non_torch, found.graphs_reserved)
    return sum(part or 0 for part in parts)


def _of_fullest(by_stage: Mapping[str, Event], constants: Overheads) -> dict[str, Any]:
    """Figures that are given for the rank with the most memory outside of the KV cache."""
    fields: dict[str, Any] = {}
    for stage, name, field in (
        ("init_device", "requested", "requested"),
        ("initialize_from_config", "blocks", "blocks"),
        ("graphs", "count", "graphs_captured"),
        ("graphs", "nodes", "graph_nodes"),
    ):
        if stage in by_stage:
            fields[field] = by_stage[stage][name]
    if "determine_available_memory" in by_stage:
        cached = by_stage["determine_available_memory"]["said"].get("compile_cache", "")
        fields["compile_cache"] = cached
        fields["non_torch_low"] = Bytes(constants.low)
        fields["non_torch_high"] = Bytes(constants.high)
    if "peak" in by_stage:
        fields["peak"] = tuple(
            PeakLine(row["place"], row["function"], Bytes(row["bytes"]))
            for row in by_stage["peak"]["rows"]
        )
        fields["compiling"] = any(row.get("compiling") for row in by_stage["peak"]["rows"])
    return fields


def _assumed(by_stage: Mapping[str, Event], constants: Overheads, version: str) -> tuple[str, ...]:
    texts = [
        "memory outside of torch's allocator: a constant from public start-up logs of vLLM 0.19 "
        "on an H100, or from the catalogue for other GPUs",
        "the driver's memory for CUDA graphs: fitted to public start-up logs, from which it is off "
        "by 0.05 GiB on average",
    ]
    texts.extend(constants.notes)
    if minor_version(version) not in _TRIED:
        texts.append(f"vLLM {version} was not tried: {TRIED} were")
    options = by_stage.get("options")
    if options is not None:
        if options["load_format"] != "dummy":
            texts.append("the weights were not read: their sizes come from config.json")
        if not options["tokenizer"]:
            texts.append("there is no tokenizer in the model's folder: none was loaded")
    if "not observed" in by_stage:
        texts.append(f"part of vLLM was not observed: {by_stage['not observed']['error']}")
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
    missing = [
        name for event in events if event["stage"] == "processor" for name in event["missing"]
    ]
    return {
        "stage": _STAGES.get(stage, "reading its options"),
        "error": error,
        "advice": _files(missing) if missing and not stage else advice(error, stage),
    }


def _files(missing: Sequence[str]) -> tuple[str, ...]:
    """Advice if the folder of a multimodal model lacks files of its processor."""
    names = " and ".join(dict.fromkeys(missing))
    return (
        "vLLM profiles a multimodal model with its processor and tokenizer, and the model's folder "
        f"has no {names}; it needs no weights",
    )


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
    if "No available memory for the cache blocks" in error or "Cannot auto-fit" in error:
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
    if "Failed to apply" in error and "Processor" in error:
        return ("another version of transformers: the processor rejects what this vLLM passes",)
    if "not a valid" in error or "LocalEntryNotFound" in error or "offline" in error.lower():
        return ("a folder with the model's config.json in place of its name",)
    return ()


# Memory of a vLLM process outside of torch's allocator, which no simulation can find. The figures
# are those of vLLM 0.19.0 on H100s of 80 GB, from public start-up logs. For other GPUs the
# catalogue has the context, which is divided in the same proportion; NCCL's part is the same.
#
# Source: llm-d-incubation/llm-d-planner, pull request 205, `accuracy/results/v0.19.0/logs`: 43
# starts on one GPU and 18 on several, split by model. Medians of one half (29 and 12 starts) are
# used. On one GPU that is 0.51 GiB at the start and 0.25 GiB more after the profiling run; in the
# other half (14 starts) the sum is off by 0.02 GiB on average. With tensor parallelism it is
# 3.58 GiB (two ranks) or 3.66 GiB (four), and 0.48 GiB more for a mixture of experts, which has a
# communicator for its experts; in the other half (7 starts that came up) the sum is off by
# 0.03 GiB on average. Pipelines: one log of two ranks and one of four, without any to compare.
# `tests/recorded/vllm/public_logs.json` has the figures and the rule of the split, and
# `tests/serving/test_serving_constants.py` repeats this.

_GIB: Final = 1 << 30
_START: Final = 0.51 * _GIB
"""Bytes in use when vLLM takes its first snapshot: the CUDA context."""
_FIRST_USE: Final = 0.25 * _GIB
"""Bytes added by its profiling run: the code of kernels, handles of libraries."""
_BELOW: Final = 0.02 * _GIB
_ABOVE: Final = 0.22 * _GIB
"""The distances of the least and the most in the public logs from the sum of both."""
_TENSOR: Final = {2: (1.51 * _GIB, 2.07 * _GIB), 4: (1.53 * _GIB, 2.13 * _GIB)}
_PIPELINE: Final = {2: (1.43 * _GIB, 0.07 * _GIB), 4: (1.48 * _GIB, 0.07 * _GIB)}
"""Bytes at the start and added by the profiling run, with NCCL, by the number of ranks."""
_WITH_NVLS: Final = (9, 10)
"""The major compute capabilities of GPUs with NVLink SHARP, whose buffers NCCL allocates at its
first all-reduce. Each of four L40S, without NVLink, adds no more by its profiling run than a single
GPU: the KV cache of a public log (`tests/recorded/vllm/other_logs.json`) leaves 0.1 to 0.2 GiB.
"""
_EXPERTS: Final = 0.48 * _GIB
"""Bytes at the start that a mixture of experts adds, if there are several tensor parallel ranks."""
_REFERENCE: Final = "NVIDIA H100 80GB HBM3"


GRAPH: Final = (123_972, 11_115)
"""Bytes that the driver takes for a CUDA graph, and for each of its nodes. Least squares over the
logs of one half whose starts were repeated on simulated GPUs, which counts graphs and nodes; of
a model with several logs their mean (`benchmarks/serving_results.json`;
`tests/serving/test_serving_constants.py` repeats this).
"""
GRAPH_CUDA_13: Final = (75_500, 11_115)
"""Likewise with CUDA 13: a graph takes less, so that what vLLM sets aside for all of them agrees
with the two public logs of vLLM 0.30 and 0.31 (`tests/recorded/vllm/newer_logs.json`).
"""


def graph_bytes(cuda: int) -> tuple[int, int]:
    """Bytes that the driver takes for a CUDA graph and for each node, by the major version."""
    return GRAPH if cuda < 13 else GRAPH_CUDA_13


class Overheads(NamedTuple):
    """Bytes of one process on one GPU outside of torch's allocator: at the start (``experts`` more
    for a mixture of experts), added by the profiling run, and the range of both together.
    ``context``: those at the start on one GPU. ``notes``: what is assumed without any measurement.
    """

    context: int
    start: int
    experts: int
    first_use: int
    low: int
    high: int
    notes: tuple[str, ...] = ()


def overheads(gpu: GpuModel, tensor: int = 1, pipeline: int = 1) -> Overheads:
    """The overheads on a GPU of the catalogue with these numbers of parallel ranks. A GPU without a
    context there is assumed to be like an H100.
    """
    total = _START + _FIRST_USE
    low, high = total - _BELOW, total + _ABOVE
    if gpu.title != _REFERENCE and gpu.context_high:
        middle = (gpu.context_low + gpu.context_high) / 2
        low, high = min(gpu.context_low, middle - _BELOW), max(gpu.context_high, middle + _ABOVE)
        total = middle
    context = total * _START / (_START + _FIRST_USE)
    start, first_use = context, total - context
    notes: list[str] = []
    if tensor * pipeline > 1:
        logs, ranks = (_TENSOR, tensor) if tensor > 1 else (_PIPELINE, pipeline)
        nearest = 2 if ranks == 2 else 4
        at_start, later = logs[nearest][0] - _START, logs[nearest][1] - _FIRST_USE
        if tensor > 1 and gpu.capability[0] not in _WITH_NVLS:
            later = 0.0
            notes.append(
                "NCCL's memory: at the start as on H100s, and later none, as in a log of four L40S"
            )
        start, first_use = start + at_start, max(first_use + later, 0)
        low, high = low + at_start + later, high + at_start + later
        if (tensor > 1 and pipeline > 1) or ranks not in logs:
            notes.append(
                f"NCCL's memory: of {nearest} ranks, as no public log has "
                f"--tensor-parallel-size {tensor} with --pipeline-parallel-size {pipeline}"
            )
    experts = int(_EXPERTS) if tensor > 1 else 0
    return Overheads(
        context=int(context),
        start=int(start),
        experts=experts,
        first_use=int(first_use),
        low=int(low),
        high=int(high) + experts,
        notes=tuple(notes),
    )
