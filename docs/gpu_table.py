"""The GPU catalogue as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuprobe.catalogue.file import built_in
from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Unavailable

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def gpu_tables(table: Table) -> str:
    """Every built-in GPU, then where its memory and its context were read."""
    models = built_in()
    figures = table(
        (
            "name",
            "title",
            "memory, bytes",
            "capability",
            "SMs",
            "L2 cache",
            "context",
            "cuBLAS workspace, bytes",
        ),
        [_figures(model) for model in models],
    )
    sources = table(
        ("name", "of the memory", "of the context"),
        [
            (f"`{m.name}`", _cell(m.sources["total_memory"]), _cell(m.sources["context"]))
            for m in models
        ],
    )
    others = table(
        ("name", "memory, bytes", "read by"),
        [
            (f"`{m.name}`", f"{count:,}", _cell(text))
            for m in models
            for count, text in m.total_memory_seen.items()
        ],
    )
    return (
        f"{figures}\n\n## Where the figures were read\n\n{sources}\n\n"
        f"## Other sizes of the same GPUs\n\n{others}"
    )


def _figures(model: GpuModel) -> tuple[str, ...]:
    cache = model.L2_cache_size
    low, high = (value / (1 << 20) for value in model.context)
    return (
        ", ".join(f"`{name}`" for name in (model.name, *model.aliases)),
        model.title,
        f"{model.total_memory:,}",
        f"{model.major}.{model.minor}",
        str(model.multi_processor_count),
        "unknown" if isinstance(cache, Unavailable) else human_bytes(cache),
        f"{low:.0f} to {high:.0f} MiB",
        f"{model.cublas_workspace_bytes:,}",
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
