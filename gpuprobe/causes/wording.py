"""Words that several rules use."""

from __future__ import annotations

from gpuprobe.model.run.holders import Holder


def kept_in(holder: Holder) -> str:
    """The container in which a holder has several such tensors, or the holder itself:
    ``history['val'] (a list of 41)``.
    """
    labels = []
    for step in holder.path:
        labels.append(step.label)
        if (step.holding or 0) > 1:
            where = f" in {holder.function}" if holder.function else ""
            return f"{''.join(labels)} (a {step.kind} of {step.size:,}{where})"
    return holder.place
