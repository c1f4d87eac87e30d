"""The blocks at the high water mark as trees, for flame graphs (by stack) and treemaps (by
category, by need and by module).

Conservation: the root is the peak, and each node's bytes are its children's plus its own. Pruning
joins small nodes under one name and loses no byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpuprobe.analysis.peak.needs import need_of_each
from gpuprobe.analysis.peak.peaks import HighWater
from gpuprobe.model.memory import Category
from gpuprobe.model.text import human_bytes
from gpuprobe.model.trace import Frame
from gpuprobe.model.values import Unavailable
from gpuprobe.user_frames import Lines, is_cpp, is_plumbing, module_row, short_name


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
    """Whether a frame is not native code."""
    return not is_cpp(frame)


def informative_frames(frame: Frame) -> bool:
    """Whether a frame belongs to the program or its libraries, not to native code or PyTorch."""
    return not is_plumbing(frame)


def every_frame(frame: Frame) -> bool:
    """Accept all frames."""
    return True


def flame_tree(
    mark: HighWater, keep: Callable[[Frame], bool] = python_frames, root: str = "peak"
) -> FlameNode:
    """The live blocks as a tree, the outermost frame at the top.

    Frames that ``keep`` rejects are left out. If no frame of a stack remains, it is named by its
    line (`Lines`), so that no bytes are lost.
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
    """Sort the children of all nodes; returns the tree."""
    pending = [tree]
    while pending:
        node = pending.pop()
        node.children.sort(key=lambda child: (-child.bytes, child.name))
        pending.extend(node.children)
    return tree


def category_tree(mark: HighWater) -> FlameNode:
    """A tree of categories, in each the user's lines, and in each line its blocks by size."""
    return _by_kind(mark, [Category.from_code(code).value for code in mark.category])


def need_tree(mark: HighWater) -> FlameNode | None:
    """The same of needs; None if the uses of memory were not traced."""
    needs = need_of_each(mark.ledger, mark.event)
    if isinstance(needs, Unavailable):
        return None
    return _by_kind(mark, [need.value for need in needs])


def _by_kind(mark: HighWater, kinds: Sequence[str]) -> FlameNode:
    lines = Lines(mark.stacks)
    keys = zip(kinds, mark.stack, mark.is_baseline, mark.size, strict=True)
    return _grown(
        ((kind, lines.line(stack, before=bool(baseline)), _each(size)), size)
        for kind, stack, baseline, size in keys
    )


def module_tree(mark: HighWater) -> FlameNode:
    """A tree of modules by their dotted paths (blocks without a module by category), and in the
    innermost ones their blocks by size.
    """
    strings = mark.stacks.strings
    keys = zip(mark.module, mark.stack, mark.category, mark.is_baseline, mark.size, strict=True)
    return _grown(
        ((*_module_path(strings[module], stack, code, base), _each(size)), size)
        for module, stack, code, base, size in keys
    )


def _module_path(module: str, stack: int, code: int, baseline: int) -> tuple[str, ...]:
    if module:
        return tuple(module.split("."))
    return module_row("", stack, before=bool(baseline)), Category.from_code(code).value


def _grown(blocks: Iterable[tuple[tuple[str, ...], int]]) -> FlameNode:
    """A tree of blocks, each given as (path, bytes)."""
    totals: dict[tuple[str, ...], tuple[int, int]] = {}
    for path, size in blocks:
        held, count = totals.get(path, (0, 0))
        totals[path] = (held + size, count + 1)
    return grown("peak", ((path, size, count) for path, (size, count) in totals.items()))


def pruned(tree: FlameNode, most: int) -> FlameNode:
    """The tree with its ``most`` largest nodes (of equal ones, the outer ones first). Below each,
    the other nodes are joined into one, ``(N smaller)``. A small tree is returned unchanged.
    """
    sizes: list[tuple[int, int, int]] = []  # bytes, -depth, -number
    pending = [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        sizes.append((node.bytes, -depth, -len(sizes)))
        pending.extend((child, depth + 1) for child in node.children)
    if len(sizes) <= most:
        return tree
    kept = {-number for _, _, number in heapq.nlargest(max(most, 1), sizes)}
    # The same walk gives nodes the same numbers. A parent is at least as large as its child, and
    # less deep, so no node is kept without its parent.
    number = 0
    root = FlameNode(tree.name, tree.bytes, tree.blocks, tree.own)
    walk: list[tuple[FlameNode, FlameNode | None]] = [(tree, None)]
    left: dict[int, tuple[FlameNode, int, int, int]] = {}
    while walk:
        node, parent = walk.pop()
        inside = None
        if parent is None and number == 0:
            inside = root
        elif parent is not None and number in kept:
            inside = FlameNode(node.name, node.bytes, node.blocks, node.own)
            parent.children.append(inside)
        elif parent is not None:
            _, count, size, blocks = left.get(id(parent), (parent, 0, 0, 0))
            left[id(parent)] = (parent, count + 1, size + node.bytes, blocks + node.blocks)
        number += 1
        walk.extend((child, inside) for child in node.children)
    for parent, count, size, blocks in left.values():
        parent.children.append(FlameNode(f"({count} smaller)", size, blocks, size))
    return in_order(root)


def _each(size: int) -> str:
    """The name of a node of blocks of one size."""
    return f"blocks of {human_bytes(size)}"
