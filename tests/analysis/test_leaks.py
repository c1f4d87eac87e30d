"""Leaks, detected by the steps that left memory behind and not by a slope."""

from __future__ import annotations

from analysis_programs import Script
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.analysis.leaks import Leaks, leaks, leaks_over_steps
from gpuprobe.model.trace import Annotation, MemoryTrace
from gpuprobe.model.values import Unavailable

LEAK, CACHE, RING, WORK = ((f"/home/u/{n}.py", 1, n) for n in ("leak", "cache", "ring", "work"))
OPTIMIZER = ("/v/site-packages/torch/optim/adamw.py", 80, "step")


class Steps:
    """A program of ``count`` steps, as one trace or as one per step."""

    def __init__(self, count: int, separate: bool) -> None:
        self.separate = separate
        self.scripts = [Script("cpu", step=0)]
        self.boundaries: list[int] = []
        self.live: dict[int, tuple[int, tuple[str, int, str]]] = {}
        ring: list[int] = []
        for step in range(count):
            self.alloc(100 + step, LEAK)
            if step < 2:
                self.alloc(5000, CACHE)
            ring.append(self.alloc(700, RING))
            if len(ring) > 3:
                self.free(ring.pop(0))
            work = [self.alloc(10_000, WORK) for _ in range(2)]
            for address in work:
                self.free(address)
            if step < count - 1:
                self.next_step(step + 1)

    @property
    def script(self) -> Script:
        return self.scripts[-1]

    def alloc(self, size: int, frame: tuple[str, int, str]) -> int:
        # Unique over all scripts: addresses identify blocks from step to step.
        address = (len(self.live) + 1) << 20
        self.script.alloc(size, address=address, stack=self.script.stack(frame))
        self.live[address] = (size, frame)
        return address

    def free(self, address: int) -> None:
        self.script.free(address)
        size, _ = self.live[address]
        self.live[address] = (-size, ("", 0, ""))

    def next_step(self, step: int) -> None:
        self.boundaries.append(len(self.script.trace.events))
        if self.separate:
            self.scripts.append(Script("cpu", step=step))
            for address, (size, frame) in self.live.items():
                if size > 0:
                    self.script.before(size, address=address, stack=self.script.stack(frame))

    def found(self, survive: int = 2) -> Leaks | Unavailable:
        if self.separate:
            return leaks_over_steps((s.trace for s in self.scripts), survive=survive)
        return leaks(self.script.trace, self.boundaries, survive=survive)


@settings(max_examples=examples(30), deadline=None)
@given(count=st.integers(6, 14), separate=st.booleans())
def test_only_what_keeps_growing_is_a_leak(count: int, separate: bool) -> None:
    found = Steps(count, separate).found()
    assert isinstance(found, Leaks)
    (leak,) = found.leaking
    assert str(leak.line) == "/home/u/leak.py:1 in leak"
    assert leak.steps == tuple(range(count - 2))
    assert leak.bytes_by_step == tuple(100 + step for step in range(count - 2))
    assert leak.per_step == leak.bytes // (count - 2)
    assert leak.blocks == count - 2
    # The rest outlived steps too, and is shown: but it does not grow.
    quiet = {str(line.line): line.bytes for line in found.lines if not line.leaking}
    assert quiet == {"/home/u/cache.py:1 in cache": 10_000, "/home/u/ring.py:1 in ring": 700}


@settings(max_examples=examples(30), deadline=None)
@given(count=st.integers(5, 10), survive=st.integers(1, 3))
def test_one_trace_or_one_per_step_gives_the_same_result(count: int, survive: int) -> None:
    whole, parts = Steps(count, False).found(survive), Steps(count, True).found(survive)
    assert isinstance(whole, Leaks)
    assert isinstance(parts, Leaks)
    assert whole.lines == parts.lines


@settings(max_examples=examples(60), deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(1, 999))),
    survive=st.integers(1, 4),
)
def test_the_lines_sum_to_all_that_survived(
    spans: list[tuple[int, int, int]], survive: int
) -> None:
    """Blocks: the step that allocates each, the one that frees it (above 9: never), a size."""
    script = Script("cpu")
    boundaries, held = [], []
    for step in range(10):
        for born, dies, size in spans:
            if born == step:
                frame = (f"/home/u/{size % 3}.py", 1, "f")
                held.append((dies, script.alloc(size, stack=script.stack(frame))))
        for dies, address in [item for item in held if item[0] <= step]:
            script.free(address)
            held.remove((dies, address))
        if step < 9:
            boundaries.append(len(script.trace.events))
    found = leaks(script.trace, boundaries, survive=survive)
    assert isinstance(found, Leaks)
    expected = sum(s for born, dies, s in spans if dies > 9 and 9 - born >= survive)
    assert sum(line.bytes for line in found.lines) == expected
    for line in found.lines:
        assert sum(line.bytes_by_step) == line.bytes


def test_without_step_boundaries_there_is_no_guess() -> None:
    script = Script("cpu")
    for _ in range(50):
        script.alloc(100, stack=script.stack(LEAK))
    found = leaks(script.trace)
    assert isinstance(found, Unavailable)
    assert "step boundaries are unknown" in found.reason


def test_too_few_steps_are_a_reason() -> None:
    found = Steps(3, False).found()
    assert isinstance(found, Unavailable)
    assert "not enough traced steps" in found.reason
    assert isinstance(leaks_over_steps([]), Unavailable)


def test_steps_are_found_from_torchs_annotations() -> None:
    script, marks = Script("cpu"), []
    for _ in range(6):
        script.alloc(64, stack=script.stack(LEAK))
        marks.append(Annotation("START", "Optimizer.step#SGD.step", script.tick()))
        marks.append(Annotation("END", "Optimizer.step#SGD.step", script.tick()))
    script.trace.annotations = tuple(marks)
    found = leaks(script.trace)
    assert isinstance(found, Leaks)
    assert "annotations" in found.source
    assert [str(leak.line) for leak in found.leaking] == ["/home/u/leak.py:1 in leak"]


def test_steps_are_found_from_stacks_inside_an_optimizer() -> None:
    script = Script("cpu")
    for _ in range(6):
        script.alloc(64, stack=script.stack(LEAK))
        for _ in range(2):
            script.free(script.alloc(8, stack=script.stack(OPTIMIZER)))
    script.alloc(1, stack=script.stack(WORK))
    found = leaks(script.trace)
    assert isinstance(found, Leaks)
    assert found.steps == 7
    assert "optimizer" in found.source
    assert [str(leak.line) for leak in found.leaking] == ["/home/u/leak.py:1 in leak"]


def test_steps_without_a_trace_still_count_as_steps() -> None:
    """The sampler keeps the first steps and those with a new peak; addresses continue."""
    program = Steps(12, separate=True)
    kept = [s.trace for s in program.scripts if s.trace.step in (0, 1, 2, 7, 9, 11)]
    found = leaks_over_steps(kept)
    assert isinstance(found, Leaks)
    assert found.steps == 6
    (leak,) = found.leaking
    assert leak.steps == (0, 1, 2, 7, 9)


class Parts:
    """A program as separate traces: each begins with the blocks that the last one left alive."""

    def __init__(self) -> None:
        self.traces: list[MemoryTrace] = []
        self.live: dict[int, tuple[int, tuple[str, int, str]]] = {}
        self.next = 1 << 20

    def alloc(self, size: int, frame: tuple[str, int, str], address: int = 0) -> int:
        address, self.next = address or self.next, self.next + (1 << 20)
        self.script.alloc(size, address=address, stack=self.script.stack(frame))
        self.live[address] = (size, frame)
        return address

    def free(self, address: int) -> None:
        self.script.free(address)
        del self.live[address]

    def trace(self, step: int) -> None:
        self.script = Script("cuda:0", step=step)
        self.traces.append(self.script.trace)
        for address, (size, frame) in self.live.items():
            self.script.before(size, address=address, stack=self.script.stack(frame))


@settings(max_examples=examples(20), deadline=None)
@given(gap=st.integers(2, 6), leaks_too=st.booleans())
def test_an_address_reused_between_traces_is_another_block(gap: int, leaks_too: bool) -> None:
    """A gradient lives until the next step, whose gradient gets the same address."""
    program, gradient = Parts(), 0
    for step in range(3):
        program.trace(step)
        if gradient:
            program.free(gradient)
        else:
            program.alloc(8192, WORK)  # the optimizer's state
        gradient = program.alloc(4096, WORK, address=gradient)
        if leaks_too:
            program.alloc(512, LEAK)
    program.trace(2 + gap)  # the run failed before it did anything in this one
    found = leaks_over_steps(program.traces)
    assert isinstance(found, Leaks)
    assert [str(line.line) for line in found.leaking] == ["/home/u/leak.py:1 in leak"] * leaks_too
    assert all(line.bytes_by_step == (512, 512, 512) for line in found.leaking)


@settings(max_examples=examples(20), deadline=None)
@given(
    workspace=st.sampled_from([8, 97, 511, 1000, 1 << 24]),
    sizes=st.sampled_from([(512,), (96, 160, 500)]),
    late=st.booleans(),
)
def test_a_one_time_allocation_is_not_part_of_a_lines_growth(
    workspace: int, sizes: tuple[int, ...], late: bool
) -> None:
    """However small the growth is. ``late``: the first step leaves nothing else behind."""
    program = Parts()
    for step in range(12):
        program.trace(step)
        if step == 0:
            program.alloc(workspace, LEAK)
        if step >= late:
            program.alloc(sizes[step % len(sizes)], LEAK)
    found = leaks_over_steps(program.traces)
    assert isinstance(found, Leaks)
    (leak,) = found.leaking
    assert leak.bytes == sum(sizes[step % len(sizes)] for step in range(late, 10))
    assert leak.per_step == leak.bytes // (10 - late)
    assert [line.bytes for line in found.lines if not line.leaking] == [workspace]


def test_a_step_of_two_optimizers_is_one_step() -> None:
    program = Parts()
    for step in range(5):
        for _ in range(2):
            program.trace(step)
        program.alloc(512, LEAK)
    found = leaks_over_steps(program.traces)
    assert isinstance(found, Leaks)
    assert found.steps == 5
    (leak,) = found.leaking
    assert (leak.steps, leak.per_step) == ((0, 1, 2), 512)
    assert isinstance(leaks_over_steps(program.traces[:6]), Unavailable)


def test_what_the_first_two_steps_allocate_once_is_apart() -> None:
    """As a library's workspace, and the buckets that DDP replaces in the second step."""
    script = Script("cpu", step=0)
    stack = script.stack(LEAK)
    boundaries = []
    for step in range(8):
        sizes = {0: [9000], 1: [7000, 8000]}.get(step, [])
        for number, size in enumerate([100, *sizes]):
            script.alloc(size, address=((step + 1) << 24) + (number << 20), stack=stack)
        boundaries.append(len(script.trace.events))
    found = leaks(script.trace, boundaries[:-1])
    assert isinstance(found, Leaks)
    (leak,) = found.leaking
    assert (leak.bytes, leak.per_step) == (600, 100)
    (once,) = [one for one in found.lines if not one.leaking]
    assert (once.bytes, once.steps) == (24_000, (0, 1))
