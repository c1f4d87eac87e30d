"""The sentences of ``gpuprobe explain``."""

from __future__ import annotations

import pytest

from gpuprobe.model.causes import EDIT_TRIED, Certainty, Effect, Explanation, RunEnd
from gpuprobe.model.needs import Need, NeedRow, NeedTable
from gpuprobe.reporters.sections.causes import effect_text
from gpuprobe.reporters.sections.explain import explain_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw


@pytest.mark.parametrize(
    ("needless", "sentence"),
    [(0, "nothing is freed later than it could be"), (1, "1 B are freed a little later than")],
)
def test_no_bytes_are_not_called_late(needless: int, sentence: str) -> None:
    rows = (
        NeedRow(Need.LATER.value, 100 - needless, 1, (), 0),
        NeedRow(Need.NEVER_AGAIN.value, needless, 1, (), 0),
    )
    needs = NeedTable(step=0, total=100, rows=rows, freed_after_use=100 - needless)
    found = Explanation(
        program="train.py",
        gpu="t4",
        device="cuda:0",
        step=0,
        phase="forward",
        capacity=1000,
        allocated=100,
        reserved=100,
        ended=RunEnd.COMPLETE,
        detail="",
        failed=False,
        needs=needs,
        late_variable="",
        causes=(),
        smaller=None,
        notes=(),
        searched=True,
        seconds=1.0,
    )
    words = " ".join(draw.lines(explain_sections(found), Style())).split()
    assert sentence in " ".join(words)


@pytest.mark.parametrize(
    ("note", "untried"), [("", True), (f"{EDIT_TRIED}, and did not help", False)]
)
def test_a_replay_is_not_called_untried_after_a_trial(note: str, untried: bool) -> None:
    effect = Effect(Certainty.REPLAYED, 200, 100, "with earlier frees", note=note)
    assert ("not tried" in effect_text(effect)) is untried
