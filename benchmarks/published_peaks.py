"""Peaks that others measured on GPUs, and ours of the same programs, without a GPU.

liger-kernel publishes a table of the memory of its kernels and of what they replace, with the
program of each row: ``benchmark/`` of its source distributions. Each program runs unchanged on a
virtual GPU of the row's kind, with ``compute="shapes"``, the sizes of the row and the package of
its version, or of the next release: what is measured between two releases names the earlier one.
Where a distribution has no programs yet, they are those of the next that has. Timing is replaced by
a few calls, since what it leaves allocated belongs to the peaks measured after it.

    pip download --no-deps --no-binary :all: --no-build-isolation -d sources liger-kernel==0.8.5
    python benchmarks/published_peaks.py sources [--kernels softmax,kl_div] [--again]

The versions that are needed are named where they are missing. Results are kept in
``benchmarks/published_peaks.json``; what is there is not run again.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import struct
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "published_peaks.json"
GPUS = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA B200": "b200-180gb",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
TABLE = "benchmark/data/all_benchmark_data.csv"
SCRIPTS = "benchmark/scripts"
_LIMIT_S = 900

BETWEEN_RELEASES = "measured with code between two releases, which none of them contains"
REASONS = {
    ("fused_linear_jsd", "triton"): f"{BETWEEN_RELEASES}: one gradient of the weights less",
    ("fused_linear_jsd", "torch"): "2 to 16 KiB of 10 to 56 GiB",
    ("fused_linear_orpo_loss", ""): "no release has a program that fits the package of that time",
    ("fused_linear_cpo_loss", ""): "4,072 to 4,088 MiB at every size, also of what compiles "
    "nothing: kept by the compiler (torch 2.5) in the speed benchmark before; ours is torch 2.13",
    ("fused_linear_simpo_loss", ""): "3,586 to 4,088 MiB at every size, also of what compiles "
    "nothing: kept by the compiler (torch 2.5) in the speed benchmark before; ours is torch 2.13",
    ("sparsemax", "triton"): BETWEEN_RELEASES,
    ("sparsemax", "torch"): "512 bytes",
    ("multi_token_attention", ""): "cuDNN's workspaces: inside the range that estimates give",
    ("sparse_multi_token_attention", "triton"): "cuDNN's workspaces: inside the range that "
    "estimates give but for the largest size, which is 9% above it",
    ("sparse_multi_token_attention", "torch"): "at the smallest size only: cuDNN's workspaces",
    ("jsd", "triton"): "at one size, of code between two releases",
    ("megatron_rms_norm", "torch"): f"{BETWEEN_RELEASES}: its rows of torch are those of Megatron",
    ("llama4_rope", ""): "its program fits no release of transformers that was tried (4.49, 5)",
    ("fused_moe", ""): "reads which experts tokens go to: shapes alone do not tell",
    ("relu_squared", ""): f"{BETWEEN_RELEASES}: no program has a table by N",
}
"""Why rows differ or cannot be run, by kernel and whose code it is ("": both)."""

Row = dict[str, Any]
Key = tuple[str, ...]


# -- the table


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def config_of(text: str) -> str:
    return json.dumps(json.loads(text or "null"), sort_keys=True)


def rows_of(table: Iterable[dict[str, str]]) -> list[Row]:
    """The rows of memory, of which the programs can be had."""
    found = []
    for row in table:
        if row["metric_name"] != "memory" or not row["y_value_50"]:
            continue
        found.append(
            {
                "kernel": row["kernel_name"],
                "provider": row["kernel_provider"],
                "mode": row["kernel_operation_mode"],
                "x_name": row["x_name"],
                "x": row["x_value"],
                "config": config_of(row["extra_benchmark_config_str"]),
                "gpu": row["gpu_name"],
                "version": row["liger_version"],
                "theirs": float(row["y_value_50"]),
            }
        )
    return found


def key_of(row: Row) -> Key:
    x = str(row["x"])
    with_number = re.fullmatch(r"[\d.]+", x) is not None
    return (row["provider"], row["mode"], f"{float(x):g}" if with_number else x, row["config"])


def same(ours: float, theirs: float) -> bool:
    """Equal to the table's rounding, which is that of a 32-bit number."""
    return _rounded(ours) == _rounded(theirs)


def _rounded(value: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


# -- the programs


def unpacked(sources: Path, into: Path) -> dict[tuple[int, ...], Path]:
    """The source distributions by version."""
    found = {}
    for archive in sources.glob("liger_kernel-*.tar.gz"):
        version = archive.name.removeprefix("liger_kernel-").removesuffix(".tar.gz")
        folder = into / f"liger_kernel-{version}"
        if not folder.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(into, filter="data")
        found[version_of(version)] = folder
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


def programs_of(
    folders: dict[tuple[int, ...], Path], kernel: str, version: str
) -> list[tuple[Path, Path]]:
    """The package's code and the program: of the row's version, where it has both; else of the
    next versions that have one.
    """
    later = [at for at in sorted(folders) if at >= version_of(version)]
    scripts = [(at, script_of(folders[at], kernel)) for at in later]
    found = [(at, script) for at, script in scripts if script is not None]
    if not found:
        return []
    at, script = found[0]
    exact = folders.get(version_of(version))
    pairs = [] if exact is None or exact == folders[at] else [(exact / "src", script)]
    return [*pairs, *((folders[at] / "src", script) for at, script in found[:2])]


def run_program(package: Path, script: Path, gpu: str, wanted: list[Row]) -> list[Row] | str:
    """Rows with ``ours``, or ``why`` they have none; or why there are no rows at all. Each program
    has a process of its own, forked off where all have imported the same.
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
    import torch._dynamo  # noqa: F401
    import triton.testing  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import gpuprobe.virtual.session  # noqa: F401


# -- within the worker


def work(package: Path, script: Path, gpu: str, wanted: list[Row], out: Path, log: Path) -> None:
    """Run one program with its calls of `run_benchmarks` replaced."""
    import runpy
    import time

    sys.path[:0] = [str(script.parent), str(package)]
    sys.argv = [str(script)]
    sys.stdout = sys.stderr = log.open("w")
    time.sleep = lambda seconds: None  # between runs, for a GPU to cool down

    import gpuprobe

    rows: list[Row] = []
    failed = ""
    with gpuprobe.virtual_gpu(gpu, compute="shapes") as session:
        import triton.testing

        most = _most(session.machine.devices[0])

        _import_package(package)
        triton.testing.do_bench = _called
        try:
            import utils

            utils.run_benchmarks = lambda **options: _measured(utils, rows, wanted, most, **options)
            runpy.run_path(str(script), run_name="__main__")
        except Exception as error:  # noqa: BLE001 - the reason of the rows that are missing
            failed = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if failed and not rows:
        print(failed, flush=True)
    else:
        out.write_text(json.dumps(rows))


def _import_package(folder: Path) -> None:
    """The package in this folder, whichever is installed, with what programs of later versions ask
    of it.
    """
    import types

    made: Any = types.ModuleType("liger_kernel")
    made.__path__ = [str(folder / "liger_kernel")]
    sys.modules["liger_kernel"] = made  # early versions have no __init__.py
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "liger-kernel" else version(name)
    try:
        import liger_kernel.utils  # noqa: F401
    except ImportError:
        sys.modules["liger_kernel.utils"] = made.utils = types.ModuleType("liger_kernel.utils")
    if not hasattr(made.utils, "infer_device"):
        made.utils.infer_device = lambda: "cuda"


def _most(device: Any) -> list[int]:
    """Bytes that are allocated with the most that workspaces can be which are known as a range,
    since the peak was reset.
    """
    import torch

    found: list[int] = []
    device.possible = lambda size, stream: found.append(device.sim.allocated + size)
    reset = torch.cuda.memory.reset_peak_memory_stats

    def reset_peak_memory_stats(*args: Any) -> None:
        found.clear()
        reset(*args)

    torch.cuda.memory.reset_peak_memory_stats = reset_peak_memory_stats
    return found


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


def _measured(
    utils: Any,
    rows: list[Row],
    wanted: list[Row],
    most: list[int],
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
    """``run_benchmarks``: the same calls in the same order, of the table's sizes. One that fails
    costs its own row.
    """
    table = [row for row in wanted if (row["kernel"], row["x_name"]) == (kernel_name, x_name)]
    if table:
        sizes = dict.fromkeys(row["x"] for row in table)
        x_values = [_number(x) for x in sizes] if _numbers(x_values) else x_values
        configs = dict.fromkeys(row["config"] for row in table)
        extra_benchmark_configs = [_with_types(json.loads(config)) for config in configs]
    for config in extra_benchmark_configs:
        for mode in kernel_operation_modes:
            for provider in kernel_providers:
                for x in x_values:
                    given = utils.SingleBenchmarkRunInput(
                        x=x,
                        kernel_provider=provider,
                        kernel_operation_mode=mode,
                        extra_benchmark_config=config,
                    )
                    row = {
                        "kernel": kernel_name,
                        "provider": provider,
                        "mode": mode or "",
                        "x": x,
                        "config": config_of(json.dumps(config, cls=utils.CustomEncoder)),
                    }
                    try:
                        row["ours"] = bench_test_fn(given).y_50
                        if most and max(most) > row["ours"] * 2**20:
                            row["most"] = max(most) / 2**20
                    except Exception as error:  # noqa: BLE001 - its row has the reason
                        line = str(error).strip().partition("\n")[0]
                        line = re.sub(r"(?<!\S)/\S*/", "", line)  # folders of this machine
                        row["why"] = f"{type(error).__name__}: {line}"
                    if metric_name == "memory":
                        rows.append(row)


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


# -- the comparison


def compare(theirs: list[Row], found: list[Row] | str) -> list[Row]:
    """The rows of one kernel, version and GPU with ``ours``, or ``why`` there is none."""
    if isinstance(found, str):
        return [{**row, "why": found} for row in theirs]
    ours = {(row["kernel"], *key_of(row)): row for row in found}
    compared = []
    for row in theirs:
        match = ours.get((row["kernel"], *key_of(row)))
        if match is None:
            why = {"why": "the program has no such row"}
        else:
            why = {name: match[name] for name in ("ours", "most", "why") if name in match}
        compared.append({**row, **why})
    return compared


def kind_of(row: Row) -> str:
    """Whose code is measured."""
    name = row["provider"]
    return "triton" if name.startswith("liger") else "torch"


def table_of(rows: list[Row]) -> list[str]:
    lines = [
        f"{'kernel':32} {'GPU':24} {'version':8} {'code':7} {'exact':>9} {'worst':>9}  "
        "not run [reason]"
    ]
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        key = (row["kernel"], row["gpu"].removeprefix("NVIDIA "), row["version"], kind_of(row))
        groups.setdefault(key, []).append(row)
    for (kernel, gpu, version, kind), members in groups.items():
        ran = [row for row in members if row.get("ours") is not None]
        exact = sum(same(row["ours"], row["theirs"]) for row in ran)
        off = [row["ours"] / row["theirs"] - 1 for row in ran]
        worst = f"{max(off, key=abs):+9.2%}" if off else " " * 9
        reasons = {row["why"] for row in members if row.get("ours") is None}
        text = f"{len(members) - len(ran)}: {'; '.join(sorted(reasons))[:90]}" if reasons else ""
        reason = REASONS.get((kernel, kind)) or REASONS.get((kernel, ""), "")
        if reason and exact < len(members):
            text = f"{text} [{reason}]".strip()
        lines.append(
            f"{kernel:32} {gpu:24} {version:8} {kind:7} {exact:4}/{len(ran):<4} {worst}  {text}"
        )
    for kind in ("triton", "torch"):
        of_kind = [row for row in rows if kind_of(row) == kind]
        ran = [row for row in of_kind if row.get("ours") is not None]
        exact = sum(same(row["ours"], row["theirs"]) for row in ran)
        near = sum(math.isclose(row["ours"], row["theirs"], rel_tol=0.01) for row in ran)
        ranges = [row for row in ran if "most" in row]
        within = sum(row["ours"] <= row["theirs"] <= row["most"] for row in ranges)
        if ran:
            lines.append(
                f"{kind}: {exact} of {len(ran)} rows equal to the table's rounding "
                f"({exact / len(ran):.1%}), {near} within 1%; {len(of_kind) - len(ran)} not run"
            )
        if ranges:
            lines.append(
                f"{kind}: {within} of the {len(ranges)} rows that are known as a range are in it"
            )
    return lines


def written(kept: dict[str, list[Row]]) -> str:
    """Results as JSON, a row in each line."""
    groups = []
    for name, rows in kept.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        groups.append(f" {json.dumps(name)}: [\n  {lines}\n ]")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, nargs="?", help="folder of source distributions")
    parser.add_argument("--kernels", help="only these, separated by commas")
    parser.add_argument("--again", action="store_true", help="run what has results, too")
    parser.add_argument("--work", type=Path, help="folder to unpack into")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    args = parser.parse_args()
    kept: dict[str, list[Row]] = {}
    if args.results.exists():
        kept = json.loads(args.results.read_text())
    if args.sources is not None:
        _run_all(args, kept)
    for line in table_of([row for rows in kept.values() for row in rows]):
        print(line)


def _exact(members: list[Row], found: list[Row] | str) -> int:
    """How many rows are equal. A row that was measured between two releases names the earlier one,
    and may be of the code of either.
    """
    rows = [row for row in compare(members, found) if row.get("ours") is not None]
    return sum(same(row["ours"], row["theirs"]) for row in rows)


def _is_slow(kernel: str, version: str, gpu: str) -> bool:
    """Programs that compile each of their rows with ``torch.compile`` come last."""
    return kernel == "embedding" or kernel.startswith(("distill_", "kto_", "fused_linear_grpo"))


def _run_all(args: argparse.Namespace, kept: dict[str, list[Row]]) -> None:
    into = args.work or args.sources / "unpacked"
    into.mkdir(parents=True, exist_ok=True)
    folders = unpacked(args.sources, into)
    if not folders:
        sys.exit(f"no source distributions of liger-kernel in {args.sources}: see --help")
    with (folders[max(folders)] / TABLE).open(encoding="utf-8", newline="") as file:
        rows = rows_of(csv.DictReader(file))
    import_common()
    jobs: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        jobs.setdefault((row["kernel"], row["version"], row["gpu"]), []).append(row)
    wanted = set(args.kernels.split(",")) if args.kernels else None
    for (kernel, version, gpu), members in sorted(jobs.items(), key=lambda job: _is_slow(*job[0])):
        name = f"{kernel} {version} {gpu}"
        if (wanted is not None and kernel not in wanted) or (name in kept and not args.again):
            continue
        found: list[Row] | str = "its program is in no source distribution"
        if gpu not in GPUS:
            found = f"{gpu} is not in the catalogue"
        else:
            for program in programs_of(folders, kernel, version):
                made = run_program(*program, GPUS[gpu], members)
                if _exact(members, made) > _exact(members, found) or isinstance(found, str):
                    found = made
                if _exact(members, found) == len(members):
                    break
        kept[name] = compare(members, found)
        print(f"{name}: done", file=sys.stderr, flush=True)
        args.results.write_text(written(kept))


if __name__ == "__main__":
    main()
