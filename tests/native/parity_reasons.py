"""Why some reports of the two engines differ. The native engine runs torch's own code, so it is the
virtual GPU's model that differs from it, unless a reason names a library.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Reason(NamedTuple):
    """``begins``: the beginnings of the lines of `parity_account.differences` that it explains."""

    text: str
    begins: tuple[str, ...]


_PEAK: Final = ("allocated", "categories", "lines", "modules", "step peaks")
_SEGMENTS: Final = ("reserved", "fragmentation", "what-ifs")

RECURRENT: Final = Reason(
    "cuDNN does not document the reserve and workspace of a recurrent network: both are models",
    (*_PEAK, *_SEGMENTS, "advice"),
)
FUSED_CELL: Final = Reason(
    "CUDA tensors take torch's fused cell, which keeps five gates; the virtual GPU runs the "
    "operators that the CPU does",
    (*_PEAK, *_SEGMENTS),
)
NODE_ORDER: Final = Reason(
    "autograd runs ready nodes by their sequence numbers, which each thread counts for itself; a "
    "CUDA device has a thread, the virtual GPU uses the caller's: a gradient lives longer",
    _PEAK,
)
THREADS: Final = Reason(
    "replicas run in threads, with a cuBLAS handle each, from a pool on CUDA: whose line a "
    "workspace is allocated on differs",
    ("lines", "modules", "step peaks", *_SEGMENTS),
)
PINNED: Final = Reason(
    "torch notices at the next allocation of pinned memory that a stream is done with a block; on "
    "the virtual GPU streams are done at once",
    ("outside tensors: pinned",),
)
ONE_SEGMENT: Final = Reason(
    "up to two segments of 2 MiB more or less; why is unknown",
    _SEGMENTS,
)
EMPTIED_EARLY: Final = Reason(
    "torch empties its cache before a capture, and the thread of its backward pass may still hold "
    "the last gradients then: without gpuprobe too, 257,949,696 bytes are reserved in some runs "
    "and 211,812,352 in others (2 and 6 of 8, on one core)",
    _SEGMENTS,
)
CHANGED_SETTINGS: Final = Reason(
    "snapshots of the virtual GPU do not have settings that the program changes: what it rounds up "
    "by them is counted, and replayed, as by torch's defaults",
    ("replay is exact", "categories", "lines", *_SEGMENTS),
)

REASONS: Final[dict[str, tuple[Reason, ...]]] = {
    **dict.fromkeys(
        (
            "gpt_autocast_scaler",
            "gpt_checkpoint",
            "gpt_checkpoint_reentrant",
            "gpt_autocast_checkpoint_clipping",
            "adapters",
            "contrastive_pairs",
            "sparse_embedding",
        ),
        (ONE_SEGMENT,),
    ),
    "rounded_sizes": (CHANGED_SETTINGS,),
    "graphed_callables": (EMPTIED_EARLY,),
    "gru_cell": (FUSED_CELL,),
    "lstm_over_packed_sequences": (RECURRENT,),
    "gradient_penalty": (NODE_ORDER,),
    "pipeline_of_two_devices": (NODE_ORDER,),
    "data_parallel": (THREADS,),
    "activations_on_the_host": (PINNED,),
    "pinned_batches": (PINNED,),
}


def unexplained(name: str, differences: list[str]) -> list[str]:
    """The differences of a program that no reason is known for."""
    allowed = tuple(begin for reason in REASONS.get(name, ()) for begin in reason.begins)
    return [line for line in differences if not line.startswith(allowed or ("\0",))]
