"""The blocks at the peak: all breakdowns add up to it."""

from __future__ import annotations

from analysis_programs import MIB, SETTINGS, Script, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.analysis.peak.flame import FlameNode, flame_tree
from gpuprobe.analysis.peak.peaks import (
    by_category,
    by_line,
    by_module,
    high_water,
    live_at,
    modules_of_lines,
)
from gpuprobe.model.memory import Category
from gpuprobe.model.place import NoPlace
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.user_frames import is_user_frame

ALL = (by_category, by_line, by_module)

FRAMES = (
    Frame("/v/lib/python3.11/site-packages/torch/nn/modules/linear.py", 114, "forward"),
    Frame("/v/lib/python3.11/site-packages/torch/nn/modules/module.py", 1511, "_call_impl"),
    Frame("/home/u/model.py", 7, "forward"),
    Frame("/home/u/model.py", 9, "forward"),
    Frame("/home/u/train.py", 30, "main"),
    Frame("??", 0, "torch::autograd::Engine::thread_main"),
    Frame("CUDACachingAllocator.cpp", 0, "malloc"),
)


def decorate(trace: MemoryTrace, choose: list[int]) -> None:
    """Give each allocation one of a few stacks (or none) and a module (or none)."""
    table = trace.stacks
    frames = [table.frame(frame) for frame in FRAMES]
    stacks = [
        0,
        table.stack(tuple(frames[i] for i in (6, 0, 1, 2, 4))),
        table.stack(tuple(frames[i] for i in (6, 0, 1, 3, 4))),
        table.stack(tuple(frames[i] for i in (6, 5))),
        table.stack((frames[0],)),
        table.stack((frames[4],)),
    ]
    modules = [0, table.string("a"), table.string("a.b")]
    for index in range(len(trace.events)):
        picked = choose[index % len(choose)]
        trace.events.stack.append(stacks[picked % len(stacks)])
        trace.events.module.append(modules[picked % len(modules)])


def check_tree(node: FlameNode) -> None:
    assert node.bytes == node.own + sum(child.bytes for child in node.children)
    names = [child.name for child in node.children]
    assert len(set(names)) == len(names)
    for child in node.children:
        check_tree(child)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 80),
    choose=st.lists(st.integers(0, 5), min_size=1, max_size=7),
)
def test_every_breakdown_sums_to_the_peak(seed: int, steps: int, choose: list[int]) -> None:
    trace, marks = recorded(seed, SETTINGS["default"], steps)
    decorate(trace, choose)
    mark = high_water(trace)
    assert mark.allocated == max([0, *(m.allocated for m in marks)])
    for by in ALL:
        rows = by(mark)
        assert sum(row.bytes for row in rows) == mark.allocated
        assert sum(row.blocks for row in rows) == len(mark)
        assert list(rows) == sorted(rows, key=lambda row: (-row.bytes, str(row.key)))
        assert len({row.key for row in rows}) == len(rows)
    tree = flame_tree(mark)
    assert (tree.bytes, tree.blocks, tree.own) == (mark.allocated, len(mark), 0)
    check_tree(tree)
    # The modules of a line sum to the line, and those of all lines to the modules.
    inside = modules_of_lines(mark)
    assert {line: (sum(m.bytes for m in parts), sum(m.blocks for m in parts))
            for line, parts in inside.items()} == {
        row.key: (row.bytes, row.blocks) for row in by_line(mark)
    }  # fmt: skip
    for row in by_module(mark):
        parts = [m for found in inside.values() for m in found if m.key == str(row.key)]
        assert sum(m.bytes for m in parts) == row.bytes
        assert sum(m.blocks for m in parts) == row.blocks


def test_the_baseline_counts_and_can_be_the_peak_itself() -> None:
    script = Script("cpu")
    held = script.before(1000, category=Category.PARAMETER)
    script.before(24)
    script.free(held)
    script.alloc(900, phase="forward")
    mark = high_water(script.trace)
    assert (mark.event, mark.phase, mark.allocated, mark.baseline_bytes) == (-1, "", 1024, 1024)
    later = live_at(script.trace, 2)
    assert (later.allocated, later.baseline_bytes, later.phase) == (924, 24, "forward")
    assert {r.key: r.bytes for r in by_category(mark)} == {"parameter": 1000, "unknown": 24}
    assert {r.key: r.bytes for r in by_line(later)} == {
        NoPlace.BEFORE_THE_TRACE: 24,
        NoPlace.UNKNOWN: 900,
    }


def test_an_empty_trace_has_a_peak_of_nothing() -> None:
    mark = high_water(MemoryTrace("cpu"))
    assert (mark.allocated, mark.event, len(mark), by_line(mark)) == (0, -1, 0, ())


def test_the_line_is_the_innermost_frame_of_the_user() -> None:
    script = Script("cpu")
    library = ("/v/lib/python3.11/site-packages/einops/einops.py", 5, "einsum")
    script.alloc(
        MIB,
        stack=script.stack(
            ("??", 0, "at::empty"), library, ("/home/u/m.py", 3, "f"), ("/home/u/t.py", 9, "main")
        ),
    )
    script.alloc(10, stack=script.stack(library))
    script.alloc(5, stack=script.stack(("", 0, "torch::autograd::Engine::thread_main()")))
    mark = high_water(script.trace)
    assert [(str(row.key), row.bytes) for row in by_line(mark)] == [
        ("/home/u/m.py:3 in f", MIB),
        (NoPlace.NO_USER_FRAME, 10),
        (NoPlace.AUTOGRAD_ENGINE, 5),
    ]
    # Another idea of "user": the installed package counts as well.


def test_which_frames_are_the_users() -> None:
    def user(file: str, line: int = 3) -> bool:
        return is_user_frame(Frame(file, line, "f"))

    assert user("/home/u/project/train.py")
    assert user("train.py")
    assert user("/home/u/torch_models/net.py")
    assert user("<stdin>")
    assert user("/tmp/ipykernel_12/3817.py")
    assert user("C:\\code\\train.py")
    assert not user("/usr/lib/python3.11/contextlib.py")
    assert not user("/venv/lib/python3.13t/site-packages/x/y.py")
    assert not user("C:\\py\\Lib\\site-packages\\x.py")
    assert not user("/src/pytorch/torch/nn/modules/module.py")
    assert not user("C:\\py\\Lib\\contextlib.py")
    assert user("/home/u/Lib/net.py")
    assert not user("/tmp/torchinductor_u/ab/cab.py")
    assert not user("<frozen runpy>")
    assert not user("<string>")
    assert user("/home/u/bin/train")
    assert not user("/home/u/project/.venv/bin/gpuprobe")
    assert not user("/usr/local/bin/torchrun")
    assert not user("/home/u/gpuprobe/gpuprobe/native/session.py")
    assert not user("/home/u/gpuprobe/gpuprobe/recursion.py")
    assert user("/home/u/gpuprobe/train.py")
    assert not user("??", 0)
    assert not user("", 0)
    assert not user("Functions.cpp", 0)
    assert not user("./misc/../sysdeps/unix/sysv/linux/x86_64/clone3.S", 81)  # of a thread's start
    assert not user("./nptl/pthread_create.c", 442)
