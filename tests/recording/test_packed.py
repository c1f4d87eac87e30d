"""Packed recordings: read like the directory they were made of, and by other programs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import report_builders as build
from test_many import a_step, line, written

import gpuprobe
from gpuprobe.api.recordings import pack, summary
from gpuprobe.cli import main
from gpuprobe.errors import DataError, NotARecording, UnsupportedSchema, UsageError
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.memory import Category
from gpuprobe.model.run.session import BlindSpot
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.sections.report import report_sections
from gpuprobe.reporters.text import draw

parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'gpuprobe[fleet]'")


def outputs(path: Path) -> list[str]:
    """All that is printed of a recording."""
    found = gpuprobe.load(path)
    texts = [json.dumps(gpuprobe.report(found))]
    for full in (False, True):
        stream = io.StringIO()
        draw.write(report_sections(summary(found), full=full), stream, full=full)
        texts.append(stream.getvalue())
    return texts


def test_reports_of_packed_and_unpacked_are_equal(tmp_path: Path) -> None:
    """With a damaged line, steps written twice and out of order, and a last line without an end."""
    steps = [a_step(index, 100 + index % 4) for index in (*range(20), 7, 30, 25)]
    path = written(tmp_path, steps, steps[:9], extra=b'{"type":"step","index":[]}\n\n{"type":"st')
    packed = pack(path)
    assert packed == tmp_path / "r.parquet"
    assert outputs(packed) == outputs(path)
    assert len(gpuprobe.load(packed).ranks) == 2


def test_traces_findings_and_blind_spots_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "traced.gpuprobe"
    writer = RecordingWriter.create(path)
    trace = build.trace([("train.py:3", 512, Category.ACTIVATION)])
    writer.session(build.session(), build.environment())
    writer.step(a_step(0, traces=(writer.trace(trace),)))
    writer.finding(Finding("GP999", "a-kind", Level.WARNING, "a message"))
    writer.blind_spot(BlindSpot("something", "nothing follows"))
    writer.close()
    packed = pack(path, tmp_path / "p.parquet")
    assert outputs(packed) == outputs(path)
    (one,) = gpuprobe.load(packed).ranks[0].load_traces()
    (two,) = gpuprobe.load(path).ranks[0].load_traces()
    assert one.events == two.events


def test_other_programs_read_the_columns(tmp_path: Path) -> None:
    packed = pack(written(tmp_path, [a_step(i, 100 + i) for i in range(3)]))
    rows = [row for row in parquet.read_table(packed).to_pylist() if row["record"] == "step"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [dict(row["phases"])["forward"] for row in rows] == [10, 10, 10]
    assert [row["devices"][0]["peak_allocated"] for row in rows] == [
        (100 + i) * build.MIB for i in range(3)
    ]
    assert rows[0]["data"] == line(a_step(0))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, [a_step(0)])
    target = tmp_path / "x.parquet"
    assert main(["pack", str(path), "-o", str(target)]) == 0
    assert capsys.readouterr().err == f"wrote {target}\n"
    assert main(["pack", str(path), "-o", str(target)]) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert main(["pack", str(path), "-o", str(target), "--force"]) == 0
    assert main(["report", str(target)]) == 0
    assert "r.gpuprobe" in capsys.readouterr().out


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        pack(tmp_path / "missing")
    file = tmp_path / "file"
    file.write_bytes(b"")
    for wrong in (file, tmp_path):
        with pytest.raises(NotARecording):
            pack(wrong, tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()


def test_files_that_are_not_packed_recordings(tmp_path: Path) -> None:
    packed = pack(written(tmp_path, [a_step(i) for i in range(50)]))
    whole = packed.read_bytes()
    for size in (4, 100, len(whole) // 2, len(whole) - 1):
        packed.write_bytes(whole[:size])
        with pytest.raises(DataError):
            gpuprobe.load(packed)
    import pyarrow

    packed.write_bytes(whole)
    table = parquet.read_table(packed)
    newer = {b"gpuprobe.packed": b'{"version": [2, 0], "path": "x"}'}
    parquet.write_table(table.replace_schema_metadata(newer), packed)
    with pytest.raises(UnsupportedSchema, match="packed by a newer gpuprobe"):
        gpuprobe.load(packed)

    parquet.write_table(pyarrow.table({"a": [1]}), packed)
    with pytest.raises(NotARecording, match="a Parquet file without a recording"):
        gpuprobe.load(packed)


@pytest.mark.parametrize("step", [1, 7])
def test_damaged_bytes_are_one_clear_error(tmp_path: Path, step: int) -> None:
    packed = pack(written(tmp_path, [a_step(i) for i in range(30)]))
    whole = packed.read_bytes()
    for at in range(step, len(whole), max(1, len(whole) // 40)):
        packed.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            gpuprobe.report(packed)
        except DataError:
            continue
