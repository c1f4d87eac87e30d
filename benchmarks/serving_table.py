"""Which models vLLM serves on which GPUs: a start without a GPU for each pair, one GPU each.

    PYTHONPATH=. python benchmarks/serving_table.py run --python INTERPRETER [--jobs 2]
    PYTHONPATH=. python benchmarks/serving_table.py table

``INTERPRETER`` has vLLM. Models are those whose configuration is part of gpuprobe. Each cell is a
start in bfloat16 with ``--max-model-len auto``, which is the model's own length, or the longest of
which the KV cache holds one sequence. ``run`` leaves out what ``serving_table.json`` has already,
and goes from the first GPU to the last for each model, so it can be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from gpuprobe.planning.models.configs import find_model

RESULTS = Path(__file__).with_name("serving_table.json")
GPUS: Final = ("l4", "l40s", "a100-80gb", "h100-80gb", "h200-141gb")
MODELS: Final = (
    "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "mistral-7b-v0.3",
    "gemma-2-9b", "phi-4", "llama-3.2-3b", "qwen2.5-32b", "llama-3.3-70b", "qwen3-30b-a3b",
    "mixtral-8x7b", "gemma-2-27b", "qwen2.5-14b", "qwen2.5-72b", "llama-3.2-1b", "qwen3-0.6b",
    "qwen3-1.7b", "qwen3-4b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-coder-32b",
    "llama-2-7b", "llama-2-13b", "codellama-34b", "gemma-2-2b", "gemma-7b", "phi-3-mini",
    "phi-4-mini", "phi-2", "falcon3-7b", "falcon3-10b", "smollm2-1.7b", "starcoder2-7b",
    "olmo-2-7b", "olmo-2-13b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b",
)  # fmt: skip
_KEPT: Final = (
    "started", "stage", "error", "compile_cache", "weights", "activation", "kv_cache", "tokens",
    "max_model_len", "max_num_seqs", "later",
)  # fmt: skip
_SHOWN: Final = 60
_NO_CACHE: Final = ("No available memory for the cache blocks", "Cannot auto-fit max_model_len")

Row = dict[str, Any]


def results() -> Row:
    """The cells that were run, by model and GPU."""
    found: Row = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def start(python: str, model: str, gpu: str) -> Row:
    """What an estimate of a model on a GPU finds."""
    with tempfile.TemporaryDirectory(prefix="serving-table-") as name:
        folder = Path(name) / model
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(find_model(model).fields)))
        command = [python, "-m", "gpuprobe", "estimate", "--json", "--gpu", gpu, "--"]
        command += ["vllm", "serve", str(folder), "--dtype", "bfloat16", "--max-model-len", "auto"]
        began = time.monotonic()
        done = subprocess.run(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
        )
        seconds = round(time.monotonic() - began)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return {"seconds": seconds, "started": None, "error": done.stderr.strip()[-300:]}
    row = {name: found[name] for name in _KEPT if found.get(name) not in (None, "")}
    if "error" in row:
        row["error"] = row["error"].replace(name, "").partition("\n")[0][:300]
    return {"seconds": seconds, **row}


def run(python: str, jobs: int) -> None:
    """Run the cells that are missing, those of several models at a time."""
    lock = threading.Lock()

    def run_model(model: str) -> None:
        for gpu in GPUS:
            if gpu in results().get(model, {}):
                continue
            row = start(python, model, gpu)
            while "address already in use" in str(row.get("error")):
                row = start(python, model, gpu)  # another start took a port that vLLM had chosen
            with lock:
                found = results()
                found.setdefault(model, {})[gpu] = row
                replacement = RESULTS.with_suffix(".new")
                replacement.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                replacement.replace(RESULTS)
            print(f"{row['seconds']:4.0f} s  {model} on {gpu}: {json.dumps(row)[:200]}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_model, MODELS))


def page() -> str:
    """The cells as Markdown: tokens in the KV cache and the longest context; or why it fails."""
    found = results()
    cells = sum(len(rows) for rows in found.values())
    text = [
        f"{cells} of {len(MODELS) * len(GPUS)} starts were run.",
        "",
        f"| model | {' | '.join(GPUS)} |",
        f"| --- |{' --- |' * len(GPUS)}",
    ]
    for model in MODELS:
        if model in found:
            shown = [_cell(found[model].get(gpu)) for gpu in GPUS]
            text.append(f"| {model} | {' | '.join(shown)} |")
    return "\n".join(text) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    later = row.get("later")
    if row["started"]:
        rest = f" ({later['tokens']:,})" if later and later["started"] else ""
        return f"{row['tokens']:,}{rest}; {row['max_model_len']:,}"
    error = str(row["error"])
    if "out of memory" in error:
        loading = row.get("stage") == "loading the weights"
        return "weights do not fit" if loading else "no room for activations"
    if any(text in error for text in _NO_CACHE):
        return "no room for a KV cache"
    return error[:_SHOWN].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description="models that vLLM serves, by GPU")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--python", default=sys.executable)
    runs.add_argument("--jobs", type=int, default=1, help="models at a time (1)")
    commands.add_parser("table")
    args = parser.parse_args()
    if args.command == "run":
        run(args.python, args.jobs)
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
