"""Which blocks at a peak are one group, because one thing of the program holds them."""

from __future__ import annotations

from collections.abc import Sequence

from gpuprobe.causes.answer import EXPECTED, Answer
from gpuprobe.causes.groups import HeldBlock, HeldGroup, groups_of
from gpuprobe.causes.rules import autocast, graphs
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place
from gpuprobe.model.run.holders import HeldBy, Holder, HolderRoot, Kept
from gpuprobe.model.values import Bytes


def block(row: int, line: int = 3, *, freed_in_backward: bool = False) -> HeldBlock:
    return HeldBlock(
        row=row,
        bytes=100,
        need=Need.NEVER_AGAIN,
        category=Category.TEMPORARY,
        made_at=Place("train.py", line, "sample"),
        frames=(),
        last_use=None,
        by="mul",
        phase="forward",
        earlier=False,
        made_by="mul",
        uses=(row, row),
        freed_in_backward=freed_in_backward,
    )


def holder(variable: str, function: str, inner: str, kept: Kept = Kept.TENSOR) -> Holder:
    path = (HeldBy(variable, "dict", 2, 2), HeldBy(inner, "list", 9, 9), HeldBy("[4]", "Tensor"))
    return Holder(
        f"{variable}{inner}[4]", "list", function, 1, 0, Bytes(100), HolderRoot.LOCAL, path, kept
    )


def names(held: Sequence[tuple[HeldBlock, Holder]]) -> list[str]:
    """The holders of the groups, by name."""
    holders = {one.row: by for one, by in held}
    found = groups_of([one for one, _ in held], holders, 400)
    return [group.holder.name if group.holder else "" for group in found]


def test_what_an_earlier_call_returned_is_one_group_with_what_this_call_builds() -> None:
    earlier, this = holder("_", "main", "['x']"), holder("steps", "sample", "['x']")
    assert names([(block(1), earlier), (block(2), earlier), (block(3), this)]) == ["steps['x'][4]"]


def test_other_lines_and_other_structures_are_other_groups() -> None:
    one, other = holder("a", "main", "['x']"), holder("b", "sample", "['x']")
    assert len(names([(block(1), one), (block(2, line=9), other)])) == 2
    assert len(names([(block(1), one), (block(2), holder("b", "sample", "['y']"))])) == 2


def test_what_a_backward_pass_frees_is_in_no_graph_without_one() -> None:
    kept = holder("out", "train", ".x", Kept.SAVED)
    for freed, expected in ((True, False), (False, True)):
        group = HeldGroup((block(1, freed_in_backward=freed),), kept, 100)
        answer = graphs.diagnose(group)
        assert isinstance(answer, Answer) == expected
        assert (answer is EXPECTED) != expected


def test_converted_weights_belong_to_autocast_alone() -> None:
    local = holder("weights", "train", ".x")
    cache = Holder("", "", "", 1, 0, Bytes(100), HolderRoot.AUTOCAST)
    answers = [autocast.diagnose(HeldGroup((block(1),), one, 100)) for one in (None, local, cache)]
    assert [answer.rule if answer else "" for answer in answers] == ["", "", "autocast-cache"]
