"""Copies that DistributedDataParallel makes: of outputs, and of gradients in its buckets."""

from __future__ import annotations

from collections.abc import Iterator

from gpuprobe.causes.answer import Answer, EditKind
from gpuprobe.causes.moment import Excess, Moment
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Made

_DDP = "torch/nn/parallel/distributed.py"


def diagnose(moment: Moment) -> Iterator[Excess]:
    """Outputs that are cloned to find unused parameters, and buckets beside the gradients."""
    clones = [
        row
        for row in moment.rows
        if moment.how(row) is Made.COPY
        and moment.functions(row, _DDP)
        and moment.category(row) is not Category.GRADIENT_BUCKET
    ]
    if clones:
        main = max(clones, key=lambda row: moment.size[row])
        yield Excess(
            Answer(
                "ddp-unused-parameters",
                f"{human_bytes(moment.bytes_of(clones))} are copies of the model's outputs: "
                "DistributedDataParallel makes them to find parameters without a gradient",
                "if every parameter gets a gradient in each step: find_unused_parameters=False",
                code="DistributedDataParallel(model, find_unused_parameters=False)",
                edit=EditKind.ALL_USED,
            ),
            main,
            clones,
            "without the copies",
            sizes=dict.fromkeys(moment.alike(clones), 0),
        )
    buckets = [row for row in moment.rows if moment.category(row) is Category.GRADIENT_BUCKET]
    gradients = [row for row in moment.rows if moment.category(row) is Category.GRADIENT]
    if not buckets or not gradients:
        return
    main = max(buckets, key=lambda row: moment.size[row])
    both = min(moment.bytes_of(gradients) / moment.bytes_of(buckets), 1.0)
    yield Excess(
        Answer(
            "ddp-buckets",
            f"{human_bytes(moment.bytes_of(buckets))} are buckets in which "
            "DistributedDataParallel copies the gradients, which exist twice then",
            "let gradients be views of the buckets",
            code="DistributedDataParallel(model, gradient_as_bucket_view=True)",
            edit=EditKind.BUCKET_VIEW,
        ),
        main,
        buckets,
        "with gradients as views of them",
        sizes={row: int(moment.size[row] * (1 - both)) for row in buckets},
    )
