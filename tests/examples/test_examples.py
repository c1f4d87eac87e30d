"""The example scripts run as they are, learn, and repeat themselves under a seed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

import gpuprobe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL_GPT = ("train_gpt.py", "--steps", "6", "--layers", "1", "--embed", "32", "--context", "32")
SMALL_CNN = ("train_cnn.py", "--steps", "8", "--batch-size", "16", "--channels", "4")


def run(script: str, *args: str, cwd: Path | None = None) -> str:
    """The script's stdout. It must end with exit code 0."""
    done = subprocess.run(
        [warm_python.shared().python, str(EXAMPLES / script), *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step \d+ loss (\S+)", output, re.MULTILINE)]


@pytest.mark.parametrize(
    "command",
    [SMALL_GPT, (*SMALL_GPT, "--amp", "--accumulate", "2"), SMALL_CNN],
    ids=["gpt", "gpt-amp-accumulate", "cnn"],
)
def test_repeats_itself_and_learns(command: tuple[str, ...]) -> None:
    first, second = run(*command), run(*command)
    assert first == second
    found = losses(first)
    assert len(found) == int(command[2])
    # The first loss of an untrained model, against the best of the last two.
    assert min(found[-2:]) < found[0]


def test_seed_changes_the_losses() -> None:
    assert losses(run(*SMALL_GPT, "--seed", "1")) != losses(run(*SMALL_GPT, "--seed", "2"))


def test_loader_processes_change_nothing() -> None:
    assert run(*SMALL_CNN, "--workers", "0") == run(*SMALL_CNN, "--workers", "2")


def test_memory_leak_and_its_fix_compute_the_same_losses() -> None:
    leaking = losses(run("memory_leak.py", "--steps", "4"))
    fixed = losses(run("memory_leak.py", "--steps", "4", "--fixed"))
    assert leaking == fixed
    assert len(leaking) == 4


def test_record_api_records_what_it_says(tmp_path: Path) -> None:
    output = run("record_api.py", "own.gpuprobe", "--steps", "3", cwd=tmp_path)
    assert output.endswith("recorded 3 steps\n")
    (rank,) = gpuprobe.load(tmp_path / "own.gpuprobe").ranks
    assert [step.ended_by for step in rank.steps] == ["user"] * 3
    for step in rank.steps:
        paths = {phase.path for phase in step.phases}
        assert {"data", "forward", "backward", "optimizer", "accuracy"} <= paths
    assert rank.end is not None
    assert rank.end.gpuprobe_faults == ()
    assert len(losses(output)) == 3


def test_plain_examples_do_not_know_gpuprobe() -> None:
    for script in ("train_gpt.py", "train_cnn.py", "memory_leak.py"):
        source = (EXAMPLES / script).read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) gpuprobe", source, re.MULTILINE), script


def test_the_text_is_what_its_script_writes() -> None:
    """The text that ships is made here, and by nobody else's words."""
    sys.path.insert(0, str(EXAMPLES / "data"))
    try:
        from make_harbour_log import harbour_log
    finally:
        sys.path.pop(0)
    text = (EXAMPLES / "data" / "harbour_log.txt").read_text(encoding="utf-8")
    assert text == harbour_log()
    assert 50_000 <= len(text) <= 100_000


def test_wrong_sizes_are_refused() -> None:
    done = subprocess.run(
        [warm_python.shared().python, str(EXAMPLES / "train_gpt.py"), "--embed", "33"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "--embed must be a multiple of 32" in done.stderr
