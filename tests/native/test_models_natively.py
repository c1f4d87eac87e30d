"""Scripts for models on the native engine: sizes of the classes, and the same bytes by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from native_commands import gpuprobe, python
from warm_python import WarmPython, modules_of_commands

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("models")]  # one process has the libraries

LIBRARIES = (
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.t5.modeling_t5",
)
"""What the scripts import, which takes as long as one of their runs; but for what queries CUDA as
it is imported, before there is a simulated GPU.
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    names = [name for name in LIBRARIES if find_spec(name.partition(".")[0]) is not None]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    base = tmp_path_factory.mktemp("libraries")
    made = WarmPython(base, [*modules_of_commands(), *names], environment)
    yield made
    made.close()


COUNT = """\
import json
import torch
import transformers

transformers.logging.set_verbosity_error()
from gpuprobe.planning.models.configs import known_models
from gpuprobe.planning.models.script import AUTO_CLASS

found = {}
for name, model in known_models().items():
    config = transformers.AutoConfig.for_model(**model.fields)
    with torch.device("meta"):
        built = getattr(transformers, AUTO_CLASS[model.task]).from_config(config)
    found[name] = [sum(each.numel() for each in built.parameters()), model.parameters]
print(json.dumps(found))
"""


def test_known_models_have_as_many_parameters_as_published(
    tmp_path: Path, libraries: WarmPython
) -> None:
    (tmp_path / "count.py").write_text(COUNT, encoding="utf-8")
    done = python("count.py", cwd=tmp_path, warm=libraries)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert len(found) >= 60
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


def peaks(*words: str, folder: Path, warm: WarmPython) -> dict[str, Any]:
    options = ["--gpu", "h100-80gb", "--json", *SHAPES]
    done = gpuprobe("estimate", *words, *options, cwd=folder, warm=warm)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    keys = ("peak_allocated", "reserved", "total", "steps", "by_category")
    return {key: document[key] for key in keys}


SHAPES = ("--compute", "shapes")
"""The figures are the same, and the values of a few steps would take several seconds."""

MODELS = [
    ["--model", "pythia-70m", "--optimizer", "adamw-fused"],
    ["--model", "pythia-70m", "--checkpointing", "--batch-size", "2"],
    ["--model", "t5-small", "--inference"],
    ["--model", "pythia-70m", "--method", "lora"],
    ["--model", "pythia-70m", "--method", "qlora"],
]


@pytest.mark.parametrize("options", MODELS, ids=" ".join)
def test_a_written_script_has_the_same_peak_by_hand(
    options: list[str], tmp_path: Path, libraries: WarmPython
) -> None:
    """Also after it moved: nothing depends on where the script is."""
    written = ["--sequence-length", "128", "--write-script", "train.py"]
    found = peaks(*options, *written, folder=tmp_path, warm=libraries)
    assert found["steps"] == (0 if "--inference" in options else 3)
    (tmp_path / "train.py").rename(tmp_path / "mine.py")
    assert peaks("mine.py", folder=tmp_path, warm=libraries) == found


def test_changes_that_make_a_model_fit_are_estimated(tmp_path: Path, libraries: WarmPython) -> None:
    words = ["--model", "pythia-70m", "--method", "lora", "--gpu", "t4", "--batch-size", "8"]
    options = ["--steps", "1", "--json", *SHAPES]
    done = gpuprobe("estimate", *words, *options, cwd=tmp_path, warm=libraries)
    assert done.returncode == 1, done.stderr
    tried = {change["name"] for change in json.loads(done.stdout)["suggestions"]}
    assert "activation checkpointing" in tried
    assert any("FSDP2" in name for name in tried)


CALL = """\
import json
import sys

from gpuprobe.agents.worker import call

arguments = {"model": "pythia-70m", "gpu": "h100-80gb", "sequence_length": 128, "batch_size": 2}
request = {"tool": "estimate_model", "arguments": arguments, "folders": [sys.argv[1]]}
print("\\n" + json.dumps(call({**request, "most": 1 << 20}, lambda text: None)))
"""


def test_a_tool_for_agents_gives_the_same_estimate(tmp_path: Path, libraries: WarmPython) -> None:
    done = python("-c", CALL, tmp_path, cwd=tmp_path, warm=libraries)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.rpartition("\n")[0].rpartition("\n")[2])["document"]
    options = ["--model", "pythia-70m", "--sequence-length", "128", "--batch-size", "2"]
    found = peaks(*options, folder=tmp_path, warm=libraries)
    assert {key: document[key] for key in found} == found


def test_a_larger_batch_is_an_option_of_the_script(tmp_path: Path, libraries: WarmPython) -> None:
    model = ["--model", "pythia-70m", "--sequence-length", "128"]
    found = peaks(*model, "--batch-size", "4", folder=tmp_path, warm=libraries)
    peaks(*model, "--write-script", "train.py", folder=tmp_path, warm=libraries)
    assert peaks("train.py", "--batch-size", "4", folder=tmp_path, warm=libraries) == found
