"""The GPU catalogue: what is in it, how it is asked, and files that users write."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.catalogue import gpus as catalogue
from gpuprobe.catalogue.file import NUMBERS, all_models, key_of, load_user_catalogue
from gpuprobe.catalogue.gpu_model import GpuModel, cublas_workspace
from gpuprobe.catalogue.gpus import _maker_of, find, parse_spec
from gpuprobe.errors import ConfigError, DriverUnavailable
from gpuprobe.model.values import Unavailable
from gpuprobe.step_time.speeds import all_speeds

MIB = 1 << 20
BUILT_IN = {model.name: model for model in all_models()}


@pytest.fixture(autouse=True)
def no_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(catalogue.ENVIRONMENT, raising=False)


@pytest.mark.parametrize("model", BUILT_IN.values(), ids=list(BUILT_IN))
def test_every_entry_makes_sense(model: GpuModel) -> None:
    assert model.total_memory > 4 << 30
    low, high = model.context
    assert 40 * MIB < low <= high < 1100 * MIB
    assert high < model.total_memory / 10
    assert model.multi_processor_count in range(20, 200)
    assert model.resident_threads == (
        model.multi_processor_count * model.max_threads_per_multi_processor
    )
    assert model.shared_memory_per_block <= model.shared_memory_per_block_optin
    assert model.shared_memory_per_block_optin <= model.shared_memory_per_multiprocessor
    seen = [*model.total_memory_seen, model.total_memory]
    assert max(seen) - min(seen) < 0.03 * model.total_memory
    assert find(model.name) is model
    assert find(model.title) is model
    for alias in model.aliases:
        assert find(alias) is model


@pytest.mark.parametrize("model", BUILT_IN.values(), ids=list(BUILT_IN))
def test_every_figure_has_a_source(model: GpuModel) -> None:
    for name in (*NUMBERS, "capability", "context"):
        value = getattr(model, name)
        if isinstance(value, Unavailable):
            assert value.reason
            assert name not in model.sources
        else:
            assert model.sources[name].strip()


def test_the_models_asked_for_are_there() -> None:
    asked = "v100-16gb v100-32gb t4 l4 rtx3090 rtx4090 rtx5090 a10 a100-40gb a100-80gb h100-80gb"
    asked += " h100-pcie h100-nvl h200 b200 l40 l40s a6000 a4500 a4000 p100 gh200"
    for name in f"{asked} rtx-4000-ada rtx-2000-ada".split(" "):
        assert find(name).total_memory


def test_known_figures() -> None:
    h100 = find("h100")
    assert h100.title == "NVIDIA H100 80GB HBM3"
    assert (h100.capability, h100.multi_processor_count) == ((9, 0), 132)
    assert find("t4").max_threads_per_multi_processor == 1024
    b300 = find("NVIDIA B300 SXM6 PC")
    assert b300 is find("b300")
    assert (b300.capability, b300.multi_processor_count) == ((10, 3), 148)
    assert f"{b300.total_memory / 2**30:.2f}" == "267.69"
    assert (find("H100 NVL").total_memory, find("h100-nvl").multi_processor_count) == (
        99_961_274_368,
        132,
    )


def test_every_gpu_has_speeds() -> None:
    """But a laptop's, whose power the maker of the machine sets."""
    assert set(BUILT_IN) - set(all_speeds()) == {"rtx4060-laptop"}
    assert set(all_speeds()) < set(BUILT_IN)


@pytest.mark.parametrize(
    ("capability", "torch", "size"),
    [
        ((9, 0), (2, 6), 32 * MIB),
        ((8, 9), (2, 13), 8_519_680),
        ((10, 0), (2, 10), 8_519_680),
        ((10, 0), (2, 13), 32 * MIB),
        ((12, 0), (2, 6), 8_519_680),
        ((12, 0), (2, 13), 32 * MIB),
        ((11, 0), (2, 13), 8_519_680),
        ((11, 0), (2, 14), 32 * MIB),
        ((9, 1), (2, 11), 8_519_680),
        ((9, 1), (2, 12), 32 * MIB),
    ],
)
def test_cublas_workspace(capability: tuple[int, int], torch: tuple[int, int], size: int) -> None:
    assert cublas_workspace(capability, torch) == size


# -- names


@pytest.mark.parametrize(
    "name",
    ["RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "geforce_rtx_4090", " Rtx-4090 "],
)
def test_spelling_does_not_matter(name: str) -> None:
    assert find(name).name == "rtx4090"


def test_an_unknown_name_names_the_near_ones() -> None:
    with pytest.raises(ConfigError, match="unknown GPU 'h10-80gb'") as caught:
        find("h10-80gb")
    assert "h100-80gb" in caught.value.hint
    with pytest.raises(ConfigError, match="unknown GPU") as caught:
        find("t5")
    assert "did you mean t4?" in caught.value.hint
    with pytest.raises(ConfigError, match="unknown GPU") as caught:
        find("zzzzzz")
    assert "--gpu list" in caught.value.hint
    for counted in ("t4:4", "T4 x4", "t4*4"):
        with pytest.raises(ConfigError, match="unknown GPU") as caught:
            find(counted)
        assert "written 4xt4;" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        find("gtx1080ti")
    assert "did you mean rtx2080ti" in caught.value.hint
    assert "4060" not in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        find("\x1b[31mh100")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("mi300x", "AMD"),
        ("Radeon RX 7900 XTX", "AMD"),
        ("gaudi3", "Intel"),
        ("tpu-v5e", "Google"),
        ("m3 max", "Apple"),
        ("trn1", "Amazon"),
    ],
)
def test_an_accelerator_of_another_maker_is_named_as_such(name: str, maker: str) -> None:
    with pytest.raises(ConfigError, match=f"is made by {maker}, not by NVIDIA") as caught:
        find(name)
    assert "did you mean" not in caught.value.hint
    assert not any(_maker_of(key_of(model.name)) for model in all_models())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h100-80gb", ["h100-80gb"]),
        ("2xa100-40gb", ["a100-40gb"] * 2),
        ("2 x A100-40GB", ["a100-40gb"] * 2),
        ("2*t4, L4", ["t4", "t4", "l4"]),
        ("8×h100", ["h100-80gb"] * 8),
    ],
)
def test_specs(text: str, names: list[str]) -> None:
    assert [model.name for model in parse_spec(text)] == names


@pytest.mark.parametrize("text", ["", ",", "h100,", "0xh100", "65xh100", "40xt4,40xl4", "2x"])
def test_bad_specs(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_spec(text)


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(sorted(BUILT_IN))), min_size=1))
def test_specs_add_up(parts: list[tuple[int, str]]) -> None:
    text = ",".join(f"{count}x{name}" for count, name in parts)
    wanted = [name for count, name in parts for _ in range(count)]
    if len(wanted) > catalogue.MAX_DEVICES:
        with pytest.raises(ConfigError):
            parse_spec(text)
    else:
        assert [model.name for model in parse_spec(text)] == wanted


@given(st.text(max_size=30))
def test_any_text_is_found_or_refused(text: str) -> None:
    if key_of(text) == "present":
        return
    try:
        models = parse_spec(text)
    except ConfigError:
        return
    assert models


# -- files of users


def catalogue_file(tmp_path: Path, *gpus: Any, version: Any = 1) -> Path:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"schema_version": version, "gpus": list(gpus)}))
    return path


H20 = {
    "name": "h20",
    "title": "NVIDIA H20",
    "like": "h200-141gb",
    "total_memory": 102_000_000_000,
    "multi_processor_count": 78,
    "aliases": ["h20-96gb"],
}
NEW = {
    "name": "new",
    "title": "NVIDIA New",
    "capability": "9.0",
    "multi_processor_count": 10,
    "total_memory": 1 << 34,
}


def test_a_user_adds_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = catalogue_file(tmp_path, H20, {**H20, "name": "h20b", "like": "h20"})
    monkeypatch.setenv(catalogue.ENVIRONMENT, str(path))
    found = find("H20 96GB")
    assert (found.name, found.total_memory) == ("h20", 102_000_000_000)
    assert found.L2_cache_size == find("h200").L2_cache_size
    assert str(path) in found.sources["total_memory"]
    assert found.sources["L2_cache_size"].startswith("as h200-141gb:")
    assert find("h20b").total_memory == 102_000_000_000
    assert find("h100").name == "h100-80gb"


def test_a_user_replaces_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = catalogue_file(tmp_path, {"name": "t4", "like": "t4", "context": [10, 20]})
    monkeypatch.setenv(catalogue.ENVIRONMENT, str(path))
    assert find("t4").context == (10, 20)
    assert find("Tesla T4").context == (10, 20)
    assert len(all_models()) == len(BUILT_IN)


def test_a_whole_entry(tmp_path: Path) -> None:
    (model,) = load_user_catalogue(catalogue_file(tmp_path, NEW))
    assert model.max_threads_per_multi_processor == 2048
    assert "Programming Guide" not in model.sources["total_memory"]
    low, high = model.context
    assert 0 < low < high < find("h100").context_high
    assert "no record" in model.sources["context"]
    assert "Programming Guide" in model.sources["warp_size"]
    assert isinstance(model.clock_rate, Unavailable)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (7, "expected an object, found 7"),
        ({}, "'name' is missing"),
        ({"name": "A B"}, "name: expected a name of a-z"),
        ({"name": "present", "like": "t4"}, "cannot be 'present'"),
        ({**H20, "like": "nothing"}, "unknown GPU"),
        ({**H20, "like": " "}, "like: expected a non-empty string"),
        ({**H20, "capability": "8.0"}, "differs"),
        ({**H20, "memory": 3}, "unknown key 'memory'"),
        (
            {**H20, "total_memory": 0},
            "total_memory: expected a whole number from 1 to 4611686018427387903, found 0",
        ),
        (
            {**H20, "total_memory": True},
            "total_memory: expected a whole number from 1 to 4611686018427387903, found True",
        ),
        ({**H20, "total_memory": "80 GB"}, "from 1 to 4611686018427387903, found '80 GB'"),
        ({**H20, "total_memory": 1 << 70}, "total_memory: expected a whole number from 1"),
        ({**H20, "context": [2, 1]}, "context: expected [low, high] in bytes"),
        ({**H20, "context": [0, 1]}, "context[0]: expected a whole number from 1"),
        ({**H20, "context": 5}, "context: expected a list"),
        ({**H20, "aliases": "nvl"}, "aliases: expected a list, found 'nvl'"),
        ({**H20, "aliases": [1]}, "aliases[0]: expected text, found 1"),
        ({**H20, "sources": []}, "sources: expected an object"),
        ({**H20, "total_memory_seen": {"much": "x"}}, "much"),
        ({"name": "new"}, "has no 'title'"),
        ({**NEW, "capability": 9.0}, "capability: expected text, found 9.0"),
        ({**NEW, "capability": "9"}, 'capability: expected a value like "9.0"'),
        ({**NEW, "capability": "13.0"}, "unknown capability"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, entry: Any, said: str) -> None:
    path = catalogue_file(tmp_path, NEW, entry)
    with pytest.raises(ConfigError) as caught:
        load_user_catalogue(path)
    assert str(caught.value).startswith(f"{path}, GPU 2: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00", '{"schema_version": 1}'])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"gpus\.json"):
        load_user_catalogue(path)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_user_catalogue(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_user_catalogue(tmp_path)
    path = tmp_path / "latin.json"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_user_catalogue(path)
    with pytest.raises(ConfigError, match="schema_version"):
        load_user_catalogue(catalogue_file(tmp_path, NEW, version=2))


# -- this machine's GPU


def properties(**changes: Any) -> SimpleNamespace:
    """What torch 2.8 and later reports of an H200."""
    found = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "total_memory": 150_110_011_392,
        "multi_processor_count": 132,
        "max_threads_per_multi_processor": 2048,
        "warp_size": 32,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
        "L2_cache_size": 62914560,
        "clock_rate": 1980000,
        "is_integrated": 0,
        "uuid": "x",
    }
    return SimpleNamespace(**{**found, **changes})


def test_the_present_gpu_is_measured() -> None:
    model = catalogue.from_properties(properties())
    assert (model.name, model.total_memory) == ("present", 150_110_011_392)
    assert model.capability == (9, 0)
    assert model.clock_rate == 1980000
    assert model.context == find("h200").context
    assert "this machine" in model.sources["total_memory"]
    assert "this machine" not in model.sources["context"]


def test_a_present_gpu_that_nobody_knows() -> None:
    older = properties(name="NVIDIA New", major=13)
    del older.clock_rate
    model = catalogue.from_properties(older)
    assert isinstance(model.clock_rate, Unavailable)
    assert "no record" in model.sources["context"]
    assert model.context_high > model.context_low > 0


def test_without_a_gpu_there_is_none_present() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DriverUnavailable, match="torch sees no CUDA device"):
        find("present")
