"""The predicted course of a step as a picture: a lane for the host and each stream of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpuprobe.model.plans.step_time import RANKS
from gpuprobe.model.run.work import WorkKind
from gpuprobe.model.text import human_ns, plural
from gpuprobe.reporters.html.markup import Markup, el
from gpuprobe.step_time.predict import TimelineSpan
from gpuprobe.step_time.replay import Resource

Courses = Mapping[int, tuple[str, Sequence[TimelineSpan]]]
"""By the rank, the GPU's name and what runs on it: `gpuprobe.step_time.recorded.timelines_of`."""

_WIDTH: Final = 1000
_HEIGHT: Final = 12
_NEAR: Final = 0.5  # of a width of `_WIDTH`: closer boxes of one colour are drawn as one
MOST_RANKS: Final = 16

_COLOURS: Final = {
    "products": "matrix products, attention, convolutions",
    "bytes": "other kernels",
    "links": "communication",
    "copies": "copies",
    "waits": RANKS,
    "host": "the host issues",
}
_PRODUCTS: Final = frozenset(
    (
        WorkKind.MATMUL,
        WorkKind.ATTENTION,
        WorkKind.ATTENTION_BACKWARD,
        WorkKind.CONVOLUTION,
        WorkKind.CONVOLUTION_BACKWARD,
    )
)
_BY_RESOURCE: Final = {
    Resource.LINK: "links",
    Resource.TO_DEVICE: "copies",
    Resource.TO_HOST: "copies",
    Resource.RANKS: "waits",
    Resource.HOST: "host",
}


def course(courses: Courses) -> Markup | None:
    """The picture, of the first `MOST_RANKS` ranks; None without a course."""
    shown = sorted(courses)[:MOST_RANKS]
    on_gpus = [
        span for rank in shown for span in courses[rank][1] if span.resource is not Resource.HOST
    ]
    if not on_gpus:
        return None
    began = min(span.start_ns for span in on_gpus)
    total = max(max(span.end_ns for span in on_gpus) - began, 1)
    several = len(courses) > 1
    rows = []
    for rank in shown:
        lanes: dict[str, list[TimelineSpan]] = {}
        for span in courses[rank][1]:
            if span.end_ns > began:  # the host may be a whole step ahead
                start = max(0, span.start_ns - began)
                moved = replace(span, start_ns=start, end_ns=span.end_ns - began)
                lanes.setdefault(span.track, []).append(moved)
        for track in sorted(lanes, key=lambda name: (not name.startswith("cuda:"), name)):
            name = f"rank {rank} · {track}" if several else track
            rows.append(el("tr", el("th", name, scope="row"), el("td", _lane(lanes[track], total))))
    left_out = len(courses) - len(shown)
    return el(
        "div",
        el(
            "p",
            f"From the first to the last work on a GPU, {human_ns(total)}. Boxes have names.",
            f" {left_out} more ranks are not shown." if left_out else None,
            class_="note",
        ),
        el("table", rows, class_="course"),
        el("p", [el("span", text, class_=f"key {name}") for name, text in _COLOURS.items()]),
    )


@dataclass(slots=True)
class _Box:
    """Spans that are drawn as one; ``longest`` names it."""

    start: int
    end: int
    colour: str
    longest: TimelineSpan
    spans: int = 1

    def add(self, span: TimelineSpan) -> None:
        self.end = max(self.end, span.end_ns)
        self.spans += 1
        if span.end_ns - span.start_ns > self.longest.end_ns - self.longest.start_ns:
            self.longest = span


def _boxes(spans: Sequence[TimelineSpan], near: float) -> Iterator[_Box]:
    box: _Box | None = None
    for span in spans:
        colour = _colour(span)
        if box is not None and box.colour == colour and span.start_ns - box.end <= near:
            box.add(span)
            continue
        if box is not None:
            yield box
        box = _Box(span.start_ns, span.end_ns, colour, span)
    if box is not None:
        yield box


def _colour(span: TimelineSpan) -> str:
    known = _BY_RESOURCE.get(span.resource)
    if known is not None:
        return known
    return "products" if span.work is not None and span.work.kind in _PRODUCTS else "bytes"


def _lane(spans: Sequence[TimelineSpan], total: int) -> Markup:
    """What runs on one track, in order of start."""
    scale = _WIDTH / total
    drawn = []
    for box in _boxes(spans, _NEAR / scale):
        width = max((box.end - box.start) * scale, 0.2)
        rect = el("rect", x=f"{box.start * scale:.2f}", y=0, width=f"{width:.2f}", height=_HEIGHT)
        drawn.append(el("g", el("title", _title(box)), rect, class_=box.colour))
    return el(
        "svg",
        drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=plural(len(spans), "call"),
    )


def _title(box: _Box) -> str:
    place = "" if box.longest.place is None else f" at {box.longest.place.place}"
    more = f" and {box.spans - 1} more" if box.spans > 1 else ""
    return f"{box.longest.name}{place}{more}, {human_ns(box.end - box.start)}"
