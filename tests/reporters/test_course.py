"""The picture of a predicted step: its boxes cover what runs, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.run.work import Work, WorkKind, WorkPlace
from gpuprobe.reporters.html.course import MOST_RANKS, Courses, course
from gpuprobe.step_time.predict import TimelineSpan
from gpuprobe.step_time.replay import Resource

MATMUL = Work("mm", WorkKind.MATMUL)


def span(
    start: int, end: int, *, resource: Resource = Resource.COMPUTE, name: str = "mm"
) -> TimelineSpan:
    track = "host" if resource is Resource.HOST else "cuda:0/0"
    return TimelineSpan(
        start, end, track, name, MATMUL, WorkPlace("forward", "train.py:3 in f"), resource
    )


def rects(courses: Courses) -> list[tuple[str, float, float]]:
    picture = course(courses)
    assert picture is not None
    found = re.findall(r'<g class="(\w+)">.*?<rect x="([\d.]+)".*?width="([\d.]+)"', picture)
    return [(colour, float(x), float(x) + float(width)) for colour, x, width in found]


def test_a_step_begins_with_the_first_work_on_a_gpu() -> None:
    host = span(0, 150, resource=Resource.HOST)
    boxes = rects({0: ("t4", [host, span(100, 200), span(250, 300, resource=Resource.RANKS)])})
    assert boxes == [("products", 0, 500), ("waits", 750, 1000), ("host", 0, 250)]


def test_small_boxes_are_joined_and_named_by_the_longest() -> None:
    many = [span(at * 100, at * 100 + (90 if at == 7 else 50), name=f"k{at}") for at in range(9999)]
    picture = course({0: ("t4", many)})
    assert picture is not None
    assert picture.count("<rect") == 1
    assert "k7 at train.py:3 in f and 9998 more" in picture


def test_names_are_text() -> None:
    picture = course({0: ("t4", [span(0, 9, name="<script>alert(1)</script>")])})
    assert picture is not None
    assert "<script>" not in picture


def test_more_ranks_than_are_shown() -> None:
    courses = {rank: ("t4", [span(0, 9)]) for rank in range(MOST_RANKS + 4)}
    picture = course(courses)
    assert picture is not None
    assert picture.count("<svg") == MOST_RANKS
    assert "4 more ranks are not shown" in picture


@pytest.mark.parametrize("spans", [[], [span(0, 9, resource=Resource.HOST)]])
def test_without_work_on_a_gpu_there_is_no_picture(spans: list[TimelineSpan]) -> None:
    assert course({0: ("t4", spans)} if spans else {}) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=30))
def test_boxes_cover_the_spans(pairs: Sequence[tuple[int, int]]) -> None:
    at, spans = 0, []
    for gap, length in pairs:
        spans.append(span(at + gap, at + gap + length))
        at += gap + length
    boxes = rects({0: ("t4", spans)})
    first, last = spans[0].start_ns, spans[-1].end_ns
    covered = sum(end - start for _, start, end in boxes) * (last - first) / 1000
    busy = sum(length for _, length in pairs)
    near = 0.5 / 1000 * (last - first)
    assert busy - 1e-2 * len(pairs) <= covered <= busy + near * len(pairs) + 1e-2 * len(pairs)
