"""The curves of a recording: bands that sum, extremes that stay, spans that do not overlap."""

from __future__ import annotations

from analysis_programs import recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from report_builders import recording, step, trace

from examples import examples
from gpuprobe.analysis.inspection.tracks import Track, bands, spans, tracks
from gpuprobe.analysis.peak.flame import FlameNode, category_tree, module_tree, pruned
from gpuprobe.analysis.peak.peaks import by_category, by_module, high_water
from gpuprobe.analysis.trace.ledger import ledger_of
from gpuprobe.analysis.trace.timeline import Timeline, thin, timeline
from gpuprobe.model.memory import Category
from gpuprobe.model.trace import AllocatorSettings, MemoryTrace
from gpuprobe.reporters.html.data import track_data, unpack


def program(seed: int, steps: int) -> MemoryTrace:
    return recorded(seed, AllocatorSettings(), steps)[0]


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 1000), st.integers(1, 120), st.data())
def test_bands_sum_to_allocated_at_any_points(seed: int, steps: int, data: st.DataObject) -> None:
    ledger = ledger_of(program(seed, steps))
    points = sorted(data.draw(st.sets(st.integers(-1, ledger.events - 1), min_size=1)))
    totals = timeline(ledger).allocated
    found = bands(ledger, points)
    for index, event in enumerate(points):
        assert sum(column[index] for column in found.values()) == totals[event + 1]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1000), st.integers(20, 150), st.integers(8, 60))
def test_a_thinned_track_keeps_extremes_and_bands(seed: int, steps: int, points: int) -> None:
    ledger = ledger_of(program(seed, steps))
    track = Track(0, "cuda:0")
    track.add(ledger, 10**9)
    assert track.complete
    whole = list(track.allocated)
    reserved = track.reserved
    assert not hasattr(reserved, "reason")
    most = max(reserved)
    track.thinned(points)
    assert len(track) <= max(points, 8)
    assert max(track.allocated) == max(whole)
    assert min(track.allocated) == min(whole)
    assert max(track.reserved) == most  # type: ignore[type-var]
    for index, at in enumerate(track.at):
        assert track.allocated[index] == whole[at]
        assert sum(column[index] for column in track.bands.values()) == whole[at]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=9, max_size=200), st.integers(8, 40))
def test_every_stretch_keeps_its_lowest_and_its_highest_point(
    totals: list[int], points: int
) -> None:
    flat = [0] * len(totals)
    line = Timeline("cuda:0", range(-1, len(totals) - 1), flat, totals, totals, flat)
    kept = thin(line, points)
    stretches = max(1, (points - 2) // 6)
    shown = set(kept.event)
    for i in range(stretches):
        low, high = i * len(totals) // stretches, (i + 1) * len(totals) // stretches
        part = totals[low:high]
        if part:
            assert low + part.index(min(part)) - 1 in shown
            assert low + part.index(max(part)) - 1 in shown
    assert [totals[event + 1] for event in kept.event] == list(kept.allocated)


def test_steps_follow_each_other_in_one_track() -> None:
    one = trace([("a.py:1", 100, Category.ACTIVATION), ("a.py:2", 50, Category.GRADIENT)], step=0)
    two = trace([("a.py:1", 300, Category.TEMPORARY)], step=3)
    found, problems = tracks(
        recording([step(0, {"forward": 150}), step(3, {"forward": 300})], [one, two])
    )
    assert problems == []
    (track,) = found
    assert [(c.step, c.first, c.events) for c in track.chunks] == [(0, 0, 4), (3, 5, 2)]
    assert list(track.at) == list(range(8))
    assert list(track.allocated) == [0, 100, 150, 50, 0, 0, 300, 0]
    # A category that only a later step has is 0 before.
    assert list(track.bands[Category.TEMPORARY]) == [0] * 6 + [300, 0]
    assert [(s.first, s.end, s.name) for s in track.phases] == [
        (1, 5, "backward"),
        (6, 8, "backward"),
    ]
    assert track.phases_from == "recorded"


def test_omitted_tracks_are_named() -> None:
    traces = [
        trace([("a.py:1", 100, Category.ACTIVATION)], step=0, device=f"cuda:{i}") for i in range(5)
    ]
    found, problems = tracks(recording([step(0, {"forward": 1})], traces), most=3)
    assert [track.device for track in found] == ["cuda:0", "cuda:1", "cuda:2"]
    assert problems == ["too many to draw: rank 0 cuda:3, rank 0 cuda:4"]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1000), st.integers(1, 100))
def test_phases_by_the_stacks_do_not_overlap(seed: int, steps: int) -> None:
    ledger = ledger_of(program(seed, steps))
    found, source = spans(ledger)
    assert source in ("recorded", "stacks", "")
    end = 0
    for span in found:
        assert end <= span.first < span.end <= ledger.events + 1
        end = span.end


def check(node: FlameNode) -> int:
    """Conservation in every node; the number of nodes."""
    children = node.children
    assert node.bytes == node.own + sum(child.bytes for child in children)
    assert [c.bytes for c in children] == sorted((c.bytes for c in children), reverse=True)
    return 1 + sum(map(check, children))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1000), st.integers(1, 150), st.integers(1, 12))
def test_trees_conserve_also_when_pruned(seed: int, steps: int, most: int) -> None:
    mark = high_water(program(seed, steps))
    for tree in (category_tree(mark), module_tree(mark)):
        count = check(tree)
        assert (tree.bytes, tree.blocks) == (mark.allocated, len(mark))
        small = pruned(tree, most)
        left = check(small)
        assert (small.bytes, small.blocks) == (tree.bytes, tree.blocks)
        assert left <= 2 * most
        assert (small is tree) == (count <= most)


def test_trees_have_the_rows_of_the_tables() -> None:
    mark = high_water(
        trace(
            [("a.py:1", 100, Category.ACTIVATION), ("a.py:2", 50, Category.GRADIENT)],
            module="Net.block.0",
            before=30,
        )
    )
    categories = {child.name: child.bytes for child in category_tree(mark).children}
    assert categories == {share.key: share.bytes for share in by_category(mark)}
    assert {share.key: share.bytes for share in by_module(mark)} == {
        "Net.block.0": 150,
        "(before the trace)": 30,
    }
    net, before = module_tree(mark).children
    assert (net.name, net.bytes, net.children[0].name) == ("Net", 150, "block")
    assert (before.name, before.bytes) == ("(before the trace)", 30)


def test_pruning_takes_deep_trees() -> None:
    tree = node = FlameNode("root", 10, 1)
    for depth in range(20_000):
        node.children.append(FlameNode(f"f{depth}", 10, 1))
        node = node.children[0]
    node.own = 10
    small = pruned(tree, 5)
    names = []
    while small.children:
        (small,) = small.children
        names.append(small.name)
    assert names == ["f0", "f1", "f2", "f3", "(1 smaller)"]


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 100))
def test_curves_are_thinned_until_they_fit(seed: int) -> None:
    track = Track(0, "cuda:0")
    for _ in range(8):
        track.add(ledger_of(recorded(seed, AllocatorSettings(), 150)[0]), 10**9)
    highest, before = max(track.allocated), len(track)
    (whole,) = track_data([track])
    assert whole["complete"]
    (item,) = track_data([track], most=2000)
    assert item["complete"] == (before <= 500)
    assert len(track) <= max(500, before // 2)
    assert max(unpack(item["columns"]["allocated"])) == highest == item["peak"]["bytes"]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 1000), st.integers(1, 150), st.integers(1, 30))
def test_single_blocks_sum_to_allocated_at_every_position(seed: int, steps: int, most: int) -> None:
    ledger = ledger_of(program(seed, steps))
    track = Track(0, "cuda:0")
    track.add(ledger, 10**9)
    track.add(ledger, 10**9)  # a second step, after the first
    blocks = track.blocks
    assert blocks.total == len(blocks)
    assert list(blocks.start) == sorted(blocks.start)
    for index, at in enumerate(track.at):
        alive = [i for i in range(len(blocks)) if blocks.start[i] <= at < blocks.end[i]]
        assert sum(blocks.size[i] for i in alive) == track.allocated[index]
    sizes = sorted(blocks.size, reverse=True)
    blocks.largest(most)
    assert sorted(blocks.size, reverse=True) == sizes[:most]
    assert list(blocks.start) == sorted(blocks.start)


def test_single_blocks_have_their_stacks_and_names() -> None:
    one = trace([("/p/a.py:1", 100, Category.ACTIVATION), ("/p/a.py:2", 50, Category.GRADIENT)])
    track = Track(0, "cuda:0")
    track.add(ledger_of(one), 10**9)
    blocks = track.blocks
    assert [blocks.frames_of(node) for node in blocks.stack] == [
        ["/p/a.py:1 in forward"],
        ["/p/a.py:2 in forward"],
    ]
    assert [blocks.strings[at] for at in blocks.module] == ["Net.fc"] * 2
    assert [Category.from_code(code) for code in blocks.category] == [
        Category.ACTIVATION,
        Category.GRADIENT,
    ]
    (found,) = track_data([track])
    shared = found["blocks"]
    names = [shared["names"][at] for at in unpack(shared["frames"])]
    assert [names[node] for node in unpack(shared["columns"]["stack"])] == [
        "/p/a.py:1 in forward",
        "/p/a.py:2 in forward",
    ]
    assert unpack(shared["columns"]["life"]) == [2, 2]
