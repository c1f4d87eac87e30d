"""The public start-up logs of vLLM, and the page about them."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import blocks
import numpy as np
import pytest
import serving_logs

FROZEN = "01f3d60d48f49078b8d926057da909fd2cbb288d87d4786222d891837b8f24f0"
"""Of the figures and configurations, before any of them was run."""
FROZEN_OTHER = "9d40889249bf98c586a54f8ff4866f28d66b993fcea9e7b4062914cc96ca4d67"
"""Of the start-ups from other sources, likewise."""
FROZEN_NEWER = "f31f7be7b9343f01ca46ae3019c31af98ba44da7f96536ab9e8e559875276182"
"""Of the start-ups of newer versions, likewise."""
FROZEN_MULTIMODAL = {
    "google/gemma-3-4b-it": ("f4c8dc80a26bc68ed64e871d8c23f918f90abedb9508585f6e80e25f881ddcb5"),
    "google/gemma-3-12b-it": ("1a8345313e82da6530e1b810c00a93f6209937e34a5e6cfee6882c275714a9ad"),
    "google/gemma-3-27b-it": ("cff486a296bee8949515521eb3b4cc352c4f172c995c7041f8cf27b710f0c1d1"),
    "ibm-granite/granite-vision-3.3-2b": (
        "50af0158090a0f90571da1e3c769fe19ef58ad9cf25037ca08b8ec42a56c13b4"
    ),
    "RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-quantized.w8a8": (
        "001709718acdd614d44be5e61507e638746edc08f2c9d146e6d84c8cb0630df9"
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        "36deef4c32635fa606a919a7229f727a8ea8b1ccf0946441e02ec1348e8e8c1c"
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        "c8b377e2e9dc332de155cf6ebaa43d501adb6707e562cc9d0197fd73d983f200"
    ),
    "moonshotai/Kimi-VL-A3B-Instruct": (
        "47e03093640f4175399f8f55d159d9298ab67d46274f5cae21d313694cbc8d38"
    ),
}
"""Of each multimodal model's configurations and tokenizer, before its first run."""


def test_figures_and_configurations_are_those_that_were_frozen() -> None:
    assert serving_logs.frozen_digest() == FROZEN
    digests = {
        model: serving_logs.multimodal_digest(model) for model in serving_logs.multimodal_models()
    }
    assert digests == FROZEN_MULTIMODAL


def test_start_ups_from_other_sources_are_those_that_were_frozen() -> None:
    data = json.dumps(serving_logs.other(), sort_keys=True).encode()
    assert hashlib.sha256(data).hexdigest() == FROZEN_OTHER
    known = {*serving_logs.models(), *serving_logs.other()["models"]}
    logs = serving_logs.other()["logs"]
    assert len({serving_logs.other_name(log) for log in logs}) == len(logs) >= 20
    for log in logs:
        assert log["model"] in known
        assert log["source"]
        assert all(log[figure] is not None for figure in log["compared"])


def test_start_ups_of_newer_versions_are_those_that_were_frozen() -> None:
    found = serving_logs.newer()
    data = json.dumps(found, sort_keys=True).encode()
    assert hashlib.sha256(data).hexdigest() == FROZEN_NEWER
    known = {*serving_logs.models(), *found["models"]}
    for log in found["logs"]:
        assert log["model"] in known
        assert all(log[figure] is not None for figure in log["compared"])


def test_the_page_has_the_results() -> None:
    page = (blocks.DOCS / "verification" / "serving.md").read_text(encoding="utf-8")
    assert serving_logs.page() in page


def test_results_belong_to_logs_and_hold_the_stated_errors() -> None:
    names = {serving_logs.name(log) for log in serving_logs.logs()}
    assert set(json.loads(serving_logs.RESULTS.read_text())) <= names
    held_out = [row for row in serving_logs.compared() if row["held_out"]]
    assert held_out
    for figure, most in (("weights", 0.25), ("activation", 1.0), ("tokens", 1.0)):
        errors = [abs(row[figure]) for row in held_out if row[figure] is not None]
        assert sum(errors) / len(errors) < most


def test_the_options_are_those_of_a_log() -> None:
    log = {
        "model": "org/m", "tp": 2, "pp": 1, "max_model_len": 8, "dtype": "float16",
        "quantization": None, "kv_cache_dtype": "fp8", "utilization": 0.95,
    }  # fmt: skip
    assert serving_logs.name(log) == (
        "org/m --max-model-len 8 --no-enable-prefix-caching --gpu-memory-utilization 0.95 "
        "--dtype float16 --kv-cache-dtype fp8 --tensor-parallel-size 2"
    )
    assert serving_logs.why_not(log)


def test_a_model_is_written_with_a_tokenizer_of_its_special_tokens(tmp_path: Path) -> None:
    """One word beyond the special tokens has an id, and all ids below the size are taken."""
    model = {
        "config": {"model_type": "m"},
        "files": {"preprocessor_config.json": {"size": 8}},
        "tokenizer": {
            "size": 5,
            "special": {"<image>": 4, "<unk>": 0},
            "words": {"\n": 2},
            "config": {"unk_token": "<unk>", "image_token": "<image>"},
        },
    }
    serving_logs.write_model(tmp_path / "model", model)
    written = {
        file.name: json.loads(file.read_text(encoding="utf-8"))
        for file in (tmp_path / "model").iterdir()
    }
    assert written["config.json"] == {"model_type": "m"}
    assert written["preprocessor_config.json"] == {"size": 8}
    assert written["tokenizer_config.json"]["image_token"] == "<image>"
    tokenizer = written["tokenizer.json"]
    assert {token["content"]: token["id"] for token in tokenizer["added_tokens"]} == {
        "<image>": 4,
        "<unk>": 0,
    }
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(5))
    assert (vocabulary["<unk>"], vocabulary["\n"], vocabulary["<image>"]) == (0, 2, 4)


def test_a_model_in_mistrals_format_has_a_vocabulary_and_a_file_of_no_weights(
    tmp_path: Path,
) -> None:
    sizes = {"default_vocab_size": 400, "default_num_special_tokens": 100}
    serving_logs.write_model(
        tmp_path, {"config": {}, "tekken": {"config": sizes, "multimodal": {"max_image_size": 8}}}
    )
    tekken = json.loads((tmp_path / "tekken.json").read_text(encoding="utf-8"))
    assert tekken["multimodal"] == {"max_image_size": 8}
    words = [base64.b64decode(word["token_bytes"]) for word in tekken["vocab"]]
    assert [word["rank"] for word in tekken["vocab"]] == list(range(300))
    assert words[:256] == [bytes([byte]) for byte in range(256)]
    assert len(set(words)) == 300
    weights = (tmp_path / "consolidated.safetensors").read_bytes()
    size = int.from_bytes(weights[:8], "little")
    assert len(weights) == 8 + size
    (tensor,) = json.loads(weights[8:]).values()
    assert tensor["data_offsets"] == [0, 0]


def test_the_code_of_a_model_is_in_its_folder(tmp_path: Path) -> None:
    serving_logs.write_model(tmp_path, serving_logs.models()["moonshotai/Kimi-VL-A3B-Instruct"])
    module = (tmp_path / "processing_kimi_vl.py").read_text(encoding="utf-8")
    config = json.loads((tmp_path / "preprocessor_config.json").read_text(encoding="utf-8"))
    for name in config["auto_map"].values():
        assert f"class {name.rpartition('.')[2]}(" in module


class _Image:
    """A white image with the part of Pillow's interface that the processor uses."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size

    def resize(self, size: tuple[int, int]) -> _Image:
        return _Image(size)

    def convert(self, mode: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert mode == "RGB"
        width, height = self.size
        return np.full((height, width, 3), 255, np.uint8)


@pytest.mark.parametrize(("size", "rows", "columns"), [((1024, 1024), 66, 66), ((60, 28), 2, 6)])
def test_the_shapes_of_kimi_vls_inputs(size: tuple[int, int], rows: int, columns: int) -> None:
    """The numbers of patches that vLLM's ``get_num_image_tokens`` implies; what is added to whole
    groups of patches is grey.
    """
    pytest.importorskip("transformers")
    import serving_kimi_vl

    processor = serving_kimi_vl.KimiVLImageProcessor(14, [2, 2], 4096)
    found = processor.preprocess([_Image(size), _Image(size)])
    assert found["image_grid_hws"].tolist() == [[rows, columns]] * 2
    patches = found["pixel_values"]
    assert tuple(patches.shape) == (2 * rows * columns, 3, 14, 14)
    assert patches[0].unique().tolist() == [1.0]
    assert patches[columns - 1].unique().tolist() == [0.0]
