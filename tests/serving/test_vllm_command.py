"""Which commands start a vLLM, and how they are run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuprobe.errors import UsageError
from gpuprobe.planning.commands import serving_command


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (["vllm", "serve", "org/m"], 1),
        (["/env/bin/vllm", "serve", "org/m", "-tp", "2", "--pipeline-parallel-size=3"], 6),
        (["vllm", "serve", "org/m", "--tensor_parallel_size", "4"], 4),
        (["vllm", "bench", "latency", "--model", "org/m"], 1),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model=org/m"], 1),
    ],
)
def test_commands_of_vllm(words: list[str], gpus: int) -> None:
    found = serving_command(words)
    assert found is not None
    assert found.gpus == gpus


def test_a_server_listens_on_this_machine_alone() -> None:
    found = serving_command(["vllm", "serve", "m", "--host", "0.0.0.0", "--port", "80"])
    assert found is not None
    words = found.arguments()
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    assert words[3:5] == ["serve", "m"]
    assert words[-4:-1] == ["--host", "127.0.0.1", "--port"]  # the last ones count
    assert words[-1] != "80"


@pytest.mark.parametrize(
    "text",
    [
        "from vllm import LLM\nLLM('m')\n",
        "from vllm import LLM as Model\nif __name__ == '__main__':\n    Model('m').generate('a')\n",
        "import vllm\nvllm.LLM(model='m')\n",
        "from vllm.engine.async_llm_engine import AsyncLLMEngine as A\nA.from_engine_args(1)\n",
        "import vllm.entrypoints.openai.api_server as s\ns.run_server(None)\n",
    ],
)
def test_scripts_that_make_an_engine(text: str, tmp_path: Path) -> None:
    script = tmp_path / "ours.py"
    script.write_text(text)
    found = serving_command(["python", str(script), "--batch", "1"])
    assert found is not None
    assert found.arguments() == [sys.executable, str(script), "--batch", "1"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch  # no vllm\n",
        "import vllm\nfrom trl import GRPOTrainer\nGRPOTrainer('m', use_vllm=True).train()\n",
        "from vllm import LLM, SamplingParams\nfor batch in data:\n    loss(LLM('m')).backward()\n",
        "from vllm import SamplingParams\nSamplingParams(n=2)\n",
        "class LLM: pass\nimport vllm\nLLM()\n",
        "from vllm import LLM\ndef f(:\n",
    ],
)
def test_scripts_that_make_no_engine(text: str, tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(text)
    assert serving_command(["python", str(script)]) is None
    assert serving_command(["train"], module=True) is None


def test_a_command_without_an_engine() -> None:
    with pytest.raises(UsageError, match="starts no engine"):
        serving_command(["vllm", "chat"])
