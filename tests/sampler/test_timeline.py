"""The phase timeline: pure code, property-tested."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.memory import AllocatorCounts
from gpuprobe.model.run.session import AllocatorActivity
from gpuprobe.model.values import Bytes, Peak, Unavailable
from gpuprobe.sampler import timeline as timelines
from gpuprobe.sampler.base import DeviceMark, Mark
from gpuprobe.sampler.timeline import OTHER, SETUP, PhaseTimeline, assemble


@dataclass
class Machine:
    """A clock that ticks at every reading, and an allocator with lifetime peak counters."""

    now: int = 0
    allocated: int = 0
    peak: int = 0
    allocs: int = 0

    def use(self, allocated: int) -> None:
        self.allocated = allocated
        self.peak = max(self.peak, allocated)
        self.allocs += 1

    def read(self) -> Mark:
        self.now += 1
        size = Bytes(self.allocated)
        return Mark(
            self.now,
            Bytes(1000 + self.allocated),
            Bytes(1000 + self.peak),
            (
                DeviceMark(
                    "cuda:0",
                    AllocatorCounts(size, size, size, size),
                    self.peak,
                    self.peak,
                    AllocatorActivity(device_allocs=self.allocs),
                ),
            ),
        )


actions = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(["forward", "backward", "data", "mine"])),
        st.tuples(st.just("leave"), st.booleans()),
        st.tuples(st.just("use"), st.integers(0, 1000)),
    ),
    max_size=50,
)


@given(st.lists(actions, min_size=1, max_size=4))
def test_phases_cover_every_step_and_peaks_hold(steps: list[list[tuple[str, object]]]) -> None:
    machine = Machine()
    timeline = PhaseTimeline(machine.read)
    origin = timeline.started_ns
    end = origin
    for index, program in enumerate(steps):
        true_peak = machine.allocated
        allocs = machine.allocs
        for name, argument in program:
            if name == "enter":
                timeline.enter(str(argument))
            elif name == "leave":
                timeline.leave(sticky=bool(argument))
            else:
                assert isinstance(argument, int)
                machine.use(argument)
                true_peak = max(true_peak, argument)
        spans = timeline.cut()
        step = assemble(index, spans, origin_ns=origin)
        # No gaps, no overlaps: each span starts at the very mark the last one ended with.
        assert spans[0].start.time_ns == end
        for one, two in itertools.pairwise(spans):
            assert one.end is two.start
        end = spans[-1].end.time_ns
        tops = [phase for phase in step.phases if "/" not in phase.path]
        assert sum(phase.duration_ns for phase in tops) == step.duration_ns
        assert step.start_ns + step.duration_ns == end - origin
        # The bounds hold the true peak; where they meet, they are it.
        (window,) = step.windows
        assert isinstance(window.peak_allocated, Peak)
        assert window.peak_allocated.at_least <= true_peak <= window.peak_allocated.at_most
        assert isinstance(window.activity, AllocatorActivity)
        assert window.activity.device_allocs == machine.allocs - allocs
        for phase in step.phases:
            parent = phase.path.rpartition("/")[0]
            if parent:
                (outer,) = (p for p in step.phases if p.path == parent)
                assert phase.duration_ns <= outer.duration_ns


def test_setup_is_what_comes_before_training() -> None:
    timeline = PhaseTimeline(Machine().read)
    timeline.enter("forward")
    timeline.leave()
    assert [span.path for span in timeline.cut()] == [SETUP, "forward", "other"]


def test_a_sticky_phase_lasts_until_the_next_one_begins() -> None:
    timeline = PhaseTimeline(Machine().read)
    timeline.enter("forward")
    timeline.leave(sticky=True)
    assert timeline.path == "forward"
    timeline.enter("backward")
    assert timeline.path == "backward"
    timeline.leave()
    assert timeline.path == "other"
    assert [s.path for s in timeline.cut()] == [SETUP, "forward", "backward", "other"]


def test_a_sticky_phase_ends_with_what_encloses_it() -> None:
    timeline = PhaseTimeline(Machine().read)
    timeline.enter("mine")
    timeline.enter("forward")
    timeline.leave(sticky=True)
    timeline.leave()
    assert timeline.path == "other"


def test_a_counter_that_the_program_reset_gives_bounds() -> None:
    machine = Machine()
    machine.use(500)
    timeline = PhaseTimeline(machine.read)
    machine.use(100)
    machine.peak = machine.allocated  # torch.cuda.reset_peak_memory_stats()
    machine.use(300)
    machine.use(50)
    (window,) = assemble(0, timeline.cut(), origin_ns=0).windows
    assert window.peak_allocated == Peak(500, 500)


def test_after_a_reset_the_peak_is_not_called_exact() -> None:
    machine = Machine()
    machine.use(900)
    machine.use(100)
    timeline = PhaseTimeline(machine.read)
    machine.use(700)  # below the counter, and hidden by the reset: no reading can tell
    machine.use(100)
    machine.peak = machine.allocated
    machine.use(300)
    machine.use(50)
    (window,) = assemble(0, timeline.cut(), origin_ns=0).windows
    assert window.peak_allocated == Peak(300, 900)
    assert not window.peak_allocated.exact


def test_a_device_first_used_in_a_step_starts_from_nothing() -> None:
    machine = Machine()
    with_device = [False]

    def read() -> Mark:
        mark = machine.read()
        return mark if with_device[0] else mark._replace(devices=())

    timeline = PhaseTimeline(read)
    with_device[0] = True
    machine.use(700)
    (window,) = assemble(0, timeline.cut(), origin_ns=0).windows
    assert window.start.allocated == 0
    assert window.end.allocated == 700
    assert window.peak_allocated == Peak.exactly(700)


def test_what_cannot_be_read_stays_unavailable() -> None:
    reason = Unavailable("no such counter")

    def read() -> Mark:
        return Mark(0, reason, reason, ())

    step = assemble(0, PhaseTimeline(read).cut(), origin_ns=0)
    assert step.host.rss_start == reason
    assert step.host.rss_peak == reason
    assert step.windows == ()


def test_a_phase_inside_one_of_the_same_name_is_that_phase() -> None:
    timeline = PhaseTimeline(Machine().read)
    timeline.enter("forward")  # the program's own
    for _ in range(2):
        timeline.enter("forward")  # what the hook reports
        timeline.leave(sticky=True)
        assert timeline.path == "forward"
    timeline.leave()
    assert timeline.path == "other"
    assert [s.path for s in timeline.cut()] == [SETUP, "forward", "other"]


@pytest.mark.parametrize("changes", [2, 9, 10, 11, 500])
def test_phases_without_end_take_no_memory_without_end(
    changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "MOST", 10)
    machine = Machine()
    timeline = PhaseTimeline(machine.read)
    for turn in range(changes):
        timeline.enter(("data", "forward")[turn % 2])
        machine.use(turn * 10)
        timeline.leave()
    spans = timeline.cut()
    assert len(spans) <= 11
    assert timeline.overflowed == (2 * changes + 1 > 10)
    # Nothing is lost: the spans are one after the other, up to the last mark.
    assert spans[0].start.time_ns == 1
    assert spans[-1].end.time_ns == machine.now
    assert all(a.end is b.start for a, b in itertools.pairwise(spans))
    step = assemble(0, spans, origin_ns=0)
    assert sum(p.duration_ns for p in step.phases if "/" not in p.path) == step.duration_ns
    assert step.windows[0].peak_allocated == Peak.exactly((changes - 1) * 10)
    assert step.windows[0].activity == AllocatorActivity(device_allocs=changes)
    timeline.enter("forward")
    assert [span.path for span in timeline.cut()][:1] == [OTHER]


def test_the_peak_that_is_known_exactly_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MOST", 2)
    peaks = iter([0, 5, 7, 900, 3, 4, 1, 1, 1])
    size = Bytes(1)
    counts = AllocatorCounts(size, size, size, size)
    ticks = itertools.count()

    def read() -> Mark:
        device = DeviceMark("cpu", counts, 0, 0, AllocatorActivity(), exact_peak=next(peaks))
        return Mark(next(ticks), Bytes(1), Bytes(1), (device,))

    timeline = PhaseTimeline(read)
    for name in ("data", "forward", "data"):
        timeline.enter(name)
        timeline.leave()
    (step,) = [assemble(0, timeline.cut(), origin_ns=0)]
    assert step.windows[0].peak_allocated == Peak.exactly(900)


def test_an_evaluation_that_a_backward_pass_follows_was_training() -> None:
    """Back to the last pass of another kind, and in the phase that still goes on."""
    line = PhaseTimeline(Machine().read)
    for name in ("evaluation", "forward", "evaluation"):
        line.enter(name)
        line.leave(sticky=True)
    line.was_training()
    line.enter("backward")
    line.leave()
    paths = [span.path for span in line.cut()]
    assert [path for path in paths if path not in (SETUP, OTHER)] == [
        "evaluation",
        "forward",
        "forward",
        "backward",
    ]
