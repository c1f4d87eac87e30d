"""The models that gpuprobe knows, and those of files and of the Hugging Face cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpuprobe.errors import DataError, UsageError
from gpuprobe.planning.models.configs import TASKS, find_model, known_models
from gpuprobe.planning.models.run import ModelRun


def test_sixty_models_are_known_with_their_source() -> None:
    models = known_models()
    assert len(models) >= 60
    for name, model in models.items():
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)
        assert model.source
        assert model.parameters > 1_000_000
        assert model.task in TASKS
        assert ModelRun(model).tokens > 0
    assert sum(bool(model.parameters_source) for model in models.values()) >= 60
    assert models["llama-3.1-8b"].parameters == 8_030_261_248


def test_names_may_have_an_owner_and_capitals() -> None:
    assert find_model("meta-llama/Llama-3.1-8B").name == "llama-3.1-8b"
    assert find_model("GPT2") is known_models()["gpt2"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama-31-8b", "did you mean llama-3.1-8b"),
        ("mistral-7b", "did you mean mistral-7b-v0.1 or mistral-7b-v0.3"),
        ("zzz", "--model list prints the names"),
        ("missing/config.json", "--model takes a name, or a config.json"),
    ],
)
def test_an_unknown_name_has_near_matches(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_model(name)
    assert name in str(caught.value)
    assert hint in caught.value.hint


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}


def test_a_file_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for path in (folder, folder / "config.json"):
        model = find_model(str(path))
        assert (model.name, model.task, model.parameters) == ("my-model", "causal", 0)
        assert dict(model.fields) == CONFIG


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no model_type"),
        ('{"hidden_size": 4}', "no model_type"),
        ('{"model_type": 3}', "no model_type"),
    ],
)
def test_a_file_that_is_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        find_model(str(path))


def test_models_for_which_no_script_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "quantization_config": {}}), encoding="utf-8")
    with pytest.raises(UsageError, match="quantized already"):
        find_model(str(path))
    several = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    path.write_text(json.dumps(several), encoding="utf-8")
    with pytest.raises(UsageError, match="images or sound as well as text"):
        find_model(str(path)).task  # noqa: B018 - a property that raises


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_model_of_the_hugging_face_cache(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several snapshots the current one, and before a known model of the same name."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    hub = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    folder = hub / "models--someone--gpt2"
    for revision, size in (("abc", 8), ("def", 16)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        text = json.dumps({**CONFIG, "hidden_size": size})
        (folder / "snapshots" / revision / "config.json").write_text(text, encoding="utf-8")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc", encoding="utf-8")
    assert find_model("someone/gpt2").fields["hidden_size"] == 8
    (folder / "refs" / "main").unlink()
    assert find_model("someone/gpt2").fields["hidden_size"] in (8, 16)
    with pytest.raises(UsageError, match="not in the Hugging Face cache"):
        find_model("someone/else")
