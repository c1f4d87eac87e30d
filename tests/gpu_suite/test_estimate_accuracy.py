"""The score of an estimator: its arithmetic and its table, on made-up figures."""

from __future__ import annotations

from pathlib import Path

import estimate_accuracy
import pytest
from estimate_accuracy import Estimated, Row, row_of, summarise, summary_lines, table
from hypothesis import given
from hypothesis import strategies as st
from truth_files import write_truth
from truth_samples import truth

from gpuprobe.model.values import Unavailable


def row(
    allocated: int, reserved: int, estimate: tuple[int, int, int, int] | None, case: str = "a"
) -> Row:
    made = None if estimate is None else Estimated(*estimate)
    return Row(case, "NVIDIA H200", "2.13.0", allocated, reserved, made, "" if made else "broke")


def test_differences() -> None:
    one = row(1000, 2000, (1010, 1900, 1900, 2100))
    assert (one.allocated_off, one.reserved_off, one.inside) == (10, -100, True)
    assert not row(1000, 2000, (1000, 2001, 2001, 2100)).inside


def test_summary() -> None:
    summary = summarise(
        [
            row(1000, 2000, (1000, 2000, 2000, 2000)),
            row(1000, 2000, (1010, 1900, 1800, 1950)),
            row(1000, 2000, (1000, 2000, 1900, 2100)),
            row(1000, 2000, None),
        ]
    )
    assert (summary.cases, summary.estimated, summary.inside) == (4, 3, 2)
    assert summary.allocated == estimate_accuracy.Figures(2, 0.0, 0.01)
    assert summary.reserved == estimate_accuracy.Figures(2, 0.0, 0.05)
    assert not any(summary.goals.values())


def test_goals_are_met_by_exact_estimates() -> None:
    summary = summarise([row(10 + i, 20 + i, (10 + i, 20 + i, 20 + i, 20 + i)) for i in range(5)])
    assert all(summary.goals.values())


rows = st.lists(
    st.builds(
        row,
        st.integers(1, 1 << 40),
        st.integers(1, 1 << 40),
        st.none() | st.tuples(*[st.integers(0, 1 << 40)] * 4),
    ),
    min_size=1,
    max_size=20,
)


@given(rows)
def test_summary_is_consistent(found: list[Row]) -> None:
    summary = summarise(found)
    for figures in (summary.allocated, summary.reserved):
        assert 0 <= figures.equal <= summary.estimated <= summary.cases == len(found)
        assert 0 <= figures.median <= figures.worst
        if figures.equal == summary.estimated:
            assert figures.worst == 0
    assert len(list(table(found))) == len(found) + 1
    assert len(list(summary_lines(summary))) == 3 + len(summary.goals)


def test_table() -> None:
    lines = list(table([row(1 << 30, 2 << 30, ((1 << 30) + 512, 2 << 30, 2 << 30, 2 << 30))]))
    assert "+512 B (+0.00%)" in lines[1]
    assert "equal  inside" in lines[1]
    assert list(table([row(1, 2, None)]))[1].endswith("no estimate: broke")


def test_only_truth_with_peaks_is_scored() -> None:
    with pytest.raises(ValueError, match="no peaks"):
        row_of(truth(peak_allocated=Unavailable("none")), None, "")


@pytest.fixture
def with_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this gpuprobe had an estimator. Nothing calls it in this process."""
    import gpuprobe

    if "estimate" not in gpuprobe.__all__:
        monkeypatch.setattr(gpuprobe, "estimate", NotImplemented, raising=False)


@pytest.mark.usefixtures("with_estimator")
def test_nothing_to_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_truth(tmp_path, truth(outcome="out of memory"), None)
    assert estimate_accuracy.main([str(tmp_path)]) == 3
    assert "no truth recorded" in capsys.readouterr().err
    assert estimate_accuracy.main(["--snapshots", str(tmp_path)]) == 3


@pytest.mark.usefixtures("with_estimator")
def test_a_damaged_truth_file_is_bad_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.truth.json").write_text("{}")
    assert estimate_accuracy.main([str(tmp_path)]) == 4
    assert "not a truth file" in capsys.readouterr().err


@pytest.mark.usefixtures("with_estimator")
def test_a_case_that_cannot_be_estimated_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_truth(tmp_path, truth(case="no-such-case"), None)
    assert estimate_accuracy.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "no estimate: KeyError: 'no-such-case'" in out
    assert "NOT MET every case estimated" in out


def test_the_gpu_is_found_in_the_catalogue() -> None:
    assert estimate_accuracy.gpu_name(truth()) == "h100-80gb"
