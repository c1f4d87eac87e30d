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
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from gpuprobe.patching import when_imported

if TYPE_CHECKING:
    from gpuprobe.native.process import Runtime

FOLDER: Final = "GPUPROBE_SERVING"
"""The environment variable that names the folder of an estimate, with `PLAN` and the events."""
PLAN: Final = "plan.json"
"""The file with the bytes that a simulated GPU cannot know (`Overheads`)."""
EVENTS: Final = "*.events"
UP: Final = "up"
"""The last stage of an engine: weights, KV cache and CUDA graphs are allocated."""

_REAL_LOADERS: Final = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json", "tekken.json")
"""Files of which a folder with a multimodal model has one (Mistral's has both in one)."""
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
    when_imported("vllm.model_executor.model_loader.weight_utils", observer.dummy_weights)
    when_imported("vllm.v1.worker.gpu_worker", observer.worker)
    when_imported("vllm.v1.engine.core", observer.engine)
    when_imported("flashinfer.sampling", observer.sampling_kernels)
    observer.listen()


class _Observer:
    """Wraps functions of vLLM and writes an event after each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}{EVENTS[1:]}"
        self._plan: dict[str, int] = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        self._rank = -1
        self._start = 0
        self.logged: LoggedFigures = {}

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
        """Parse the few lines of the log with figures that no object has. Filters stay when vLLM
        configures its loggers again, which takes their handlers away.
        """
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._logged)

    def _logged(self, record: logging.LogRecord) -> bool:
        self.guarded(lambda: _parse(record.getMessage(), self.logged))
        return True

    # --- options

    def arguments(self) -> None:
        """Use dummy weights, and no tokenizer if the model has none: memory depends on neither."""
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_engine_config

        @functools.wraps(original)
        def create_engine_config(args: Any, *given: object, **named: object) -> object:
            self.guarded(lambda: self._without_files(args))
            config: Any = original(args, *given, **named)
            self.guarded(lambda: self._processor_files(config.model_config))
            return config

        EngineArgs.create_engine_config = create_engine_config

    def _without_files(self, args: Any) -> None:
        given = str(args.load_format)
        if given in _REAL_LOADERS:
            args.load_format = "dummy"
        if _lacks(args.tokenizer or args.model, _TOKENIZERS):
            args.skip_tokenizer_init = True
        self.write("options", load_format=given, tokenizer=not args.skip_tokenizer_init)

    def _processor_files(self, model: Any) -> None:
        """Write which files of a multimodal model's processor its folder lacks."""
        if model.is_multimodal_model:
            places = ((model.model, _PROCESSORS), (model.tokenizer or model.model, _TOKENIZERS))
            missing = [names[0] for folder, names in places if _lacks(folder, names)]
            self.write("processor", missing=missing)

    def dummy_weights(self) -> None:
        """Leave dummy weights in host memory as they are, where vLLM makes those that it quantises
        itself: random values would take as much host memory as the unquantised model.
        """
        import vllm.model_executor.model_loader.weight_utils as module

        original = getattr(module, "initialize_single_dummy_weight", None)
        if original is None:  # another version
            return

        @functools.wraps(original)
        def initialize(parameter: Any, *given: object, **named: object) -> None:
            if parameter.device.type != "cpu":
                original(parameter, *given, **named)

        module.initialize_single_dummy_weight = initialize

    def sampling_kernels(self) -> None:
        """Leave FlashInfer's kernels for sampling uncompiled, which newer versions of vLLM use by
        default: FlashInfer compiles them at their first use, which needs nvcc and minutes. They
        compute nothing here, and allocate nothing: their callers in Python allocate all results.
        """
        import flashinfer.sampling as module

        module.gen_sampling_module = _NotCompiled

    # --- workers

    def worker(self) -> None:
        """Observe the stages of a worker, which has one process for each GPU."""
        import vllm.v1.worker.gpu_worker as module

        module.init_worker_distributed_environment = self._with_communicators(
            module.init_worker_distributed_environment
        )
        self._stage(module.Worker, "init_device", self._device)
        self._stage(module.Worker, "load_model", self._weights, before=self._before_load)
        self._stage(module.Worker, "determine_available_memory", self._profile)
        self._stage(module.Worker, "initialize_from_config", self._kv_cache)
        self._stage(module.Worker, "compile_or_warm_up_model", self._warm)

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
        """Write an exception that vLLM raised in a stage."""
        self.write(f"{stage}: failed", error=type(error).__name__, message=str(error)[:_MOST_TEXT])

    def _with_communicators(self, original: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(original)
        def initialize(config: Any, *given: object, **named: object) -> object:
            result = original(config, *given, **named)

            def hold() -> None:
                experts = self._plan["experts"] if config.model_config.is_moe else 0
                _hold_up_to(self._plan["start"] + experts)

            self.guarded(hold)
            return result

        return initialize

    def _device(self, worker: Any, _: object) -> Values:
        self._start = _outside()
        return {"requested": int(worker.requested_memory)}

    def _before_load(self, worker: Any) -> None:
        runner = worker.model_runner
        if hasattr(runner, "profile_run"):
            original = runner.profile_run

            def profile_run(*given: object, **named: object) -> object:
                with traced_peak(self.guarded) as found:
                    result = original(*given, **named)
                # The driver loads the code of kernels at their first use.
                self.guarded(lambda: _hold_up_to(self._start + self._plan["first_use"]))
                rows = [row._asdict() for row in found]
                self.guarded(lambda: self.write("peak", rows=rows))
                return result

            runner.profile_run = profile_run
        if hasattr(runner, "capture_model"):
            capture = runner.capture_model

            def capture_model(*given: object, **named: object) -> object:
                made: list[tuple[int, int]] = []
                self.guarded(lambda: made.append(_graphs()))
                taken: Any = capture(*given, **named)
                if made:
                    self.guarded(lambda: self._captured(taken, made[0]))
                return taken

            runner.capture_model = capture_model

    def _captured(self, taken: Any, before: tuple[int, int]) -> None:
        graphs, nodes = _graphs()
        self.write("graphs", bytes=int(taken), count=graphs - before[0], nodes=nodes - before[1])

    def _weights(self, worker: Any, *_: object, **__: object) -> Values:
        runner = worker.model_runner
        self.guarded(lambda: self.write("parameters", quantized=_quantized(runner.model)))
        return {"weights": int(runner.model_memory_usage)}

    def _profile(self, worker: object, _: object) -> Values:
        return {**_activation(worker), "said": dict(self.logged)}

    def _kv_cache(self, _: object, __: object, config: Any) -> Values:
        return {
            "blocks": int(config.num_blocks),
            "kv_bytes": sum(int(tensor.size) for tensor in config.kv_cache_tensors),
        }

    def _warm(self, *_: object, **__: object) -> Values:
        return {}

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
            self.guarded(lambda: self.write("engine", **_engine(config, result, self.logged)))
            self.write(UP)
            return result

        EngineCore._initialize_kv_caches = initialize


def _lacks(folder: object, names: Sequence[str]) -> bool:
    """Whether a folder has none of the files; False for a model's name, which is not a folder."""
    path = Path(str(folder))
    return path.is_dir() and not any((path / name).exists() for name in names)


class _NotCompiled:
    """A module of FlashInfer that is not compiled: its functions do nothing."""

    def build_and_load(self) -> _NotCompiled:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: None


_LOGGERS: Final = (
    "vllm.v1.core.kv_cache_utils",
    "vllm.compilation.backends",
    "vllm.compilation.decorators",
)
_TOKENS: Final = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY: Final = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")


def _parse(text: str, logged: LoggedFigures) -> None:
    """Add the figures of a line of vLLM's log. Newer versions have both figures of the KV cache in
    one line, and a prefix before the lines about compiled code.
    """
    tokens, concurrency = _TOKENS.search(text), _CONCURRENCY.search(text)
    if tokens:
        logged["tokens"] = int(tokens[1].replace(",", ""))
    if concurrency:
        logged["concurrency"] = float(concurrency[1])
    if "Directly load the compiled graph" in text or "Directly load AOT compilation" in text:
        logged["compile_cache"] = "warm"
    elif "Compiling a graph" in text or "Cache the graph" in text:
        logged.setdefault("compile_cache", "cold")


def _activation(worker: Any) -> Values:
    """The peak of the profiling run, and what vLLM sets aside for CUDA graphs, of which it captures
    a few beforehand. Some versions count that in their peak: it is what they have requested beyond
    the KV cache and what is in use.
    """
    peak = getattr(worker, "peak_activation_memory", None)
    if peak is None:
        return {"activation": None}
    graphs = int(getattr(worker, "cudagraph_memory_estimate", 0))
    if not graphs:
        return {"activation": int(peak)}
    import vllm.envs as envs

    if not envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
        return {"activation": int(peak)}
    in_use = getattr(worker, "total_consumed", None)
    if in_use is None:
        in_use = worker.model_runner.model_memory_usage + worker.non_torch_memory
    requested = int(worker.requested_memory) - int(worker.available_kv_cache_memory_bytes)
    return {"activation": requested - int(in_use) - graphs, "graphs": graphs}


def _memory() -> dict[str, int]:
    """Bytes that torch's allocator reserved, and all that are in use on the device."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"reserved": torch.cuda.memory_reserved(), "in_use": total - free}


def _quantized(model: Any) -> bool:
    """Whether any parameter is quantised: a float8, or integers, which may be packed 4-bit ones."""
    return any(
        not parameter.is_floating_point() or parameter.element_size() == 1
        for parameter in model.parameters()
    )


def _runtime() -> Runtime:
    from gpuprobe.native.process import loaded

    runtime = loaded()
    if runtime is None:
        raise RuntimeError("no simulated GPU is loaded")
    return runtime


def _graphs() -> tuple[int, int]:
    """CUDA graphs that were instantiated so far, and their nodes."""
    return _runtime().graphs()


def _outside() -> int:
    """Bytes in use on the device that are not of torch's allocator."""
    found = _memory()
    return found["in_use"] - found["reserved"]


def _hold_up_to(total: int) -> None:
    """Allocate bytes on the GPU that torch does not know of, until those are ``total``."""
    import torch

    _runtime().hold(torch.cuda.current_device(), max(total - _outside(), 0))


def _engine(config: Any, cache: Any, logged: LoggedFigures) -> Values:
    """The settings of an engine, with vLLM's names; and its KV cache in tokens."""
    sizes = [int(group.kv_cache_spec.block_size) for group in cache.kv_cache_groups]
    model, scheduler = config.model_config, config.scheduler_config
    return {
        "model": str(model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "max_model_len": int(model.max_model_len),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "gpu_memory_utilization": float(config.cache_config.gpu_memory_utilization),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "block_size": min(sizes, default=0),
        "tokens": logged.get("tokens"),
        "concurrency": logged.get("concurrency"),
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
_COMPILER: Final = f"{os.sep}torch{os.sep}_inductor{os.sep}graph.py"
"""The file of Inductor that lowers a graph and generates its code, but runs none."""


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
    """The bytes of all blocks that one line allocated; ``compiling``: while torch compiled."""

    place: str
    function: str
    bytes: int
    compiling: bool


@contextlib.contextmanager
def traced_peak(guarded: Callable[[Callable[[], None]], None]) -> Iterator[list[PeakRow]]:
    """Trace the allocations of the block on the current device; at its end, the rows of their peak
    are in the list. All that is done apart from the block runs ``guarded``.
    """
    found: list[PeakRow] = []
    guarded(_begin_trace)
    try:
        yield found
        guarded(lambda: found.extend(_traced()))
    finally:
        guarded(_end_trace)


def _begin_trace() -> None:
    import torch

    record = torch.cuda.memory._record_memory_history
    record("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS)


def _end_trace() -> None:
    import torch

    torch.cuda.memory._record_memory_history(None)


def _traced() -> list[PeakRow]:
    import torch

    device = torch.cuda.current_device()
    traces = torch.cuda.memory._snapshot(device)["device_traces"]
    return rows_at_peak(traces[device if device < len(traces) else 0])


def rows_at_peak(events: Sequence[HistoryEvent]) -> list[PeakRow]:
    """What is live at the peak of a device's events (in torch's format), by line, largest first."""
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
    rows: dict[tuple[str, str, bool], int] = {}
    for block in blocks.values():
        key = _line(block.get("frames", ()))
        rows[key] = rows.get(key, 0) + block["size"]
    ordered = sorted(rows.items(), key=lambda item: (-item[1], item[0]))
    return [PeakRow(*key[:2], size, key[2]) for key, size in ordered[:_MOST_ROWS]]


def _line(frames: Sequence[HistoryFrame]) -> tuple[str, str, bool]:
    """The location and function of the innermost frame outside torch and compiled code; that of
    torch's compiler, and True, for what it allocates itself, such as arguments of kernels whose
    times it compares.
    """
    for frame in frames:
        if frame["filename"].endswith(_COMPILER):
            return f"{frame['filename']}:{frame['line']}", frame["name"], True
    return *_outside_of_torch(frames), False


def _outside_of_torch(frames: Sequence[HistoryFrame]) -> tuple[str, str]:
    for frame in frames:
        file = frame["filename"]
        if not any(part in file for part in _NOT_THE_MODEL):
            return f"{file}:{frame['line']}", frame["name"]
    return ("", "") if not frames else (f"{frames[0]['filename']}:{frames[0]['line']}", "")
