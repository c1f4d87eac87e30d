"""Words that several rules use."""

from __future__ import annotations

from collections.abc import Collection

from gpuprobe.causes.live_memory import LiveMemory
from gpuprobe.model.run.holders import Holder, HolderRoot


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


def of_names(live: LiveMemory, rows: Collection[int], word: str = " of ") -> str:
    """`` of k, v (in attend)``: the names that hold rows, the largest first; "" if unknown."""
    places: dict[str, int] = {}
    for row in rows:
        holder = live.holders.get(row)
        if holder is not None and holder.name and holder.root is not HolderRoot.OUTSIDE:
            places.setdefault(kept_in(holder), 0)
            places[kept_in(holder)] += live.size[row]
    names = sorted(places, key=lambda name: -places[name])[:3]
    if names:
        return f"{word}{', '.join(names)}"
    largest = max(rows, key=lambda row: live.size[row], default=None)
    name = "" if largest is None else live.variable(live.frames(largest))
    return f" for {name}" if name else ""


def saved_by(live: LiveMemory, rows: Collection[int]) -> str:
    """That the autograd graph keeps rows, if it does."""
    kept = any(live.for_backward(row) for row in rows)
    return "; the autograd graph keeps it for the backward pass" if kept else ""
