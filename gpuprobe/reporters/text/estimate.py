"""An estimate as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from gpuprobe.model.plans.estimate import Estimate, Share
from gpuprobe.model.text import human_bytes
from gpuprobe.reporters.terminal import Style

__all__ = ["render", "write"]


def write(estimate: Estimate, stream: TextIO, top: int = 8, cwd: str = "") -> None:
    """Write the estimate to ``stream``; ``top`` bounds each table, paths below ``cwd`` are shown
    relative to it.
    """
    style = Style.of(stream, cwd=cwd)
    stream.write("\n".join(render(estimate, style, top)) + "\n")


def render(estimate: Estimate, style: Style, top: int = 8) -> Iterator[str]:
    """The lines of the estimate."""
    several = f"{estimate.devices} x " if estimate.devices > 1 else ""
    yield style.heading(
        f"{several}{estimate.gpu}: {estimate.verdict}"
        f" ({_span(estimate.total_low, estimate.total_high)} of {human_bytes(estimate.capacity)})"
    )
    rows = [
        ("peak allocated", human_bytes(estimate.peak_allocated), "by tensors, with rounding"),
        (
            "peak reserved",
            _span(estimate.reserved_low, estimate.reserved_high),
            "held by torch's caching allocator",
        ),
        (
            "CUDA context",
            _span(estimate.context_low, estimate.context_high),
            "and its libraries, outside the allocator",
        ),
    ]
    width = max(len(figure) for _, figure, _ in rows)
    for name, figure, what in rows:
        yield f"  {name:<15} {figure:>{width}}  {what}"
    notes = [f"{estimate.steps} training step{'s' if estimate.steps != 1 else ''}"]
    if estimate.ranks > 1:
        notes.append(f"one rank of {estimate.ranks}")
    if estimate.settings:
        notes.append(estimate.settings)
    yield f"  {', '.join(notes)}"
    for title, shares in (
        ("Categories at the peak", estimate.by_category),
        ("Lines at the peak", estimate.by_line),
        ("Modules at the peak", estimate.by_module),
    ):
        yield ""
        yield style.heading(title)
        yield from _table(shares, estimate.attributed, style, top)
    for title, lines in (
        ("Assumed", estimate.assumed),
        ("Not modelled", estimate.not_modelled),
    ):
        if lines:
            yield ""
            yield style.heading(title)
            for line in lines:
                yield from style.wrapped(line, first="  - ", rest="    ")


def _span(low: int, high: int) -> str:
    if human_bytes(low) == human_bytes(high):
        return human_bytes(high)
    return f"{human_bytes(low)} to {human_bytes(high)}"


def _table(shares: Sequence[Share], total: int, style: Style, top: int) -> Iterator[str]:
    ordered = sorted(shares, key=lambda share: (-share.bytes, share.name))
    for share in ordered[:top]:
        part = 100 * share.bytes / total if total else 0.0
        name = style.text(style.path(share.name))
        yield f"  {human_bytes(share.bytes):>10} {part:5.1f}%  {name}"
    rest = sum(share.bytes for share in ordered[top:])
    if rest:
        yield f"  {human_bytes(rest):>10} {100 * rest / total:5.1f}%  ({len(ordered) - top} more)"
    yield f"  {human_bytes(total):>10}         total"
