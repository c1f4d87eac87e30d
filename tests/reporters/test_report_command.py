"""`gpuprobe report` as a user runs it: good input, bad input, exit codes, nothing written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from report_builders import environment, session, step, trace

import gpuprobe
from gpuprobe.errors import DataError, NotARecording, UsageError
from gpuprobe.model.memory import Category
from gpuprobe.model.run.session import SessionEnd
from gpuprobe.model.text import visible
from gpuprobe.recording.writer import RecordingWriter
from gpuprobe.reporters.json.schemas import schema


def write(path: Path, *, ended: bool = True) -> Path:
    writer = RecordingWriter.create(path)
    writer.session(session(), environment())
    made = trace([("/home/u/project/train.py:7", 4096, Category.ACTIVATION)])
    writer.step(step(0, {"forward": 10, "backward": 4096}, traces=(writer.trace(made),)))
    if ended:
        writer.end(SessionEnd(5))
    writer.close()
    return path


def report(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuprobe", "report", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **variables},
    )


def tree(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_text(tmp_path: Path) -> None:
    done = report(write(tmp_path / "a.gpuprobe"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "4.0 KiB allocated on cpu, in phase backward, step 0" in done.stdout
    assert "activation" in done.stdout
    assert " train.py:7 in forward" in done.stdout  # relative to the program's directory
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_text_on_a_stream_without_unicode(tmp_path: Path) -> None:
    done = report(write(tmp_path / "a.gpuprobe"), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "####" in done.stdout


def test_json(tmp_path: Path) -> None:
    done = report(write(tmp_path / "a.gpuprobe"), "--json", "--top", "1")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema("report-2")).validate(document)
    assert document["peak"]["allocated"]["at_least"] == 4096
    assert document["top_lines"]["rows"][0]["line"] == 7


def test_the_api_gives_the_same_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gpuprobe")
    document = gpuprobe.report(gpuprobe.load(path))
    assert json.loads(json.dumps(document)) == json.loads(report(path, "--json").stdout)


def test_a_recording_that_is_still_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gpuprobe", ended=False)
    assert gpuprobe.report(gpuprobe.load(path))["recording"]["status"] == "unfinished"


def test_whether_the_process_still_runs(tmp_path: Path) -> None:
    import socket
    import time

    here = environment(hostname=socket.gethostname())
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    for name, pid, started, status in (
        ("running", os.getpid(), time.time(), "running"),
        ("gone", gone.pid, time.time(), "incomplete"),
        ("reused", os.getpid(), 1.0, "incomplete"),  # that number is another process by now
    ):
        writer = RecordingWriter.create(tmp_path / name)
        writer.session(session(pid=pid, started_at=started), here)
        writer.close()
        document = gpuprobe.report(gpuprobe.load(writer.path))
        assert document["recording"]["status"] == status


BAD = {
    "missing": (2, "no such file or directory"),
    "empty directory": (4, "is not a recording"),
    "foreign directory": (4, "is not a recording"),
    "empty stream": (4, "is empty"),
    "truncated header": (4, "is empty"),
    "only a header": (4, "is empty"),
    "newer": (4, "newer than this gpuprobe can read"),
    "not a stream": (4, "does not begin with the header"),
    "random file": (4, "random file"),
    "empty file": (4, "empty file"),
    "text file": (4, "text file"),
    "stream": (4, "is one file of a recording"),
    "chunk": (4, "is one file of a recording"),
    "device": (4, "neither a recording nor a memory snapshot"),
    "escape": (2, "\\x1b[31m"),
}


def bad_input(kind: str, tmp_path: Path) -> Path:
    path = tmp_path / kind
    if kind == "empty directory":
        path.mkdir()
    elif kind == "foreign directory":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind in ("empty stream", "truncated header", "only a header", "newer", "not a stream"):
        stream = write(path) / "rank-00000.jsonl"
        data = stream.read_bytes()
        header = data.splitlines(keepends=True)[0]
        stream.write_bytes(
            {
                "empty stream": b"",
                "truncated header": header[:40],
                "only a header": header,
                "newer": re.sub(rb'"version":\[2,\d+\]', b'"version":[7,2]', data),
                "not a stream": b'{"a": 1}\n',
            }[kind]
        )
    elif kind == "random file":
        path.write_bytes(bytes(range(256)) * 8)
    elif kind == "empty file":
        path.write_bytes(b"")
    elif kind == "text file":
        path.write_text("epoch,loss\n1,0.5\n")
    elif kind == "stream":
        return write(tmp_path / "a.gpuprobe") / "rank-00000.jsonl"
    elif kind == "chunk":
        return write(tmp_path / "a.gpuprobe") / "rank-00000.trace-000000.cols"
    elif kind == "device":
        return Path(os.devnull)
    elif kind == "escape":
        return tmp_path / "\x1b[31mred"
    return path


@pytest.mark.parametrize("json_flag", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_input(kind: str, json_flag: tuple[str, ...], tmp_path: Path) -> None:
    path = bad_input(kind, tmp_path)
    before = tree(tmp_path)
    done = report(path, *json_flag)
    code, message = BAD[kind]
    assert done.returncode == code, done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("gpuprobe: error: ")
    assert message in first
    assert all(line.startswith("  hint: ") for line in rest)
    assert len(rest) <= 1
    assert "\x1b" not in done.stderr
    if json_flag:
        error = json.loads(done.stdout)["error"]
        assert f"gpuprobe: error: {visible(error['message'])}" == first
    else:
        assert done.stdout == ""
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "arguments", [[], ["a", "b"], ["a", "--top", "0"], ["a", "--top", "x"], ["a", "--colour"]]
)
def test_bad_usage(arguments: list[str]) -> None:
    done = report(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("gpuprobe: error: ")
    assert "Traceback" not in done.stderr


def test_load_raises_what_its_docstring_says(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        gpuprobe.load(tmp_path / "missing")
    with pytest.raises(NotARecording):
        gpuprobe.load(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        gpuprobe.load("a\0b")
    with pytest.raises(DataError):
        gpuprobe.load(os.devnull)


def test_a_damaged_chunk_is_reported_not_fatal(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gpuprobe")
    chunk = path / "rank-00000.trace-000000.cols"
    chunk.write_bytes(chunk.read_bytes()[:-3])
    done = report(path)
    assert done.returncode == 0
    assert "4.0 KiB allocated on cpu" in done.stdout
    assert chunk.name in done.stdout
    with pytest.raises(DataError, match=chunk.name):
        list(gpuprobe.load(path).ranks[0].traces)
