"""Copies that DistributedDataParallel makes: of outputs, and of gradients in its buckets."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.live_memory import Excess, LiveMemory
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_DDP = "torch/nn/parallel/distributed.py"
_CALLS = "torch/_ops.py"
"""Through it, the watch of uses calls an operator."""


def _made_by_ddp(live: LiveMemory, row: int) -> bool:
    """Whether a row is from DistributedDataParallel's own code. All that a model's forward pass
    makes has it on its stack.
    """
    own = (file for file in live.files(row) if not file.endswith(_CALLS))
    return next(own, "").endswith(_DDP)


def diagnose(live: LiveMemory) -> Iterator[Excess]:
    """Outputs that are cloned to find unused parameters, and buckets of gradients."""
    clones = [
        row
        for row in live.rows
        if live.how(row) is Made.COPY
        and _made_by_ddp(live, row)
        and live.category(row) is not Category.GRADIENT_BUCKET
    ]
    if clones:
        main = live.largest(clones)
        yield Excess(
            Answer(
                "ddp-unused-parameters",
                f"{human_bytes(live.bytes_of(clones))} are copies of the model's outputs: "
                "DistributedDataParallel makes them to find parameters without a gradient",
                "if every parameter gets a gradient in each step: find_unused_parameters=False",
                code="DistributedDataParallel(model, find_unused_parameters=False)",
                edit=EditKind.ALL_USED,
            ),
            main,
            clones,
            "without the copies",
            sizes=dict.fromkeys(live.alike(clones), 0),
        )
    buckets = [row for row in live.rows if live.category(row) is Category.GRADIENT_BUCKET]
    gradients = [row for row in live.rows if live.category(row) is Category.GRADIENT]
    if not buckets or not gradients:
        return
    main = live.largest(buckets)
    both = min(live.bytes_of(gradients) / live.bytes_of(buckets), 1.0)
    yield Excess(
        Answer(
            "ddp-buckets",
            f"{human_bytes(live.bytes_of(buckets))} are buckets in which "
            "DistributedDataParallel copies the gradients, which exist twice then",
            "let gradients be views of the buckets",
            code="DistributedDataParallel(model, gradient_as_bucket_view=True)",
            edit=EditKind.BUCKET_VIEW,
        ),
        main,
        buckets,
        "with gradients as views of them",
        sizes={row: int(live.size[row] * (1 - both)) for row in buckets},
    )
