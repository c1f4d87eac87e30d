"""Memory in the frames of an exception that is being handled."""

from __future__ import annotations

from gpuprobe.causes.answer import Answer
from gpuprobe.causes.groups import HeldGroup
from gpuprobe.model.run.holders import HolderRoot
from gpuprobe.model.text import human_bytes


def diagnose(group: HeldGroup) -> Answer | None:
    """Memory that the traceback of a handled exception keeps."""
    holder = group.holder
    if holder is None or holder.root is not HolderRoot.EXCEPTION:
        return None
    frame = f"the variables in the frame of {holder.function or 'each function'} that it ended"
    start = f"{human_bytes(group.bytes)} from {group.main.made_at} are kept by {holder.place}"
    if holder.via.startswith("sys."):
        return Answer(
            "handled-exception",
            f"{start}: {holder.via} is the last exception of an interactive session, and its "
            f"traceback keeps {frame}",
            f"clear the frames of the traceback, traceback.clear_frames({holder.via}"
            ".__traceback__), or delete sys.last_traceback and what else has the exception; "
            "where a program stores it: keep the message, not the exception",
        )
    if holder.via:
        error = holder.via.removesuffix(".__traceback__")
        return Answer(
            "handled-exception",
            f"{start}: the exception {error} outlives its handling, and its traceback keeps "
            f"{frame}",
            f"keep the message of the exception (str({error})), not the exception; or clear its "
            "traceback: error.with_traceback(None)",
        )
    return Answer(
        "handled-exception",
        f"{start}: while an exception is handled, its traceback keeps {frame}",
        "only set a flag inside the except block, and try again after it",
    )
