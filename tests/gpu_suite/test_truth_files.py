"""Truth files round-trip; recording runs end to end without a GPU; paths are scrubbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import record_truth
import warm_python
from hypothesis import given
from hypothesis import strategies as st
from truth_files import StepTruth, read_trace, read_truth, truth_files, write_truth
from truth_samples import truth

from gpuprobe.api.recordings import replay
from gpuprobe.errors import DataError, UnsupportedSchema
from gpuprobe.model.trace import Frame, MemoryTrace
from gpuprobe.model.values import Unavailable

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

sizes = st.one_of(st.integers(0, 1 << 50), st.builds(Unavailable, st.text(max_size=20)))
steps = st.builds(StepTruth, sizes, sizes, sizes, sizes, sizes, st.floats(allow_nan=False))


@given(built=steps, made=st.lists(steps, max_size=3), beside=sizes, about=st.text(max_size=20))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    built: StepTruth,
    made: list[StepTruth],
    beside: int | Unavailable,
    about: str,
) -> None:
    folder = tmp_path_factory.mktemp("truth")
    written = truth(built=built, steps=tuple(made), beside=beside, about=about)
    path = write_truth(folder, written, None)
    assert read_truth(path) == written
    assert read_trace(path) is None
    assert list(truth_files(folder)) == [path]


def allocations() -> MemoryTrace:
    """What torch's recorder writes for two allocations in one new segment, and their frees."""
    trace = MemoryTrace("cuda:0")
    strings = trace.stacks
    frame = strings.frame(Frame(f"{BENCHMARKS}/gpu/record_truth.py", 7, "step"))
    torch_frame = strings.frame(
        Frame("/opt/py/lib/python3.11/site-packages/torch/nn/functional.py", 8, "linear")
    )
    stack = strings.stack((torch_frame, frame))
    base = 0x7F0000000000
    for action, address, size, when in (
        (3, base, 2 << 20, 10),
        (0, base, 512, 10),
        (0, base + 512, 1024, 20),
        (1, base, 512, 30),
        (2, base, 512, 30),
    ):
        trace.events.append(action, address, size, time_us=when, stack=stack)
    return trace


def test_phases_come_from_the_times_and_the_times_go(tmp_path: Path) -> None:
    trace = record_truth.without_times(allocations(), [5, 15, 30])
    names = [trace.stacks.strings[index] for index in trace.events.phase]
    assert names == ["build", "build", "step 1", "step 2", "step 2"]
    assert trace.events.time_us == array("q")
    files = [frame.filename for frame in trace.stacks.frames]
    assert files == ["", "benchmarks/gpu/record_truth.py", "torch/nn/functional.py"]
    path = write_truth(tmp_path, truth(), trace)
    assert read_trace(path) == trace


def test_a_recorded_trace_replays(tmp_path: Path) -> None:
    path = write_truth(tmp_path, truth(), record_truth.without_times(allocations(), [5]))
    kept = read_trace(path)
    assert kept is not None
    result = replay(kept)
    assert result.peak_allocated == 512 + 1024
    assert result.peak_reserved == 2 << 20


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/home/me/x/site-packages/torch/a.py", "torch/a.py"),
        ("/usr/lib/python3.12/asyncio/run.py", "asyncio/run.py"),
        ("/home/me/secret/train.py", "train.py"),
        ("", ""),
    ],
)
def test_file_names_are_cut(name: str, shown: str) -> None:
    assert record_truth.short(name) == shown


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = write_truth(tmp_path, truth(), allocations())
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "schema_version": 2}))
    with pytest.raises(UnsupportedSchema):
        read_truth(path)
    path.write_text(json.dumps({**document, "steps": 7}))
    with pytest.raises(DataError):
        read_truth(path)
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(DataError):
            read_truth(path)
    packed = path.with_name("mlp-at-1mib.trace.xz")
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError):
        read_trace(path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python.shared().python, str(BENCHMARKS / "gpu" / "record_truth.py"), *arguments],
        env={**os.environ, **warm_python.NESTED},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_dry_run(tmp_path: Path) -> None:
    done = run(
        "--device", "cpu", "--tiny", "--steps", "2", "--case", "vae*", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 cases" in done.stdout
    (path,) = truth_files(tmp_path)
    found = read_truth(path)
    assert found.outcome == "ok"
    assert found.tiny
    assert len(found.steps) == 2
    assert all(isinstance(step.loss, float) for step in found.steps)
    assert isinstance(found.peak_allocated, Unavailable)


def test_a_case_that_has_no_time_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--case", "vae*"]
    assert record_truth.main([*arguments, "--time-limit", "0"]) == 1
    assert "no time left" in capsys.readouterr().out
    assert not list(truth_files(tmp_path))


def test_a_case_that_fails_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child ends with an error: here it cannot write where it should."""
    monkeypatch.setattr(sys, "executable", warm_python.shared().python)
    (tmp_path / "vae-fp32.truth.json.part").mkdir()
    arguments = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--case", "vae*"]
    assert record_truth.main(arguments) == 1
    assert "IsADirectoryError" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert record_truth.main([]) == 3
    assert "no CUDA device" in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture) -> None:
    assert record_truth.main(["--case", "nothing*"]) == 2
    assert record_truth.main(["--device", "cpu"]) == 2
    assert record_truth.main(["--list", "--case", "gpt2-*"]) == 0
    assert capsys.readouterr().out.count("GPT-2") == 6


def test_destination_is_named_after_the_gpu() -> None:
    assert record_truth.destination("NVIDIA H200").parts[-3:] == ("recorded", "h200-141gb", "truth")
    assert record_truth.destination("NVIDIA Z1 (rev 2)").parts[-2] == "nvidia-z1-rev-2"
