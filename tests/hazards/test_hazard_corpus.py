"""The corpus: what races is found, at the program's line and with a verified fix; what does not is
left alone; and without one of its synchronisations a program that does not race does.
"""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from hazard_case import Case
from hazard_corpus import CASES
from judging import judge

from gpuprobe.torch_support.operator_calls import EngineSums

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SAFE = [case for case in CASES if not case.kinds]


def test_the_corpus_is_large_enough() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.source for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first sum of gradients in a process runs a backward pass within the program's.
    monkeypatch.setattr(EngineSums, "_alone", None)
    found = judge(case, case.text)
    assert not [text for text in found.coverage if "failure" in text]
    kinds = {finding.kind for finding in found.races}
    assert kinds == set(case.kinds), [finding.message for finding in found.races]
    for finding in found.races:
        assert finding.location is not None
        assert finding.location.file == f"<corpus {case.name}>.py"
        assert dict(finding.evidence)["fix verified"].startswith("yes")


def _mutants() -> list[tuple[Case, int]]:
    return [
        (case, number)
        for case in SAFE
        for number, line in enumerate(case.text.splitlines())
        if "#needed" in line
    ]


@pytest.mark.parametrize(
    ("case", "number"), _mutants(), ids=lambda value: getattr(value, "name", value)
)
def test_a_missing_synchronisation_is_found(case: Case, number: int) -> None:
    lines = case.text.splitlines()
    indent = re.match(r" *", lines[number])
    lines[number] = (indent[0] if indent else "") + "pass"
    # A capture that CUDA itself refuses then: it was not joined, or is invalid.
    with contextlib.suppress(torch.AcceleratorError):
        races = judge(case, "\n".join(lines) + "\n").races
        assert races, f"without line {number + 1} of {case.name} nothing was found"
