"""Programs whose recording is on a disk that fails, once or from then on; all of them:
`benchmarks/disk_faults.py`.
"""

from __future__ import annotations

from pathlib import Path

import disk_faults
import pytest
from disk_faults import FOR_EVER, Case

pytestmark = pytest.mark.slow

CALM = Case(level="trace", first=0, count=0)
CASES = [
    Case("trains", "trace", error="ENOSPC", first=5, count=1),  # the first trace chunk
    Case("trains", "trace", error="EIO", first=7, count=1),
    Case("trains", "trace", error="EDQUOT", first=9),
    Case("trains", "trace", error="EROFS", first=4),  # the session, and all that follows
    Case("trains", "trace", error="ENOSPC", first=4, count=2),  # the session alone
    Case("trains", "trace", error="short", first=1),
    Case("trains", "trace", error="ENOSPC", first=22),  # the end
    Case("trains", "trace", error="EROFS", first=1),
    Case("trains", "trace", 2, error="ENOSPC", first=12),
]


def test_a_failing_disk_harms_no_program_and_passes_no_check(tmp_path: Path) -> None:
    library = disk_faults.compiled(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler, or the system is not Linux")
    wrong = []
    with disk_faults.running(library) as run:
        calm = run(CALM)
        by_case = {case: run(case) for case in CASES}
    assert calm.passes
    for case, outcome in by_case.items():
        assert outcome.failed or outcome.refused
        two = outcome if case.ranks == 1 else None
        expected = calm if two is not None else _twice(calm)
        wrong += [f"{case}: {text}" for text in disk_faults.problems(case, outcome, expected)]
    assert wrong == []
    assert by_case[CASES[7]].refused
    assert by_case[CASES[4]].steps == [[0, 1, 2, 3, 4, 5]]
    last = by_case[CASES[6]]
    assert last.steps == [[0, 1, 2, 3, 4, 5]]
    assert "the recording has no end" in last.incomplete[0]
    assert "no training step" not in "".join(outcome.talk for outcome in by_case.values())
    assert calm.calls < FOR_EVER


def _twice(calm: disk_faults.Outcome) -> disk_faults.Outcome:
    return disk_faults.Outcome(codes=calm.codes * 2, printed=calm.printed * 2)
