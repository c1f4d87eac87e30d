"""The frozen cases of memory causes: the table is complete, and a few are run as it says. All are
run by ``benchmarks/cause_cases.py``.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("the table needs a reader of TOML", allow_module_level=True)

from cause_cases import FOLDER, Case, cases, faults

CASES = {case.name: case for case in cases()}
CAUSES = {name: case for name, case in CASES.items() if case.cause}
RUN = ("stream_tagger", "prefetched_batches", "mlp_adam")
"""A held graph, memory that is moved too early, and a control: those that end soonest."""


def named(chosen: dict[str, Case]) -> Any:
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen.keys())


def test_each_folder_is_in_the_table() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == CASES.keys()
    assert len(CAUSES) >= 60
    assert len(CASES) - len(CAUSES) >= 12


@named(CASES)
def test_a_program_does_not_give_its_answer_away(case: Case) -> None:
    text = case.program.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    assert not [token.string for token in tokens if token.type == tokenize.COMMENT]
    assert case.frozen == "2026-11-28"
    assert (case.kind == "control") == (case.cause is None)
    assert case.patch.exists() == (case.cause is not None)


@named(CAUSES)
def test_a_cause_is_complete(case: Case) -> None:
    cause = case.cause
    assert cause is not None
    assert re.fullmatch(r"K([1-9]|1[0-7])", case.kind)
    assert case.thread.startswith("https://")
    lines = case.program.read_text(encoding="utf-8").splitlines()
    assert lines[cause.born - 1].strip()
    assert lines[cause.keeps - 1].strip()
    assert cause.holder
    assert cause.remedy
    assert cause.state in {"drag", "lag", "use", "void", "cached"}
    before, after = getattr(case.before, cause.figure), getattr(cause.after, cause.figure)
    assert case.fails or after < 0.95 * before


@pytest.mark.slow
@named({name: CASES[name] for name in RUN})
def test_a_case_is_as_the_table_says(case: Case) -> None:
    assert not list(faults(case))
