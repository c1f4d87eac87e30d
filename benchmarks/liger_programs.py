"""liger-kernel's benchmark programs on a simulated GPU, for ``published_peaks.py``."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import absent_compilers

TABLE = "benchmark/data/all_benchmark_data.csv"
SCRIPTS = "benchmark/scripts"
_LIMIT_S = 1800

ROUTED = ("fused_moe",)
"""Kernels whose sizes depend on random numbers: all values are computed for them."""
UNPROBED = ("fused_linear_selected_log_probs",)
"""Kernels whose program fails where it finds out which sizes fit: their rows were measured by
another one, with its functions, in the order of the table's timestamps."""

Row = dict[str, Any]
Version = tuple[int, ...]


def version_of(text: str) -> Version:
    """``0.5.8``, or ``0.5.8.dev20250428050809``, a nightly distribution of what came after it."""
    return tuple(int(part) for part in text.replace("dev", "").split("."))


def config_of(text: str) -> str:
    return json.dumps(json.loads(text or "null"), sort_keys=True)


def kernel_of(rows: list[Row]) -> str:
    """The kernel of all these rows."""
    name: str = rows[0]["kernel"]
    return name


def options_of(row: Row) -> tuple[str, ...]:
    """What the program was called with that measured a row: one run has rows of equal options."""
    if row["kernel"] == "fused_moe" and row["x_name"] == "E":
        return ("--sweep-dim", "num_experts")
    if row["kernel"] != "fused_linear_selected_log_probs":
        return ()
    config = json.loads(row["config"])
    native = "fallback" if "B300" in row["gpu"] else "cutedsl-sm90"
    first = ("torch",) if measured_by_size(row) else ()
    given = {
        "--selected-tokens": config["selected_tokens"],
        "--selection-mode": "native" if measured_by_size(row) else config["selection_mode"],
        "--temperature": config["temperature"],
        "--hidden": config["hidden_size"],
        "--vocab": config["vocab_size"],
    }
    options = [str(part) for option in given.items() for part in option]
    entropy = ["--return-entropy"] if config["return_entropy"] else []
    providers = ["--providers", *first, "cutile", native]
    return (*options, *entropy, *providers, "--tokens", "4096", "16384")


def measured_by_size(row: Row) -> bool:
    """Whether times and memory were measured in turn, for each size, configuration and mode, and
    not all times before: the table's timestamps of selected log probabilities show it, but for
    those of ``identity``, which come first, in a separate process.
    """
    return row["kernel"] in UNPROBED and json.loads(row["config"])["selection_mode"] != "identity"


# -- the programs


def unpacked(sources: Path, into: Path) -> dict[Version, Path]:
    """The source distributions by version, releases and nightly ones."""
    found = {}
    for archive in sources.glob("liger_kernel*-*.tar.gz"):
        name = archive.name.removesuffix(".tar.gz")
        folder = into / name
        if not folder.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(into, filter="data")
        found[version_of(name.partition("-")[2])] = folder
    return found


def script_of(folder: Path, kernel: str) -> Path | None:
    """The program that measures a kernel."""
    named = re.compile(rf"""kernel_name"?\s*[:=]\s*["']{kernel}["']""")
    for file in sorted((folder / SCRIPTS).glob("benchmark_*.py")):
        if named.search(file.read_text(encoding="utf-8")):
            return file
    # Programs of two kernels make the name of an option.
    starts = kernel.removesuffix("_token").removesuffix("_sequence")
    for name in {kernel.partition("_")[2], starts.removeprefix("fused_linear_"), "tiled_mlp"}:
        file = folder / SCRIPTS / f"benchmark_{name}.py"
        if file.exists() and kernel.split("_")[0] in file.read_text(encoding="utf-8"):
            return file
    return None


def first_with(folders: dict[Version, Path], row: Row) -> list[Version]:
    """The first distributions that may have the code of a row: of those that have a table, the
    first whose table has the row; else the first two nightly ones after it was measured.
    """
    stamp = re.sub(r"\D", "", row["measured"])
    line = re.compile(rf"^{row['kernel']},.*{re.escape(row['measured'])}", re.MULTILINE)
    after = []
    for version in sorted(folders, key=lambda version: (version[:3], version[3:])):
        table = folders[version] / TABLE
        if table.exists() and line.search(table.read_text(encoding="utf-8")):
            return [*after[:2], version]
        if not table.exists() and len(version) == 4 and version[3] > int(stamp):
            after.append(version)
    return after[:2]


def programs_of(folders: dict[Version, Path], row: Row) -> list[tuple[Path, Path]]:
    """The package's code and the program: of the distribution that first has the row, of the
    next that has a program, of the row's version, or of the next two releases. Where a
    distribution has no program, it is that of the next that has.
    """
    kernel = row["kernel"]
    later = [at for at in sorted(folders) if at >= version_of(row["version"])]
    scripts = {at: script for at in later if (script := script_of(folders[at], kernel))}
    pairs = []
    for at in first_with(folders, row):
        of_then = [later for later in scripts if later >= at][:1]
        pairs += [(folders[at] / "src", scripts[next_one]) for next_one in of_then]
        pairs += [(folders[next_one] / "src", scripts[next_one]) for next_one in of_then]
    found = [(at, script) for at, script in scripts.items() if len(at) == 3]
    if found:
        at, script = found[0]
        exact = folders.get(version_of(row["version"]))
        pairs += [(exact / "src", script)] if exact and exact != folders[at] else []
        pairs += [(folders[at] / "src", script) for at, script in found[:2]]
    return list(dict.fromkeys(pairs))


def run_program(package: Path, script: Path, gpu: str, wanted: list[Row]) -> list[Row] | str:
    """Rows with ``ours``, or ``why`` they have none; or why there are no rows at all. Each program
    runs in a separate process, forked where all have imported the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "rows.json", Path(folder) / "log"
        child = multiprocessing.get_context("fork").Process(
            target=work, args=(package, script, gpu, wanted, out, log)
        )
        child.start()
        child.join(_LIMIT_S)
        if child.is_alive():
            child.kill()
            child.join()
            return f"more than {_LIMIT_S} s"
        if out.exists():
            found: list[Row] = json.loads(out.read_text())
            return found
        lines = log.read_text().strip().splitlines() if log.exists() else []
        return lines[-1] if lines else f"exit code {child.exitcode}"


def import_common() -> None:
    """What every program imports."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from gpuprobe.native.process import preload

    preload()
    import torch._dynamo  # noqa: F401
    import triton.testing  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import gpuprobe.native.session  # noqa: F401


# -- within the worker


def work(
    package: Path,
    script: Path,
    gpu: str,
    wanted: list[Row],
    out: Path,
    log: Path,
) -> None:
    """Run one program with its calls of `run_benchmarks` replaced."""
    import runpy
    import time

    import torch

    sys.path[:0] = [str(script.parent), str(package)]
    kernel = kernel_of(wanted)
    sys.argv = [str(script), *options_of(wanted[0])]
    sys.stdout = sys.stderr = log.open("w")
    time.sleep = lambda seconds: None  # between runs, for a GPU to cool down

    import gpuprobe

    rows: list[Row] = []
    failed = ""
    with gpuprobe.virtual_gpu(gpu, compute="real" if kernel in ROUTED else "shapes"):
        import triton.testing

        _import_package(package)
        absent_compilers.install()
        triton.testing.do_bench = _called
        _tune()
        try:
            import utils

            utils.run_benchmarks = _Measuring(utils, rows, wanted)
            utils.update_benchmark_data_csv = lambda **given: rows.extend(_written(**given))
            torch.multiprocessing.spawn = _spawned
            if kernel in UNPROBED:
                import benchmark_model_configs

                benchmark_model_configs.estimate_kernel_peak_memory = lambda probe_fn: 2**30
            runpy.run_path(str(script), run_name="__main__")
        except Exception as error:  # noqa: BLE001 - the reason of the rows that are missing
            failed = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if failed and not rows:
        print(failed, flush=True)
    else:
        version = ".".join(torch.__version__.split(".")[:2])
        out.write_text(json.dumps([{**row, "torch": version} for row in rows]))


def _import_package(folder: Path) -> None:
    """The package in this folder, whichever is installed, with what programs of later versions
    require.
    """
    import types

    made: Any = types.ModuleType("liger_kernel")
    made.__path__ = [str(folder / "liger_kernel")]
    made.__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None, is_package=True)
    sys.modules["liger_kernel"] = made  # early versions have no __init__.py
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "liger-kernel" else version(name)
    try:
        import liger_kernel.utils  # noqa: F401
    except ImportError:
        sys.modules["liger_kernel.utils"] = made.utils = types.ModuleType("liger_kernel.utils")
    if not hasattr(made.utils, "infer_device"):
        made.utils.infer_device = lambda: "cuda"


def _called(fn: Any, *args: Any, grad_to_none: Any = None, quantiles: Any = None, **kw: Any) -> Any:
    """``triton.testing.do_bench`` for memory's sake: a cache is flushed between the calls."""
    import torch

    fn()
    cache = torch.empty(256 * 2**20 // 4, dtype=torch.int, device="cuda")
    for tensor in grad_to_none or ():
        tensor.grad = None
    cache.zero_()
    fn()
    return [0.0] * len(quantiles) if quantiles else 0.0


def _tune() -> None:
    """Kernels that are tuned, in their first call with a key, flush a cache, too."""
    import torch
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run
    tuned: set[tuple[Any, ...]] = set()

    def tuned_run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        values = [given[name] for name in tuner.keys if name in given]
        dtypes = [value.dtype for value in given.values() if hasattr(value, "dtype")]
        key = (id(tuner), *map(str, (*values, *dtypes)))
        if key not in tuned and len(tuner.configs) > 1:
            tuned.add(key)
            torch.empty(256 * 2**20 // 4, dtype=torch.int, device="cuda")
        return run(tuner, *args, **kwargs)

    Autotuner.run = tuned_run


class _Measuring:
    """``run_benchmarks``: the same calls in the same order, of the table's sizes. One that fails
    costs its own row.
    """

    def __init__(self, utils: Any, rows: list[Row], wanted: list[Row]) -> None:
        self.utils, self.rows, self.wanted = utils, rows, wanted
        self.speed: Any = None
        """What measures times, where those of each size come just before its memory."""

    def __call__(
        self,
        *,
        bench_test_fn: Any,
        kernel_name: str,
        metric_name: str,
        x_name: str,
        x_values: Any,
        kernel_providers: Any,
        kernel_operation_modes: Any = (None,),
        extra_benchmark_configs: Any = None,
        **rest: Any,
    ) -> None:
        of_kernel = [row for row in self.wanted if row["kernel"] == kernel_name]
        table = [row for row in of_kernel if row["x_name"] == x_name or kernel_name in UNPROBED]
        if table:
            sizes = dict.fromkeys(row["x"] for row in table)
            x_values = [_number(x) for x in sizes] if _numbers(x_values) else x_values
            configs = dict.fromkeys(row["config"] for row in table)
            extra_benchmark_configs = [_with_types(json.loads(config)) for config in configs]
        modes = itertools.product(extra_benchmark_configs, kernel_operation_modes)
        if not (table and measured_by_size(table[0])):
            for config, mode in modes:
                self.start(kernel_name)
                for provider, x in itertools.product(kernel_providers, x_values):
                    self.call(bench_test_fn, kernel_name, metric_name, x, provider, mode, config)
        elif metric_name == "speed":
            self.speed = bench_test_fn
        else:
            for x, (config, mode) in itertools.product(x_values, list(modes)):
                self.start(kernel_name)
                for name, measure in (("speed", self.speed), (metric_name, bench_test_fn)):
                    for provider in kernel_providers:
                        self.call(measure, kernel_name, name, x, provider, mode, config)

    def start(self, kernel: str) -> None:
        """What is done before each configuration and mode."""
        if kernel in UNPROBED:  # the figures of a B300 show it, those of an H100 are the same
            import torch

            torch.cuda.empty_cache()

    def call(
        self, measure: Any, kernel: str, metric: str, x: Any, provider: str, mode: Any, config: Any
    ) -> None:
        given = self.utils.SingleBenchmarkRunInput(
            x=x,
            kernel_provider=provider,
            kernel_operation_mode=mode,
            extra_benchmark_config=config,
        )
        row = {
            "kernel": kernel,
            "provider": provider,
            "mode": mode or "",
            "x": x,
            "config": config_of(json.dumps(config, cls=self.utils.CustomEncoder)),
        }
        try:
            row["ours"] = measure(given).y_50
        except Exception as error:  # noqa: BLE001 - its row has the reason
            line = str(error).strip().partition("\n")[0]
            line = re.sub(r"(?<!\S)/\S*/", "", line)  # folders of this machine
            row["why"] = f"{type(error).__name__}: {line}"
        if metric == "memory":
            self.rows.append(row)


def _spawned(fn: Any, args: Any = (), nprocs: int = 1, **rest: Any) -> None:
    """``torch.multiprocessing.spawn`` of one rank, here, with fewer calls to be timed. What one
    provider lacks costs its own rows.
    """
    if nprocs != 1:
        raise NotImplementedError(f"{nprocs} ranks")
    found = fn.__globals__
    found.update(dict.fromkeys(("_WARMUP_ITERS", "_MEASURE_ITERS"), 2))
    found.update({name: _or_nothing(found[name]) for name in found if name.startswith("_bench_")})
    fn(0, *args)


def _or_nothing(measured: Any) -> Any:
    def run(*args: Any) -> Any:
        try:
            return measured(*args)
        except TypeError:  # another version of Megatron has fewer arguments
            return (math.nan,) * 3

    return run


def _written(benchmark_data_list: Any, **rest: Any) -> list[Row]:
    """What programs without `run_benchmarks` write into the table."""
    return [
        {
            "kernel": data.kernel_name,
            "provider": data.kernel_provider,
            "mode": data.kernel_operation_mode or "",
            "x": x,
            "config": config_of(data.extra_benchmark_config_str),
            **({"why": "no release has its arguments"} if math.isnan(y) else {"ours": y}),
        }
        for data in benchmark_data_list
        if data.metric_name == "memory"
        for x, y in zip(data.x_values, data.y_values_50, strict=True)
    ]


def _numbers(values: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


def _with_types(config: Any) -> Any:
    import torch

    if not isinstance(config, dict):
        return config
    return {
        name: getattr(torch, value[6:]) if str(value).startswith("torch.") else value
        for name, value in config.items()
    }
