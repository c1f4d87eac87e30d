"""A serving estimate: what a vLLM has of a GPU, or why it does not start."""

from __future__ import annotations

from gpuprobe.model.plans.serving import ServingEstimate
from gpuprobe.model.text import human_bytes
from gpuprobe.reporters.sections.parts import (
    AUTO,
    Cell,
    Column,
    Line,
    Row,
    Section,
    Table,
    bulleted,
    size,
)

_LINES = 6


def serving_sections(found: ServingEstimate) -> list[Section]:
    """The verdict with the table, where the activations' peak is, and what was assumed."""
    verdict = "starts" if found.started else f"does not start: it fails {found.stage}"
    columns = (
        Column("", 19),
        Column("", AUTO, gap=1, number=True),
        Column("", 0, gap=2, cut=False),
    )
    table = Table("memory", columns, tuple(_rows(found)))
    settings = [f"vLLM {found.vllm}", f"torch {found.torch}"]
    if found.dtype:
        settings.append(found.dtype)
        settings += [f"quantization {found.quantization}"] if found.quantization else []
        settings.append(f"KV cache in {found.kv_cache_dtype}")
    if found.compile_cache:
        settings.append(f"compile cache {found.compile_cache}")
    lines = [
        Line(", ".join(settings)),
        Line("engine: native (torch's own CUDA code, without a GPU)"),
    ]
    if not found.started:
        lines.insert(0, Line(found.error, "alert"))
    sections = [Section(f"{found.gpu}: {verdict} ({found.command})", (table, *lines))]
    if found.advice:
        sections.append(Section("What would help", bulleted(found.advice)))
    if found.peak:
        sections.append(_peak(found))
    sections.append(Section("Assumed", bulleted(found.assumed)))
    return sections


def _rows(found: ServingEstimate) -> list[Row]:
    rows = []

    def add(label: str, value: int | None, note: str) -> None:
        if value is not None:
            rows.append(Row((label, size(value), note)))

    share = f"{found.utilization:g} of" if found.utilization is not None else "of"
    add("requested", found.requested, f"{share} {human_bytes(found.capacity)}")
    add("weights", found.weights, "the model, as loaded")
    add("activation peak", found.activation, _prefill(found))
    if found.non_torch is not None and found.non_torch_low is not None:
        span = f"{human_bytes(found.non_torch_low)} to {human_bytes(found.non_torch_high or 0)}"
        add("non-torch", found.non_torch, f"{span}: the CUDA context and kernels")
    if found.blocks is not None and found.block_size is not None:
        text = f"{found.blocks:,} blocks of {found.block_size} tokens"
        if found.tokens is not None:
            text += f", {found.tokens:,} tokens"
        add("KV cache", found.kv_cache, text)
    else:
        add("KV cache", found.kv_cache, "")
    if found.graphs is not None:
        add(
            "CUDA graphs",
            found.graphs,
            f"{found.graphs_captured:,} graphs, without the driver's part",
        )
    add("left over", found.left, "of the whole GPU")
    if found.concurrency is not None and found.max_model_len is not None:
        text = f"requests of {found.max_model_len:,} tokens at one time"
        rows.append(Row(("concurrency", Cell(f"{found.concurrency:.2f}x"), text)))
    return rows


def _prefill(found: ServingEstimate) -> str:
    if found.max_num_batched_tokens is None or found.max_num_seqs is None:
        return "of the profiling run"
    return f"{found.max_num_batched_tokens:,} tokens, {found.max_num_seqs:,} sequences"


def _peak(found: ServingEstimate) -> Section:
    columns = (
        Column("allocated", 10, number=True),
        Column("function", AUTO, gap=2),
        Column("line", 0, gap=2),
    )
    rows = tuple(
        Row((size(row.bytes), row.function, Cell(row.place, place=True)))
        for row in found.peak[:_LINES]
    )
    return Section("Lines at the activations' peak", (Table("lines", columns, rows),))
