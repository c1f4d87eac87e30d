"""Measurements inside the processes of a vLLM that is started for an estimate.

vLLM calls `register` as a plugin of its group ``vllm.general_plugins``. vLLM's functions run
unchanged; after each stage a line of JSON is written to the process's file. The module is imported
in programs that gpuprobe starts, so it needs neither torch nor vLLM before they are loaded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

from gpuprobe.patching import when_imported

FOLDER: Final = "GPUPROBE_SERVING"
"""The environment variable that names the folder of an estimate, with `PLAN` and the events."""
PLAN: Final = "plan.json"
"""The file with the bytes that the native engine cannot know (`Overheads`)."""
EVENTS: Final = "*.events"
UP: Final = "up"
"""The last stage of an engine: weights, KV cache and CUDA graphs are allocated."""

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
_REAL_LOADERS: Final = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_MOST_TEXT: Final = 20_000
"""The most characters of a message that are written."""

Event = Mapping[str, Any]
"""A line of the file: its ``stage``, ``time``, ``pid``, ``rank``, and the values of the stage."""

Values = dict[str, object]
"""The values of a stage, which become JSON."""


class LoggedFigures(TypedDict, total=False):
    """Figures that only vLLM's log has: the KV cache in tokens, the most requests of full length at
    a time, and whether compiled code was cached ("warm" or "cold").
    """

    tokens: int
    concurrency: float
    compile_cache: str


_registered = False


def register() -> None:
    """Observe this process. vLLM may call it several times."""
    global _registered
    folder = os.environ.get(FOLDER)
    if folder is None or _registered:
        return
    _registered = True
    observer = _Observer(Path(folder))
    when_imported("vllm.engine.arg_utils", observer.arguments)
    when_imported("vllm.v1.worker.gpu_worker", observer.worker)
    when_imported("vllm.v1.engine.core", observer.engine)
    observer.listen()


class _Observer:
    """Wraps functions of vLLM and writes an event after each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}{EVENTS[1:]}"
        self._plan: dict[str, int] = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        self._rank = -1
        self._logged: LoggedFigures = {}

    def write(self, stage: str, **values: object) -> None:
        """Append an event. Fails silently: the folder is removed when the estimate is over."""
        event = {"stage": stage, "pid": os.getpid(), "rank": self._rank, "time": time.time()}
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**event, **values}) + "\n")
        except OSError:
            return

    def guarded(self, observe: Callable[[], None]) -> None:
        """Run an observation; an error in it is an event and does not end vLLM."""
        try:
            observe()
        except Exception as error:  # noqa: BLE001 - vLLM may have renamed anything
            self.write("not observed", error=f"{type(error).__name__}: {error}")

    # --- vLLM's log, for figures that are nowhere else

    def listen(self) -> None:
        """Parse the few lines of the log with figures that no object has."""
        handler = _Handler(self._logged)
        for name in ("vllm.v1.core.kv_cache_utils", "vllm.compilation"):
            logging.getLogger(name).addHandler(handler)

    # --- options

    def arguments(self) -> None:
        """Use dummy weights, and no tokenizer if the model has none: memory depends on neither."""
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_engine_config

        @functools.wraps(original)
        def create_engine_config(args: Any, *given: object, **named: object) -> object:
            self.guarded(lambda: self._without_files(args))
            return original(args, *given, **named)

        EngineArgs.create_engine_config = create_engine_config

    def _without_files(self, args: Any) -> None:
        given = str(args.load_format)
        if given in _REAL_LOADERS:
            args.load_format = "dummy"
        model = Path(str(args.tokenizer or args.model))
        missing = model.is_dir() and not any((model / name).exists() for name in _TOKENIZERS)
        if missing and not args.skip_tokenizer_init:
            args.skip_tokenizer_init = True
        weights = model.is_dir() and any(
            file.suffix in _WEIGHTS for file in Path(str(args.model)).iterdir()
        )
        self.write(
            "options",
            model=str(args.model),
            load_format=given,
            tokenizer=not args.skip_tokenizer_init,
            weights=weights,
        )

    # --- workers

    def worker(self) -> None:
        """Observe the stages of a worker, which has one process for each GPU."""
        import vllm.v1.worker.gpu_worker as module

        self._stage(module.Worker, "init_device", self._device)
        self._stage(module.Worker, "load_model", self._weights, before=self._before_load)
        self._stage(module.Worker, "determine_available_memory", self._profile)
        self._stage(module.Worker, "initialize_from_config", self._kv_cache)
        self._stage(module.Worker, "compile_or_warm_up_model", self._graphs)

    def _stage(
        self,
        owner: type,
        name: str,
        observe: Callable[..., Values],
        before: Callable[[Any], None] | None = None,
    ) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def stage(worker: object, *given: object, **named: object) -> object:
            self._rank = getattr(worker, "rank", -1)
            self.write(f"{name}: begins")
            if before is not None:
                self.guarded(lambda: before(worker))
            try:
                result = original(worker, *given, **named)
            except BaseException as error:
                self.failed(name, error)
                raise
            self.guarded(
                lambda: self.write(name, **_memory(), **observe(worker, result, *given, **named))
            )
            return result

        setattr(owner, name, stage)

    def failed(self, stage: str, error: BaseException) -> None:
        """Write an exception that vLLM raised in a stage, with the memory at that time."""
        frames = traceback.extract_tb(error.__traceback__)
        memory: dict[str, int] = {}
        self.guarded(lambda: memory.update(_memory()))
        self.write(
            f"{stage}: failed",
            error=type(error).__name__,
            message=str(error)[:_MOST_TEXT],
            places=[f"{frame.filename}:{frame.lineno}" for frame in frames[-12:]],
            **memory,
        )

    def _hold(self, more: int) -> None:
        """Allocate bytes on the GPU that torch does not know of."""
        from gpuprobe.native.process import loaded

        runtime = loaded()
        if runtime is not None and more > 0:
            import torch

            runtime.hold(torch.cuda.current_device(), more)

    def _device(self, worker: Any, _: object) -> Values:
        snapshot = worker.init_snapshot
        config = worker.parallel_config
        tensor = int(config.tensor_parallel_size)
        return {
            "total": int(snapshot.total_memory),
            "free": int(snapshot.free_memory),
            "requested": int(worker.requested_memory),
            "tensor_rank": worker.rank % tensor,
            "pipeline_rank": worker.rank // tensor,
            "data_rank": int(getattr(config, "data_parallel_rank", 0) or 0),
        }

    def _before_load(self, worker: Any) -> None:
        runner = worker.model_runner
        if hasattr(runner, "profile_run"):
            original = runner.profile_run

            def profile_run(*given: object, **named: object) -> object:
                with traced_peak() as found:
                    result = original(*given, **named)
                # The driver loads the code of kernels at their first use.
                self._hold(int(self._plan["first_use"]))
                self.guarded(
                    lambda: self.write(
                        "peak", bytes=found.bytes, rows=[row._asdict() for row in found.rows]
                    )
                )
                return result

            runner.profile_run = profile_run
        if hasattr(runner, "capture_model"):
            capture = runner.capture_model

            def capture_model(*given: object, **named: object) -> object:
                before = _memory()["graphs_made"]
                taken = capture(*given, **named)
                self.guarded(
                    lambda: self.write(
                        "graphs", bytes=int(taken), count=_memory()["graphs_made"] - before
                    )
                )
                return taken

            runner.capture_model = capture_model

    def _weights(self, worker: Any, *_: object, **__: object) -> Values:
        return {"weights": int(worker.model_runner.model_memory_usage)}

    def _profile(self, worker: object, available: int) -> Values:
        found: Values = {"available": int(available)}
        for name, attribute in (
            ("activation", "peak_activation_memory"),
            ("non_torch", "non_torch_memory"),
            ("graphs_estimated", "cudagraph_memory_estimate"),
        ):
            value = getattr(worker, attribute, None)
            found[name] = None if value is None else int(value)
        found["said"] = dict(self._logged)
        return found

    def _kv_cache(self, worker: object, _: object, config: Any) -> Values:
        return {
            "blocks": int(config.num_blocks),
            "kv_bytes": sum(int(tensor.size) for tensor in config.kv_cache_tensors),
            "groups": [
                {
                    "layers": len(group.layer_names),
                    "kind": type(group.kv_cache_spec).__name__,
                    "block_size": int(group.kv_cache_spec.block_size),
                }
                for group in config.kv_cache_groups
            ],
        }

    def _graphs(self, worker: Any, *_: object, **__: object) -> Values:
        return {"eager": bool(worker.model_config.enforce_eager)}

    # --- the engine

    def engine(self) -> None:
        """Observe the scheduler's process, which controls all workers."""
        from vllm.v1.engine.core import EngineCore

        caches = EngineCore._initialize_kv_caches

        @functools.wraps(caches)
        def initialize(core: object, config: object, *given: object, **named: object) -> object:
            self.write("engine: begins")
            try:
                result = caches(core, config, *given, **named)
            except BaseException as error:
                self.failed("engine", error)
                raise
            self.guarded(lambda: self.write("engine", **_engine(config, result, self._logged)))
            self.write(UP)
            return result

        EngineCore._initialize_kv_caches = initialize


class _Handler(logging.Handler):
    """Collects the figures of vLLM's log lines, by their templates."""

    def __init__(self, logged: LoggedFigures) -> None:
        super().__init__()
        self._logged = logged

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("GPU KV cache size:"):
            self._logged["tokens"] = int("".join(filter(str.isdecimal, text)))
        elif text.startswith("Maximum concurrency for"):
            self._logged["concurrency"] = float(text.rpartition(":")[2].strip().rstrip("x"))
        elif text.startswith("Directly load the compiled graph"):
            self._logged["compile_cache"] = "warm"
        elif text.startswith(("Compiling a graph", "Cache the graph")):
            self._logged.setdefault("compile_cache", "cold")


def _memory() -> dict[str, int]:
    """Memory of torch's allocator and of the device, in bytes; and numbers of CUDA graphs."""
    import torch

    from gpuprobe.native.process import loaded

    free, total = torch.cuda.mem_get_info()
    runtime = loaded()
    graphs, nodes = (0, 0) if runtime is None else runtime.graphs()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "in_use": total - free,
        "graphs_made": graphs,
        "graph_nodes": nodes,
    }


def _engine(config: Any, cache: Any, logged: LoggedFigures) -> Values:
    """The settings of an engine, with vLLM's names; and its KV cache in tokens."""
    sizes = [int(group.kv_cache_spec.block_size) for group in cache.kv_cache_groups]
    model, scheduler, parallel = (
        config.model_config,
        config.scheduler_config,
        config.parallel_config,
    )
    compilation = config.compilation_config
    return {
        "model": str(model.model),
        "architectures": [str(name) for name in model.architectures],
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "max_model_len": int(model.max_model_len),
        "enforce_eager": bool(model.enforce_eager),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "gpu_memory_utilization": float(config.cache_config.gpu_memory_utilization),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "tensor_parallel_size": int(parallel.tensor_parallel_size),
        "pipeline_parallel_size": int(parallel.pipeline_parallel_size),
        "data_parallel_size": int(parallel.data_parallel_size),
        "capture_sizes": len(compilation.cudagraph_capture_sizes or ()),
        "blocks": int(cache.num_blocks),
        "block_size": min(sizes, default=0),
        "groups": len(sizes),
        "tokens": logged.get("tokens"),
        "concurrency": logged.get("concurrency"),
        "compile_cache": logged.get("compile_cache"),
    }


_MOST_EVENTS: Final = 400_000
_MOST_ROWS: Final = 20
_NOT_THE_MODEL: Final = (
    f"{os.sep}torch{os.sep}",
    f"{os.sep}triton{os.sep}",
    f"{os.sep}gpuprobe{os.sep}",
    f"{os.sep}vllm{os.sep}compilation{os.sep}",
    f"{os.sep}vllm{os.sep}_custom_ops.py",
    f"{os.sep}functools.py",
    f"{os.sep}contextlib.py",
    "inductor",
    "torch_compile_cache",
    "<",
)


class HistoryFrame(TypedDict):
    """A frame of torch's memory history."""

    filename: str
    line: int
    name: str


class HistoryEvent(TypedDict, total=False):
    """An event of torch's memory history."""

    action: str
    addr: int
    size: int
    frames: Sequence[HistoryFrame]


class PeakRow(NamedTuple):
    """The bytes of all blocks that one line allocated."""

    place: str
    function: str
    bytes: int


@dataclass
class AllocationPeak:
    """The peak of allocated memory in bytes; and by line."""

    bytes: int = 0
    rows: list[PeakRow] = field(default_factory=list)


@contextlib.contextmanager
def traced_peak() -> Iterator[AllocationPeak]:
    """Trace the allocations of the block on the current device, and find their peak at its end."""
    import torch

    found = AllocationPeak()
    record = torch.cuda.memory._record_memory_history
    record("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)
    try:
        yield found
        device = torch.cuda.current_device()
        snapshot = torch.cuda.memory._snapshot(device)
        traces = snapshot["device_traces"]
        find_peak(traces[device if device < len(traces) else 0], found)
    finally:
        record(None)


def find_peak(events: Sequence[HistoryEvent], found: AllocationPeak) -> None:
    """Fill in ``found`` from the events of one device, in torch's format."""
    live = 0
    top, when = 0, -1
    sizes: dict[int, int] = {}
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            live += event["size"]
            if live > top:
                top, when = live, index
        elif event["action"] == "free_completed":
            live -= sizes.pop(event["addr"], 0)
    blocks: dict[int, HistoryEvent] = {}
    for event in events[: when + 1]:
        if event["action"] == "alloc":
            blocks[event["addr"]] = event
        elif event["action"] == "free_completed":
            blocks.pop(event["addr"], None)
    rows: dict[tuple[str, str], int] = {}
    for block in blocks.values():
        key = _line(block.get("frames", ()))
        rows[key] = rows.get(key, 0) + block["size"]
    ordered = sorted(rows.items(), key=lambda item: (-item[1], item[0]))
    found.bytes = top
    found.rows = [PeakRow(place, name, size) for (place, name), size in ordered[:_MOST_ROWS]]


def _line(frames: Sequence[HistoryFrame]) -> tuple[str, str]:
    """The location and function of the innermost frame outside torch and compiled code."""
    for frame in frames:
        file = frame["filename"]
        if not any(part in file for part in _NOT_THE_MODEL):
            return f"{file}:{frame['line']}", frame["name"]
    return ("", "") if not frames else (f"{frames[0]['filename']}:{frames[0]['line']}", "")
