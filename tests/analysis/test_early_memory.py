"""Which memory that waits for its first use is a cause, and which is as it must be."""

from __future__ import annotations

import pytest

from gpuprobe.causes.answer import EXPECTED, Answer, EditKind
from gpuprobe.causes.groups import HeldBlock, HeldGroup
from gpuprobe.causes.rules import early
from gpuprobe.model.memory import Category
from gpuprobe.model.needs import Need
from gpuprobe.model.place import Place

LINE = Place("train.py", 3, "load")


def group(
    category: Category, *, used_in_step: bool, need: Need = Need.NOT_YET, made_by: str = ""
) -> HeldGroup:
    blocks = [
        HeldBlock(
            row=row,
            bytes=100,
            need=need,
            category=category,
            made_at=LINE,
            frames=(),
            last_use=Place("train.py", 9, "step") if used_in_step else None,
            by="mm",
            phase="forward",
            earlier=True,
            made_by=made_by,
            uses=(row + 1, row + 1) if used_in_step else (0, 0),
        )
        for row in range(3)
    ]
    return HeldGroup(tuple(blocks), None, 300)


@pytest.mark.parametrize(
    ("category", "used_in_step", "is_cause"),
    [
        (Category.INPUT, False, True),
        (Category.PARAMETER, False, True),  # another model, of which this step uses nothing
        (Category.BUFFER, False, True),
        (Category.PARAMETER, True, False),  # the last layers of the model that runs
        (Category.OPTIMIZER_STATE, False, False),
        (Category.GRADIENT, False, False),
    ],
)
def test_what_waits_for_a_later_step(
    category: Category, used_in_step: bool, is_cause: bool
) -> None:
    answer = early.diagnose(group(category, used_in_step=used_in_step))
    if is_cause:
        assert isinstance(answer, Answer)
        assert answer.rule == "too-early"
        assert answer.sentence.startswith("300 B in 3 tensors from train.py:3 in load wait")
    else:
        assert answer is EXPECTED


def test_what_was_used_is_for_other_rules() -> None:
    assert early.diagnose(group(Category.INPUT, used_in_step=True, need=Need.NEVER_AGAIN)) is None


@pytest.mark.parametrize(("made_by", "results"), [("convolution", True), ("_to_copy", False)])
def test_what_is_computed_waits_for_other_results(made_by: str, results: bool) -> None:
    answer = early.diagnose(group(Category.TEMPORARY, used_in_step=False, made_by=made_by))
    assert isinstance(answer, Answer)
    assert ("are results that wait" in answer.sentence) is results
    assert (answer.edit is EditKind.TO_CPU) is results
