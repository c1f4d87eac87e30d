"""Which commands start a vLLM, and how they are run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuprobe.errors import UsageError
from gpuprobe.planning.serving.command import serving_command


@pytest.mark.parametrize(
    ("words", "gpus", "model"),
    [
        (["vllm", "serve", "org/m"], 1, "org/m"),
        (["/env/bin/vllm", "serve", "org/m", "-tp", "2", "--pipeline-parallel-size=3"], 6, "org/m"),
        (["vllm", "serve", "org/m", "--tensor_parallel_size", "4"], 4, "org/m"),
        (["vllm", "bench", "latency", "--model", "org/m"], 1, "org/m"),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=org/m"], 1, "org/m"),
    ],
)
def test_commands_of_vllm(words: list[str], gpus: int, model: str) -> None:
    found = serving_command(words)
    assert found is not None
    assert (found.gpus, found.model) == (gpus, model)


def test_a_server_listens_on_this_machine_alone() -> None:
    found = serving_command(["vllm", "serve", "m", "--host", "0.0.0.0", "--port", "80"])
    assert found is not None
    words = found.arguments()
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    assert words[3:5] == ["serve", "m"]
    assert words[-4:-1] == ["--host", "127.0.0.1", "--port"]  # the last ones count
    assert words[-1] != "80"


def test_scripts_that_import_vllm(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours.py", tmp_path / "other.py"
    ours.write_text("import torch\nfrom vllm import LLM\nLLM('m')\n")
    other.write_text("import torch  # no vllm\n")
    found = serving_command(["python", str(ours), "--batch", "1"])
    assert found is not None
    assert found.arguments() == [sys.executable, str(ours), "--batch", "1"]
    assert serving_command([str(other)]) is None
    assert serving_command(["train"], module=True) is None


def test_a_command_without_an_engine() -> None:
    with pytest.raises(UsageError, match="starts no engine"):
        serving_command(["vllm", "chat"])
