"""Flame graph data: the stacks at the high water mark as one tree.

Conservation: the root is the peak, and each node's bytes are its children's plus its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpuprobe.analysis.peak.high_water import HighWater
from gpuprobe.analysis.trace.frames import Lines, is_cpp, is_plumbing, short_name
from gpuprobe.model.trace import Frame


@dataclass(slots=True)
class FlameNode:
    """A frame, and the memory of all blocks allocated at or below it.

    ``own`` is the part allocated with this frame innermost: ``bytes`` is ``own`` plus the
    children's bytes, and likewise for ``blocks``. Children: most bytes first, then by name.
    """

    name: str
    bytes: int = 0
    blocks: int = 0
    own: int = 0
    children: list[FlameNode] = field(default_factory=list)


def python_frames(frame: Frame) -> bool:
    """Keep everything but native frames."""
    return not is_cpp(frame)


def informative_frames(frame: Frame) -> bool:
    """Keep the frames of the program and its libraries; not native code and PyTorch's own."""
    return not is_plumbing(frame)


def every_frame(frame: Frame) -> bool:
    """Keep all."""
    return True


def flame_tree(
    mark: HighWater, keep: Callable[[Frame], bool] = python_frames, root: str = "peak"
) -> FlameNode:
    """The live blocks as a tree, outermost frame at the top.

    Frames that ``keep`` refuses are left out of the path. A stack of which nothing remains
    goes by what `Lines` calls it, so that no bytes are lost.
    """
    totals: dict[tuple[int, int], tuple[int, int]] = {}
    for stack, baseline, size in zip(mark.stack, mark.is_baseline, mark.size, strict=True):
        held, blocks = totals.get((stack, baseline), (0, 0))
        totals[stack, baseline] = (held + size, blocks + 1)

    lines = Lines(mark.stacks)

    def path(stack: int, baseline: int) -> list[str]:
        frames = reversed(mark.stacks.frames_of(stack))
        names = [short_name(frame) for frame in frames if keep(frame)]
        return names or [lines.line(stack, before=bool(baseline))]

    return grown(root, ((path(*key), size, blocks) for key, (size, blocks) in totals.items()))


def grown(name: str, parts: Iterable[tuple[Sequence[str], int, int]]) -> FlameNode:
    """A tree of parts, each given as (path, bytes, blocks)."""
    root = FlameNode(name)
    known: dict[tuple[int, str], FlameNode] = {}  # (id of the parent, name) -> node
    for path, size, blocks in parts:
        node = root
        node.bytes += size
        node.blocks += blocks
        for step in path:
            child = known.get((id(node), step))
            if child is None:
                child = known[id(node), step] = FlameNode(step)
                node.children.append(child)
            child.bytes += size
            child.blocks += blocks
            node = child
        node.own += size
    return in_order(root)


def in_order(tree: FlameNode) -> FlameNode:
    """The same tree, the children of every node sorted."""
    pending = [tree]
    while pending:
        node = pending.pop()
        node.children.sort(key=lambda child: (-child.bytes, child.name))
        pending.extend(node.children)
    return tree
