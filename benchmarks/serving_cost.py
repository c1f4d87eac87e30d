"""The time and host memory of an estimate of a vLLM server, with cold and warm compile caches.

    PYTHONPATH=. python benchmarks/serving_cost.py --python INTERPRETER [--fit]

``INTERPRETER`` has vLLM. The model is Llama 3.1 8B on an H100. All caches are in a new folder: the
first estimate builds gpuprobe's native libraries and compiles the model, the second one finds both.
``--fit``: then a search with all options, which compiles the model anew for most of its starts.
Host memory is the sum of the processes' proportional set sizes (PSS), sampled twice a second;
processor time includes all processes. The modules of ``INTERPRETER`` have to have bytecode, as pip
makes it (uv does with ``--compile-bytecode``): without it, and with PYTHONDONTWRITEBYTECODE, each
start compiles thousands of modules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import serving_logs

MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
OPTIONS: Final = ("--max-model-len", "8192", "--gpu-memory-utilization", "0.95")
SEARCH: Final = ("--input-len", "2000", "--output-len", "500", "--suggest")
RESULTS = Path(__file__).with_name("serving_cost.json")
_INTERVAL_S: Final = 0.5


class Cost(NamedTuple):
    """Seconds on the clock and of the processors, the most GiB of host memory, the load of the
    machine by other programs (processes that could run, on average, without those measured), the
    state of the compile cache, and how often vLLM was started.
    """

    seconds: float
    processor: float
    memory: float
    load: float
    compile_cache: str
    starts: int


class _Sampler(threading.Thread):
    """Samples a process and its descendants until it is told to stop."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(root)
        self._over = threading.Event()
        self._seen: dict[int, psutil.Process] = {}
        self._processor: dict[int, float] = {}
        self.memory = 0
        self.loads: list[float] = []

    def run(self) -> None:
        while not self._over.wait(_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        try:
            for process in (self._root, *self._root.children(recursive=True)):
                self._seen.setdefault(process.pid, process)
        except psutil.Error:
            pass  # it has just ended; those seen before are measured below
        memory, running = 0, 0
        for process in self._seen.values():
            try:
                times = process.cpu_times()
                self._processor[process.pid] = times.user + times.system
                memory += process.memory_full_info().pss
                running += process.status() == psutil.STATUS_RUNNING
            except psutil.Error:
                continue
        self.memory = max(self.memory, memory)
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        self.loads.append(max(runnable - 1 - running, 0))

    def stop(self) -> float:
        """Stop; the seconds of processor time."""
        self._over.set()
        self.join()
        return sum(self._processor.values())


def measure(python: str, options: Sequence[str], folder: Path, *, fit: bool = False) -> Cost:
    """Run an estimate, or a search, with its caches and the model in a folder, which is part of
    vLLM's keys.
    """
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = serving_logs.models()[MODEL]["config"]
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    name, words = ("fit", SEARCH) if fit else ("estimate", ())
    command = [python, "-m", "gpuprobe", name, "--json", "--gpu", "h100-80gb", *words, "--"]
    command += ["vllm", "serve", str(model), *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder)}
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    sampler = _Sampler(process.pid)
    sampler.start()
    out, _ = process.communicate()
    seconds = time.monotonic() - began
    processor = sampler.stop()
    found = json.loads(out)
    load = sum(sampler.loads) / max(len(sampler.loads), 1)
    starts = len(found["trials"]) if fit else 2 if found["later"] else 1
    cache = str(found.get("compile_cache", ""))
    return Cost(seconds, processor, sampler.memory / (1 << 30), load, cache, starts)


def page() -> str:
    """The results as Markdown."""
    results: dict[str, dict[str, float | str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [
        "| command, caches | starts of vLLM | time | processor time | host memory "
        "| other programs on the machine |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for title, row in results.items():
        lines.append(
            f"| {title} | {row['starts']} | {row['seconds']:.0f} s | {row['processor']:.0f} s "
            f"| {row['memory']:.2f} GiB | {row['load']:.1f} ready to run, on average |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="time and host memory of a vLLM estimate")
    parser.add_argument("--python", required=True)
    parser.add_argument("--fit", action="store_true", help="measure a search too")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="serving-cost-") as folder:
        runs = [("estimate, empty", False), ("estimate, from the first", False)]
        for title, fit in runs + [("fit, from both", True)] * args.fit:
            cost = measure(args.python, OPTIONS[2:] if fit else OPTIONS, Path(folder), fit=fit)
            print(f"{title}: {cost}", flush=True)
            results[title] = cost._asdict()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
