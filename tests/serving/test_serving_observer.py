"""The observer inside a process of vLLM: classes with vLLM's names and attributes, and faults."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpuprobe.planning.serving import launch, observer


class _Torch(ModuleType):
    """torch.cuda, as far as the observer uses it, whose ``broken`` functions raise."""

    def __init__(self, broken: str) -> None:
        super().__init__("torch")
        self.in_use = 40

        def call(name: str, value: object) -> Any:
            def function(*_: object, **__: object) -> object:
                if name == broken:
                    raise RuntimeError(f"no {name}")
                return value

            return function

        frames = [{"filename": "/m/model.py", "line": 3, "name": "forward"}]
        trace = [[{"action": "alloc", "addr": 1, "size": 8, "frames": frames}]]
        self.cuda = SimpleNamespace(
            current_device=call("current_device", 0),
            mem_get_info=lambda: call("mem_get_info", (100 - self.in_use, 100))(),
            memory_reserved=call("memory_reserved", 30),
            memory=SimpleNamespace(
                _record_memory_history=call("_record_memory_history", None),
                _snapshot=call("_snapshot", {"device_traces": trace}),
            ),
        )


class _Weight:
    def __init__(self, size: int, floating: bool) -> None:
        self.size, self.floating = size, floating

    def element_size(self) -> int:
        return self.size

    def is_floating_point(self) -> bool:
        return self.floating


class _Runner:
    model_memory_usage = 20
    model = SimpleNamespace(parameters=lambda: [_Weight(2, True)])

    def profile_run(self) -> str:
        return "profiled"

    def capture_model(self) -> int:
        return 5


class _Worker:
    def __init__(self) -> None:
        self.model_runner = _Runner()
        self.rank = 0
        self.requested_memory = 95
        self.peak_activation_memory = 4

    def init_device(self) -> None:
        experts = SimpleNamespace(is_moe=True)
        config = SimpleNamespace(model_config=experts)
        sys.modules["vllm.v1.worker.gpu_worker"].init_worker_distributed_environment(config)

    def load_model(self) -> None: ...

    def determine_available_memory(self) -> int:
        assert self.model_runner.profile_run() == "profiled"
        return 50

    def initialize_from_config(self, config: object) -> None: ...

    def compile_or_warm_up_model(self) -> int:
        return self.model_runner.capture_model()


class _Runtime:
    def __init__(self, torch: _Torch) -> None:
        self.torch = torch
        self.held = 0

    def hold(self, _: int, more: int) -> None:
        self.held += more
        self.torch.in_use += more

    def graphs(self) -> tuple[int, int]:
        return (2, 7)


def _serve(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> dict[str, Any]:
    """The events of a start, by stage; and what the observer held."""
    module = ModuleType("vllm.v1.worker.gpu_worker")
    worker = type("Worker", (_Worker,), dict(vars(_Worker)))
    module.Worker = worker  # type: ignore[attr-defined]
    module.init_worker_distributed_environment = lambda config: None  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["vllm.v1.worker"].gpu_worker = module  # type: ignore[attr-defined]
    torch = _Torch(broken)
    monkeypatch.setitem(sys.modules, "torch", torch)
    runtime = _Runtime(torch)

    def found() -> _Runtime:
        if broken == "runtime":
            raise RuntimeError("no runtime")
        return runtime

    monkeypatch.setattr(observer, "_runtime", found)
    launch.prepare(folder, {"start": 12, "experts": 1, "first_use": 6}, {})
    observer._Observer(folder).worker()
    started = worker()
    started.init_device()
    started.load_model()
    assert started.determine_available_memory() == 50
    pools = SimpleNamespace(num_blocks=3, kv_cache_tensors=[SimpleNamespace(size=9)])
    started.initialize_from_config(pools)
    assert started.compile_or_warm_up_model() == 5
    events = launch.all_events(folder)
    return {"held": runtime.held, **{event["stage"]: event for event in events}}


def test_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _serve(tmp_path, monkeypatch)
    assert "not observed" not in found
    assert found["init_device"]["requested"] == 95
    assert found["load_model"]["weights"] == 20
    assert found["parameters"]["quantized"] is False
    assert found["determine_available_memory"]["activation"] == 4
    # 13 outside of torch's allocator after the communicators, 6 more after the profiling run
    assert found["init_device"]["in_use"] - found["init_device"]["reserved"] == 13
    profiled = found["determine_available_memory"]
    assert profiled["in_use"] - profiled["reserved"] == 19
    assert found["initialize_from_config"]["kv_bytes"] == 9
    assert found["graphs"]["bytes"] == 5
    assert found["graphs"]["count"] == 0
    assert [row["place"] for row in found["peak"]["rows"]] == ["/m/model.py:3"]
    assert found["held"] == 3 + 6


@pytest.mark.parametrize(
    "broken",
    [
        "_record_memory_history",
        "_snapshot",
        "current_device",
        "mem_get_info",
        "memory_reserved",
        "runtime",
    ],
)
def test_a_fault_is_reported_and_changes_nothing(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _serve(tmp_path, monkeypatch, broken)
    assert f"no {broken}" in found["not observed"]["error"]


@pytest.mark.parametrize(
    ("size", "floating", "quantized"), [(2, True, False), (1, True, True), (4, False, True)]
)
def test_weights_that_are_quantised(size: int, floating: bool, quantized: bool) -> None:
    weights = [_Weight(2, True), _Weight(size, floating)]
    model = SimpleNamespace(parameters=lambda: weights)
    assert observer._quantized(model) is quantized


def test_dummy_weights_are_random_on_the_gpu_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = []
    module = ModuleType("vllm.model_executor.model_loader.weight_utils")
    for parent in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["vllm.model_executor.model_loader"].weight_utils = module  # type: ignore[attr-defined]
    launch.prepare(tmp_path, {}, {})
    observer._Observer(tmp_path).dummy_weights()  # a version that has no such function
    module.initialize_single_dummy_weight = filled.append  # type: ignore[attr-defined]
    observer._Observer(tmp_path).dummy_weights()
    weights = [SimpleNamespace(device=SimpleNamespace(type=kind)) for kind in ("cpu", "cuda")]
    for weight in weights:
        module.initialize_single_dummy_weight(weight)
    assert filled == [weights[1]]


def test_a_model_of_the_hub_with_a_tokenizer_in_a_folder(tmp_path: Path) -> None:
    args = SimpleNamespace(
        load_format="auto",
        model="org/model",
        tokenizer=str(tmp_path),
        skip_tokenizer_init=False,
    )
    (tmp_path / "tokenizer.json").touch()
    launch.prepare(tmp_path, {"first_use": 0}, {})
    observer._Observer(tmp_path)._without_files(args)
    (event,) = launch.all_events(tmp_path)
    assert (event["stage"], event["tokenizer"]) == ("options", True)
    assert args.load_format == "dummy"
    (tmp_path / "tokenizer.json").unlink()
    observer._Observer(tmp_path)._without_files(args)
    assert args.skip_tokenizer_init


@pytest.mark.parametrize(
    ("lines", "logged"),
    [
        (
            [
                "GPU KV cache size: 1,024 tokens",
                "Maximum concurrency for 8 tokens per request: 3.5x",
            ],
            {"tokens": 1024, "concurrency": 3.5},
        ),
        (
            [
                "GPU KV cache size: 460,496 tokens, Maximum concurrency for 131,072 tokens per "
                "request: 3.51x"
            ],
            {"tokens": 460_496, "concurrency": 3.51},
        ),
        (
            ["GPU KV cache size: 1,024 tokens", "Maximum concurrency for 8: unknown"],
            {"tokens": 1024},
        ),
        (["Cache the graph of compile range (1, 8) for later use"], {"compile_cache": "cold"}),
        (
            ["[backbone] Directly load the compiled graph(s) for compile range (1, 8)"],
            {"compile_cache": "warm"},
        ),
        (["[backbone] Directly load AOT compilation from path /c"], {"compile_cache": "warm"}),
    ],
    ids=["0.19", "0.31", "changed", "cold", "with a prefix", "compiled ahead of time"],
)
def test_lines_of_the_log(lines: list[str], logged: dict[str, object]) -> None:
    found: observer.LoggedFigures = {}
    for line in lines:
        observer._parse(line, found)
    assert found == logged


def test_files_that_the_processor_of_a_multimodal_model_lacks(tmp_path: Path) -> None:
    model = SimpleNamespace(model=str(tmp_path), tokenizer=str(tmp_path), is_multimodal_model=True)
    launch.prepare(tmp_path, {"first_use": 0}, {})
    ours = observer._Observer(tmp_path)

    def missing() -> list[str]:
        ours._processor_files(model)
        found: list[str] = launch.all_events(tmp_path)[-1]["missing"]
        return found

    assert missing() == ["preprocessor_config.json", "tokenizer.json"]
    (tmp_path / "processor_config.json").touch()
    assert missing() == ["tokenizer.json"]
    model.tokenizer = "org/model"
    assert missing() == []
    model.tokenizer, model.is_multimodal_model = str(tmp_path), False
    ours._processor_files(model)
    assert len(launch.all_events(tmp_path)) == 3


def test_the_log_is_read_after_vllm_configured_its_loggers_again(tmp_path: Path) -> None:
    """`dictConfig` takes the handlers of loggers below those that it names."""
    launch.prepare(tmp_path, {}, {})
    ours = observer._Observer(tmp_path)
    logger = logging.getLogger("vllm.v1.core.kv_cache_utils")
    ours.listen()
    try:
        settings = {"handlers": [], "level": "INFO", "propagate": False}
        config = {"version": 1, "disable_existing_loggers": False, "loggers": {"vllm": settings}}
        logging.config.dictConfig(config)
        logger.info("GPU KV cache size: %s tokens", "1,024")
        assert ours.logged == {"tokens": 1024}
    finally:
        for name in observer._LOGGERS:
            logging.getLogger(name).removeFilter(ours._logged)


@pytest.mark.parametrize(
    ("version", "named", "found"),
    [
        ("before CUDA graphs were measured", {"peak_activation_memory": 9}, {"activation": 9}),
        (
            "not set aside",
            {"peak_activation_memory": 9, "cudagraph_memory_estimate": 2, "applied": False},
            {"activation": 9},
        ),
        (
            "0.19, if its environment says so",
            {
                "peak_activation_memory": 9,
                "cudagraph_memory_estimate": 2,
                "non_torch_memory": 4,
                "model_runner": SimpleNamespace(model_memory_usage=20),
                "available_kv_cache_memory_bytes": 100 - 20 - 4 - 9 - 2,
            },
            {"activation": 9, "graphs": 2},
        ),
        (
            "0.33, in the peak",
            {
                "peak_activation_memory": 9 + 2,
                "cudagraph_memory_estimate": 2,
                "total_consumed": 24,
                "available_kv_cache_memory_bytes": 100 - 24 - 9 - 2,
            },
            {"activation": 9, "graphs": 2},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_peak_is_without_what_is_set_aside_for_cuda_graphs(
    version: str, named: dict[str, Any], found: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = ModuleType("vllm.envs")
    named = dict(named)
    applied = named.pop("applied", True)
    envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS = applied  # type: ignore[attr-defined]
    vllm = ModuleType("vllm")
    vllm.envs = envs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    assert observer._activation(SimpleNamespace(requested_memory=100, **named)) == found


def test_sampling_kernels_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's callers allocate the results that its kernels write."""
    module = ModuleType("flashinfer.sampling")
    parent = ModuleType("flashinfer")
    parent.sampling = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", parent)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    launch.prepare(tmp_path, {}, {})
    observer._Observer(tmp_path).sampling_kernels()
    found = module.gen_sampling_module().build_and_load()
    assert found.top_k_mask_logits([1.0], maybe_k=None) is None
    assert not hasattr(found, "__wrapped__")


def test_what_the_program_imports_comes_before_the_folder_of_gpuprobe(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": "/theirs"}
    launch.prepare(tmp_path, {"first_use": 0}, environment)
    parts = environment["PYTHONPATH"].split(os.pathsep)
    package = str(Path(launch.__file__).parents[3])
    assert parts == [str(tmp_path / "plugin"), "/theirs", package]
    assert json.loads((tmp_path / observer.PLAN).read_text()) == {"first_use": 0}
