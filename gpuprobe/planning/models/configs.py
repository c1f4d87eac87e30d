"""The configuration of a model: by name, from a config.json, or from the Hugging Face cache."""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuprobe.errors import DataError, UsageError

TASKS: Final = ("causal", "masked", "sequences", "images", "speech")
"""What a script trains, by the data that a model reads: tokens of which each is predicted from
those before it, tokens of which some are hidden, pairs of sequences, images with a class, sound
with its text."""


class ModelConfig(NamedTuple):
    """A model: the fields of its config.json. ``source``: where they come from; ``parameters``:
    their published number, 0 if unknown.
    """

    name: str
    fields: Mapping[str, Any]
    source: str = ""
    parameters: int = 0
    parameters_source: str = ""

    @property
    def model_type(self) -> str:
        return str(self.fields["model_type"])

    @property
    def task(self) -> str:
        """One of `TASKS`. Raises UsageError for a model that needs several kinds of data."""
        return _task(self)


@functools.cache
def known_models() -> Mapping[str, ModelConfig]:
    """The models whose configuration is part of gpuprobe, by name."""
    text = resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8")
    rows = json.loads(text)["models"]
    return {
        row["name"]: ModelConfig(
            row["name"],
            row["config"],
            row["source"],
            row.get("parameters", 0),
            row.get("parameters_source", ""),
        )
        for row in rows
    }


def find_model(name: str) -> ModelConfig:
    """The model of a name: one of `known_models`, the path of a config.json or of its folder, or
    ``owner/name`` of a model in the local Hugging Face cache. Nothing is downloaded.

    Raises UsageError for an unknown name, DataError for a file that is not a configuration.
    """
    models = known_models()
    known = models.get(name.lower()) or models.get(name.lower().rpartition("/")[2])
    if not name:  # Path("") is the working folder
        raise UsageError("unknown model ''", hint=_near(name))
    path = Path(name)
    # os.path: a Path raises OSError for a name that is too long for a file.
    if os.path.isfile(path / "config.json"):  # noqa: PTH113
        return _read(path / "config.json", path.resolve().name)
    if os.path.isfile(path):  # noqa: PTH113
        return _read(path, path.resolve().parent.name if path.name == "config.json" else path.stem)
    if name.endswith(".json"):
        raise UsageError(f"no such file: {name}", hint="--model takes a name, or a config.json")
    owner, slash, short = name.partition("/")
    if slash and owner and short and "/" not in short:
        for cached in _cached(owner, short):
            return _read(cached, short)
    if known is not None:
        return known
    raise UsageError(f"unknown model {name!r}{_where(name)}", hint=_near(name))


def _where(name: str) -> str:
    return ": not in the Hugging Face cache, nor a folder with a config.json" if "/" in name else ""


def _near(name: str) -> str:
    names = list(known_models())
    short = name.lower().rpartition("/")[2]
    begin = [known for known in names if short and known.startswith(short)]
    near = [*begin, *difflib.get_close_matches(short, names, n=4, cutoff=0.5)]
    near = list(dict.fromkeys(near))[:4]
    if near:
        return f"did you mean {' or '.join(near)}? --model list prints all"
    return "--model list prints the names; a path of a config.json works for any model"


def _cached(owner: str, name: str) -> Iterator[Path]:
    """The config.json of a model in the local cache, the newest first. Its folders are described in
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    hub = Path(
        os.environ.get("HF_HUB_CACHE")
        or os.environ.get("HUGGINGFACE_HUB_CACHE")
        or Path(home, "hub")
    )
    folder = hub / f"models--{owner}--{name}"
    main = folder / "refs" / "main"
    if main.is_file():
        current = folder / "snapshots" / main.read_text(encoding="utf-8").strip() / "config.json"
        if current.is_file():
            yield current
    found = folder.glob("snapshots/*/config.json")
    yield from sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _read(path: Path, name: str) -> ModelConfig:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise DataError(
            f"{path} is not the config.json of a transformers model: it has no model_type",
            hint="a config.json as in the model's repository on Hugging Face",
        )
    if "quantization_config" in fields:
        raise UsageError(
            f"{path} describes a model that is quantized already",
            hint="use the config.json of the model that it was made from, and --method qlora",
        )
    return ModelConfig(name, fields, str(path))


_TASK_OF_CLASS: Final = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForImageClassification": "images",
}
_TASK_OF_TYPE: Final = {
    "bert": "masked",
    "roberta": "masked",
    "distilbert": "masked",
    "deberta-v2": "masked",
    "electra": "masked",
    "modernbert": "masked",
    "xlm-roberta": "masked",
    "t5": "sequences",
    "mt5": "sequences",
    "bart": "sequences",
    "vit": "images",
    "whisper": "speech",
}


def _task(model: ModelConfig) -> str:
    task = _TASK_OF_TYPE.get(model.model_type)
    if task:
        return task
    for name in model.fields.get("architectures") or ():
        for suffix, found in _TASK_OF_CLASS.items():
            if str(name).endswith(suffix):
                return found
        if str(name).endswith("ForConditionalGeneration"):
            raise UsageError(
                f"{model.name} reads images or sound as well as text ({name}), for which no script "
                "can be written",
                hint="estimate your own script: gpuprobe estimate train.py --gpu GPU",
            )
    return "causal"
