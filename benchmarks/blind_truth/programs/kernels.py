"""Attention and flash attention of three solutions of CS336's second assignment, each by its own
benchmark. Kernels take no time here, so functions are timed by a fixed number of calls, with the
buffer of 256 MiB that Triton empties the L2 cache with.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch
from figures import figure, source, stand_in


def timed(
    fn: Any, *rest: Any, grad_to_none: Any = None, quantiles: Any = None, **named: Any
) -> Any:
    """`triton.testing.do_bench`, with three calls to warm up and three to measure."""
    fn()
    torch.cuda.synchronize()
    cache = torch.empty(256 * 1024 * 1024 // 4, dtype=torch.int, device="cuda")
    for _ in range(5):
        cache.zero_()
        fn()
    torch.cuda.synchronize()
    for _ in range(3):
        fn()
    for _ in range(3):
        for tensor in grad_to_none or ():
            tensor.grad = None
        cache.zero_()
        fn()
    torch.cuda.synchronize()
    return [1.0] * len(quantiles) if quantiles else 1.0


def module_of(path: Path, name: str, *changes: tuple[str, str]) -> types.ModuleType:
    """A script as a module, with other numbers of repetitions."""
    text = path.read_text(encoding="utf-8")
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    module = types.ModuleType(name)
    module.__dict__["__file__"] = str(path)
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def kbjiang(widths: str, lengths: str) -> None:
    without_own_versions()
    source("kbjiang+cs336-assignment2-systems-mine", "cs336-basics", ".")
    triton: Any = importlib.import_module("triton")
    triton.testing.do_bench = timed
    module = importlib.import_module("cs336_systems.flashattention_benchmarking")
    types_ = (torch.bfloat16, torch.float32)
    tests = ("forward", "forward_backward")
    lists = (widths.split(","), lengths.split(","), types_, tests, module.IMPL_DICT)
    for width, length, dtype, test, name in itertools.product(*lists):
        row = module.benchmark_flash(test, name, 1, int(width), int(length), dtype)
        key = f"{name} {test} d{width} s{length} {str(dtype).removeprefix('torch.')}"
        if row["memory_MB"] is None:
            print(key, "OOM", file=sys.stderr)
        else:
            figure(f"{key} peak", row["memory_MB"] * 2**20)


class App:
    """Modal's application: its functions run here."""

    def function(self, **rest: Any) -> Any:
        return lambda function: function

    def local_entrypoint(self) -> Any:
        return lambda function: function


def without_own_versions() -> None:
    """The assignment's packages ask for the version they are installed in."""
    installed = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if "cs336" in name else installed(name)


def sacchi_sources() -> Path:
    without_own_versions()
    source("NiccoloSacchi+assignment1-basics", ".")
    folder = source("NiccoloSacchi+assignment2-systems", ".")
    importlib.import_module("cs336_systems")
    stand_in("cs336_systems.modal_setup", app=App())
    return folder / "scripts"


def sacchi_attention(widths: str, lengths: str) -> None:
    module = module_of(
        sacchi_sources() / "benchmark_attention.py",
        "benchmark_attention",
        ("range(100)", "range(6)"),
        ("[16, 32, 64, 128]", f"[{widths}]"),
        ("[256, 1024, 4096, 8192, 16384]", f"[{lengths}]"),
    )
    names = ("start", "forward", "backward")
    for _, row in module.run(True).iterrows():
        how = "compiled" if row["compiled"] else "eager"
        key = f"{how} d{row['d_model']} s{row['context_length']}"
        oom = row["peak_memory_start_mib"] == "OOM"
        figure(f"{key} verdict", "OOM" if oom else "fits")
        for name in () if oom else names:
            number = re.match(r"[\d.]+", row[f"peak_memory_{name}_mib"])
            assert number is not None
            figure(f"{key} {name}", float(number[0]) * 2**20)


def sacchi_flash(lengths: str, widths: str) -> None:
    triton: Any = importlib.import_module("triton")
    triton.testing.do_bench = timed
    module = module_of(
        sacchi_sources() / "benchmark_flash_attention.py",
        "benchmark_flash_attention",
        ("[128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]", f"[{lengths}]"),
        ("[16, 32, 64, 128]", f"[{widths}]"),
    )
    for _, row in module.run().iterrows():
        dtype = str(row["dtype"]).removeprefix("torch.")
        key = f"{row['implementation']} d{row['d_model']} s{row['seq_len']} {dtype}"
        peak = row["peak_memory_mb"]
        if peak != peak:
            continue
        figure(f"{key} verdict", "OOM" if peak == "OOM" else "fits")
        if peak != "OOM":
            figure(f"{key} peak", peak * 2**20)


def snider(widths: str, lengths: str) -> None:
    without_own_versions()
    folder = source("brandon-snider+cs336-a2", "cs336-basics", ".")
    module = module_of(
        folder / "cs336_systems" / "benchmark_pytorch_attn.py",
        "benchmark_pytorch_attn",
        ("STEPS = 100", "STEPS = 4"),
        ("[16, 32, 64, 128]", f"[{widths}]"),
        ("[256, 1024, 4096, 8192, 16384]", f"[{lengths}]"),
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.main()
    for width, length, size in re.findall(
        r"^(\d+)\t(\d+)\t[\d.]+\t[\d.]+\t(\d+)$", printed.getvalue(), re.MULTILINE
    ):
        figure(f"d{width} s{length} before_backward", float(size) * 1e6)


if __name__ == "__main__":
    {
        "kbjiang": kbjiang,
        "sacchi_attention": sacchi_attention,
        "sacchi_flash": sacchi_flash,
        "snider": snider,
    }[sys.argv[1]](*sys.argv[2:])
