"""Copies that DistributedDataParallel makes."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes

_DDP = "torch/nn/parallel/distributed.py"


def diagnose(group: HeldGroup) -> Answer | None:
    """Buckets of gradients, and outputs that are cloned to find unused parameters."""
    holder = group.holder
    main = group.main
    if holder is not None and holder.root is HolderRoot.DDP:
        return Answer(
            "ddp-buckets",
            f"{human_bytes(group.bytes)} are buckets in which DistributedDataParallel copies the "
            "gradients",
            "let gradients be views of the buckets",
            code="DistributedDataParallel(model, gradient_as_bucket_view=True)",
        )
    if any(name.endswith(_DDP) for name in main.file_names[:8]):
        return Answer(
            "ddp-unused-parameters",
            f"{human_bytes(group.bytes)} are copies of the model's outputs: "
            "DistributedDataParallel makes them to find parameters without a gradient",
            "if every parameter gets a gradient in each step: find_unused_parameters=False",
            code="DistributedDataParallel(model, find_unused_parameters=False)",
        )
    return None
