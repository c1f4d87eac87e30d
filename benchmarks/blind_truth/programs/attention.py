"""Attention of four solutions of the assignment "systems" of CS336, each by its own benchmark."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import sys

import torch
from figures import figure, source, without_versions


def damek() -> None:
    folder = source("damek+cs336-assignment2-systems", "cs336-basics", ".")
    sys.modules["cs336_basics.models"] = importlib.import_module("cs336_basics.model")
    scripts = folder / "cs336_systems" / "benchmarking_scripts"
    os.chdir(scripts)
    found = runpy.run_path(str(scripts / "attention_benchmarking_script.py"), run_name="__main__")
    for row in found["rows"]:
        how = "compiled" if row["compile"] else "eager"
        key = f"{how} d{row['d_model']} s{row['seq_len']}"
        for name in ("mem_before_backward", "forward_peak", "backward_peak"):
            if row.get(f"{name}_MiB") is not None:
                figure(f"{key} {name}", row[f"{name}_MiB"] * 2**20)


def yyin(how: str) -> None:
    folder = source("yyin-dev+cs336-a2", ".")
    sys.argv = ["benchmark_attention.py", *(["--compile"] if how == "compiled" else [])]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(folder / "benchmark" / "benchmark_attention.py"), run_name="__main__")
    pattern = r"d_model: (\d+), seq_len: (\d+) ==\n.*\nCUDA memory usage after forward: ([\d.]+)MB"
    for width, length, size in re.findall(pattern, printed.getvalue()):
        figure(f"{how} d{width} s{length} after_forward", float(size) * 2**20)


def mark(how: str) -> None:
    source("MarkMrLi+assignment2-systems", "cs336-basics", ".")
    module = importlib.import_module("cs336_systems.benchmark_attention")
    compiled = how == "compiled"
    if compiled:
        whole = torch.compile(module.scaled_dot_product_attention, dynamic=True)
        module.scaled_dot_product_attention = whole
    words = argparse.Namespace(d_model="all", seq_len="all", enable_compile=compiled)
    for config in module.build_config(words):
        torch.cuda.empty_cache()
        result = module.run_benchmark(config)
        key = f"{how} d{config.d_model} s{config.seq_len}"
        if result.status != "success":
            print(key, result.status, file=sys.stderr)
            continue
        figure(f"{key} mem_max", float(result.peak_memory_mean) * 2**20)
        figure(f"{key} add_mem", float(result.add_memory_mean) * 2**20)


def gao(how: str) -> None:
    folder = source("GAOYUEtianc+Stanford-CS336-assignments") / "assignment2-systems"
    spec = importlib.util.spec_from_file_location("gao", folder / "benchmark_attention.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for row in module.run_benchmarks(use_compile=how == "compiled"):
        key = f"{how} d{row['d_model']} s{row['seq_len']}"
        if row["status"] == "OK":
            figure(f"{key} before_backward", row["memory_before_backward_gb"] * 1e9)
            figure(f"{key} peak", row["peak_memory_gb"] * 1e9)


def enzo() -> None:
    source("EnzoDing-rgb+cs336-assignment2-systems", "cs336-basics", ".")
    module = importlib.import_module("cs336_systems.attention_operator.benchmark")
    for width in (16, 32, 64, 128):
        for length in (256, 1024, 4096, 8192, 16384, 24576, 32768):
            config = module.AttentionBenchmarkConfig(seq_len=length, d_model=width)
            result = module.benchmark_cell(config)
            key = f"d{width} s{length}"
            figure(f"{key} verdict", "OOM" if result.oom else "fits")
            if not result.oom:
                figure(f"{key} before_backward", result.memory_before_backward_bytes)


if __name__ == "__main__":
    without_versions()
    {"damek": damek, "yyin": yyin, "mark": mark, "gao": gao, "enzo": enzo}[sys.argv[1]](
        *sys.argv[2:]
    )
