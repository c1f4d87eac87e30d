"""Predictions of the published step times in ``step_time_truth.json``, without reading them.

    python benchmarks/step_time_predict.py [--cache FOLDER] [--only TEXT] [--write FILE]

The program of each row (``step_time_programs/``) runs on a simulated GPU, where the work of its
steps is recorded; a recording is priced for the GPU of each row. To keep it affordable, models with
12 layers or more are recorded with two numbers of layers, and steps of more than two micro-batches
with one and two: the time is extrapolated, as both add the same work again
(``--check`` compares with a full run). Recordings are kept in the cache.

``measured`` is removed from every row as the file is read: nothing here can depend on it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TRUTH = HERE / "step_time_truth.json"
PREDICTIONS = HERE / "step_time_predictions.json"
PROGRAMS = HERE / "step_time_programs"
RECORDED_ON = "8xa100-80gb"
"""The launches of these programs do not depend on the GPU: attention is chosen by the program."""
RECORDED_IN_FLOAT8 = "8xh100-80gb"
"""Which an A100 does not compute with."""
DEPTHS = (2, 4)
MOST_RUNS = 12
"""In one recording."""
NETWORKS = {"a100-40gb": 25.0, "a100-80gb": 25.0, "h100-80gb": 50.0, "h200-141gb": 50.0}
"""GB/s of each GPU's adapter, 200 and 400 Gb/s, where a row has several nodes: not published."""


FLASH_1 = {64: (0.68, 0.62), 128: (0.57, 0.52)}
"""Of FlashAttention-2's speed, forward and backward, by head size: FlashAttention-1, fitted to the
rows of llm-foundry on A100 40 GB, in which the memory-efficient kernel stands for it."""
FLASH_1_SOURCES = ("llm-foundry", "mosaicml-examples")
FLASH_1_RANGES = {"a100": (0.93, 1.13), "h100": (0.75, 1.3)}
"""A100: of 13 rows of A100 40 GB in which attention takes a quarter of the time or more, 8 of 10
have it within 0.95 to 1.11 of its price. H100: estimated."""


@dataclass(frozen=True)
class Job:
    """A program to record: its options; ranks; the micro-batches of its steps."""

    program: str
    options: tuple[str, ...]
    ranks: int
    accumulation: str


@dataclass(frozen=True)
class Run:
    """What a row needs: sequence length, micro-batch and layers of a job."""

    job: Job
    sequence: int
    batch: int
    layers: int

    @property
    def depths(self) -> tuple[int, ...]:
        return DEPTHS if self.layers >= 3 * DEPTHS[1] else (self.layers,)

    @property
    def words(self) -> tuple[str, ...]:
        """As the program's ``--runs`` has them."""
        return tuple(f"{self.sequence}x{self.batch}x{layers}" for layers in self.depths)


def rows_of() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows without what was measured, and the programs."""
    document = json.loads(TRUTH.read_text())
    for row in document["rows"]:
        del row["measured"]
    return document["rows"], document["programs"]


def options_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    words = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", str(value)]
    return tuple(words)


def run_of(row: Mapping[str, Any], programs: Mapping[str, Any]) -> Run | str:
    """What to record for a row, or why it is left out."""
    job = job_of(row, programs)
    if isinstance(job, str):
        return job
    program = programs[row["program"]]
    first = row.get("sequence", program.get("image"))
    return Run(job, first, row["micro_batch"], program.get("layers", 1))


def job_of(row: Mapping[str, Any], programs: Mapping[str, Any]) -> Job | str:
    source, program = row["source"], programs[row["program"]]
    sizes: dict[str, Any] = {name: program.get(name) for name in ("width", "heads", "vocabulary")}
    if source in ("llm-foundry", "mosaicml-examples"):
        if row["precision"] == "amp_fp8":
            sizes["float8"] = True
        examples = source == "mosaicml-examples"
        sizes.update(
            {
                "parallel": "grad" if row["parallel"].endswith("GRAD_OP") else "full",
                "reduce": "bfloat16" if row["mixed_precision"] == "PURE" else "float32",
                "checkpointing": (2 if examples else 1) if row["checkpointing"] else 0,
                "metrics": 2,
                "offload": row["offload_activations"],
                "norm": "autocast" if examples else "low",
                "loss": "autocast" if examples else "fused",
                "flat": examples,
            }
        )
        accumulation = "1,1" if row["accumulation"] == 1 else "1,1,2"
        return Job("decoder", options_of(sizes), row["gpus"], accumulation)
    if source == "nanogpt":
        if row.get("compile"):
            return "compiled: not built"
        sizes.update(parallel="ddp", attention="math", loss="autocast", norm="autocast")
        sizes.update({"optimizer": "fused", "no-biases": True})
        return Job("decoder", options_of(sizes), row["gpus"], "1,1")
    if source.partition("-")[0] in ("lambdal", "deeplearningexamples"):
        if program["kind"] != "encoder":
            return Job("resnet50", (), row["gpus"], "1,1")
        del sizes["vocabulary"]
        pretraining = row["program"].endswith("-pretraining")
        name, accumulation = ("bert_pretraining", "1,1,2") if pretraining else ("bert_squad", "1,1")
        return Job(name, options_of(sizes), row["gpus"], accumulation)
    if source == "neusight":
        kind = row["program"].split("-")[1].split("_")[0].replace("gpt3", "gpt2")
        if kind == "switchxl4":
            return "experts, which values choose: not built"
        if row["compile"]:
            return "compiled: not built"
        sizes.update(kind=kind, mlp=program["mlp"])
        sizes["forward"] = row["class"].startswith("inference")
        return Job("transformers_models", options_of(sizes), 1, "1,1")
    if source == "qwen":
        sizes.update(mlp=program["mlp"], embeddings=row["embeddings"])
        return Job("qwen_lora", options_of(sizes), 1, "1,1,2")
    if source == "modded-nanogpt":
        return modded(row, sizes)
    return newer(row, program, sizes)


def newer(row: Mapping[str, Any], program: Mapping[str, Any], sizes: dict[str, Any]) -> Job | str:
    """Of the sources that came last."""
    if row["source"] == "gpt-3-small":
        accumulation = "1,1" if row["accumulation"] == 1 else "1,1,2"
        sizes["masked"] = program["masked"]
        return Job("gpt_small", options_of(sizes), row["gpus"], accumulation)
    if row["source"] == "cudnn-frontend":
        sizes.update({"key_heads": program["key_heads"], "mlp": program["mlp"]})
        sizes["attention"] = row["attention"]
        return Job("llama_1b", options_of(sizes), 1, "1,1")
    if row["source"].startswith("cs336-"):
        sizes["mlp"] = program["mlp"]
        sizes.update({name: row.get(name) for name in ("rotary", "loss", "optimizer", "waits")})
        return Job("course_lm", options_of(sizes), 1, "1,1")
    if row["source"] in ("vectorlm", "fms-acceleration"):
        return finetuned(row, program, sizes)
    return "not built"


def finetuned(row: Mapping[str, Any], program: Mapping[str, Any], sizes: dict[str, Any]) -> Job:
    """Rows of vectorlm and fms-acceleration. One GPU: vectorlm wraps with FSDP all the same."""
    other, amp = row["source"] == "vectorlm", row["precision"] == "amp_bf16"
    sharded = row["parallel"] != "none"
    sizes.update({name: program[name] for name in ("key_heads", "mlp")})
    sizes.update(
        {
            "tied": program["tied_embeddings"],
            "granite": row["program"].startswith("powerlm"),
            "adapters": row["adapters"] or None,
            "targets": "qv" if other else None,
            "wide-adapters": bool(row["adapters"]) and not other,
            "fused": row.get("fused", False),
            "sharded": sharded,
            "mixed": sharded and (other or amp),
            "autocast": amp,
            "trainer": "vectorlm" if other else "hf",
        }
    )
    return Job("llama_finetune", options_of(sizes), row["gpus"], "1,1")


def modded(row: Mapping[str, Any], sizes: dict[str, Any]) -> Job | str:
    if any(word in row["note"] for word in ("Shortcuts", "CastBf16", "UNet")):
        return "skip connections: not built"
    sizes["modern"] = row["program"] != "modded-124m-rotary"
    sizes["untied"] = row["program"] == "modded-124m-untied"
    sizes["divided"] = "every rank" not in row["note"]
    # torch 2.5 selects cuDNN on H100, 2.4 FlashAttention-2.
    sizes["attention"] = "cudnn" if "torch 2.5" in row["note"] else "flash"
    return Job("modded_nanogpt", options_of(sizes), row["gpus"], "1,1")


def recorded(cache: Path) -> dict[tuple[str, str], tuple[Path, int]]:
    """By job and run: its recording, and the number of its first step there."""
    found = {}
    for path in sorted(cache.glob("*.gpuprobe")):
        order = path.with_suffix(".json")
        if order.exists():
            document = json.loads(order.read_text())
            for number, run in enumerate(document["runs"]):
                found[document["job"], run] = path, number * document["each"]
    return found


def key_of(job: Job) -> str:
    """Of what a recording depends on, with the program's code."""
    code = (PROGRAMS / f"{job.program}.py").read_bytes()
    words = [*job.options, str(job.ranks), job.accumulation]
    return hashlib.sha256(code + "\0".join(words).encode()).hexdigest()[:16]


_RECORDED = (0, 1)
"""Exit codes of an estimate: what does not fit, for its cached memory, was recorded anyway."""


def record_all(orders: Sequence[Mapping[str, Any]]) -> None:
    """Record each order, all for one GPU, in a forked process: torch is imported once, after it."""
    from gpuprobe.api.simulated_gpu import load_gpu

    load_gpu(orders[0]["gpu"], endless=True)
    import torch
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
    import torch.distributed.fsdp
    import torch.nn.parallel
    import torch.utils.flop_counter  # noqa: F401

    started = time.time()
    for number, order in enumerate(orders, 1):
        child = os.fork()
        if not child:
            code = 1
            try:
                code = record_one(order)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in _RECORDED:
            Path(order["path"]).with_suffix(".json").write_text(json.dumps(order["what"]))
        print(
            f"{number} of {len(orders)}, {time.time() - started:.0f} s"
            + ("" if code in _RECORDED else f": FAILED {order['words']}"),
            flush=True,
        )


def record_one(order: Mapping[str, Any]) -> int:
    """Record one order."""
    from torch.distributed import distributed_c10d

    from gpuprobe.cli import main

    # It takes seconds, and the process ends now.
    distributed_c10d.destroy_process_group = lambda *args: None
    steps = str(order["steps"])
    words = ["--gpu", order["gpu"], "--ranks", str(order["ranks"]), "--steps", steps]
    words += ["--no-suggestions", "--compute", "shapes", "-o", order["path"], "--json"]
    return main(["estimate", *words, order["script"], "--", *order["words"]])


def record(cache: Path, runs: Sequence[Run]) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    there = recorded(cache)
    missing: dict[Job, dict[str, None]] = {}
    for run in runs:
        for word in run.words:
            if (key_of(run.job), word) not in there:
                missing.setdefault(run.job, {})[word] = None
    orders = []
    for job, words in missing.items():
        for first in range(0, len(words), MOST_RUNS):
            some = list(words)[first : first + MOST_RUNS]
            name = hashlib.sha256(repr((key_of(job), some)).encode()).hexdigest()[:16]
            each = job.accumulation.count(",") + 1
            options = ["--runs", ",".join(some), "--accumulation", job.accumulation, *job.options]
            orders.append(
                {
                    "script": str(PROGRAMS / f"{job.program}.py"),
                    "words": options,
                    "gpu": RECORDED_IN_FLOAT8 if "--float8" in job.options else RECORDED_ON,
                    "ranks": job.ranks,
                    "steps": each * len(some),
                    "path": str(cache / f"{name}.gpuprobe"),
                    "what": {"job": key_of(job), "runs": some, "each": each},
                }
            )
    for gpu in sorted({str(order["gpu"]) for order in orders}):
        record_in_a_process([order for order in orders if order["gpu"] == gpu])


def record_in_a_process(orders: Sequence[Mapping[str, Any]]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(orders, file)
        file.flush()
        subprocess.run(
            [sys.executable, __file__, "--orders", file.name],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )


Figures = dict[str, float]
"""Nanoseconds: low, expected, high."""


@lru_cache(maxsize=4)
def steps_of(path: Path) -> Any:
    from gpuprobe.api.recordings import load

    return load(path).ranks[0].steps


def figures(
    work: Any, gpu: str, network: float, per_node: int, *, first_flash: bool
) -> Figures | str:
    """The predicted time of a step, or why there is none. ``first_flash``: the memory-efficient
    kernel stands for FlashAttention-1.
    """
    from gpuprobe.model.values import Unavailable
    from gpuprobe.step_time.predict import predict
    from gpuprobe.step_time.prices import prices

    attention_as(gpu, first_flash=first_flash)
    if isinstance(work, Unavailable):
        return work.reason
    of_gpu = prices(gpu, network)
    if isinstance(of_gpu, Unavailable):
        return of_gpu.reason
    found = predict(work, 0, of_gpu, per_node=per_node)
    if isinstance(found, Unavailable):
        return found.reason
    return {
        "low": found.low_ns,
        "expected": found.expected_ns,
        "high": found.high_ns,
    }


@lru_cache(maxsize=1)
def efficient() -> tuple[Any, Any]:
    """The constants of the memory-efficient kernel."""
    from gpuprobe.step_time import attention

    return attention._EFFICIENT, attention._EFFICIENT_RANGE


def attention_as(gpu: str, *, first_flash: bool) -> None:
    """Set the constants of the memory-efficient kernel, or those of FlashAttention-1."""
    from gpuprobe.step_time import attention
    from gpuprobe.step_time.price import Factors

    attention._EFFICIENT, attention._EFFICIENT_RANGE = efficient()
    if first_flash:
        ranges = FLASH_1_RANGES.get(gpu.partition("-")[0], (0.6, 1.6))
        attention._EFFICIENT, attention._EFFICIENT_RANGE = FLASH_1, Factors(*ranges)


def line(first: Figures, second: Figures, at: float) -> Figures:
    """On the line through two: the first is at 0, the second at 1."""

    return {name: one + at * (second[name] - one) for name, one in first.items()}


def predicted(there: Mapping[Any, Any], row: Mapping[str, Any], run: Run) -> Figures | str:
    by_depth = []
    gpu, several = row["gpu"], row["nodes"] > 1
    network = NETWORKS.get(gpu, 0.0) if several else 0.0
    count = row.get("accumulation", 1)
    for word in run.words:
        place = there.get((key_of(run.job), word))
        if place is None:
            return "not recorded"
        path, first = place
        found = []
        for at in (1,) if count == 1 else (1, 2):
            work = steps_of(path)[first + at].work
            first_flash = row["source"] in FLASH_1_SOURCES
            one = figures(work, gpu, network, row["gpus"] // row["nodes"], first_flash=first_flash)
            if isinstance(one, str):
                return one
            found.append(one)
        by_depth.append(found[0] if count == 1 else line(found[0], found[1], count - 1))
    if len(by_depth) == 1:
        return by_depth[0]
    low, high = run.depths
    return line(by_depth[0], by_depth[1], (run.layers - low) / (high - low))


def rounded(found: Figures) -> Figures:
    return {f"{name}_ms": round(ns / 1e6, 3) for name, ns in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "step-times")
    parser.add_argument("--only", default="", help="rows whose facts contain all these words")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--no-record", action="store_true", help="only price what is recorded")
    parser.add_argument("--record-only", action="store_true")
    parser.add_argument("--orders", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.orders:
        record_all(json.loads(options.orders.read_text()))
        return
    rows, programs = rows_of()
    words = options.only.split("/") if options.only else []
    rows = [row for row in rows if all(word in json.dumps(row) for word in words)]
    runs = {row["id"]: run_of(row, programs) for row in rows}
    if not options.no_record:
        record(options.cache, [run for run in runs.values() if isinstance(run, Run)])
    if options.record_only:
        return
    there = recorded(options.cache)
    found: dict[str, Any] = {}
    known: dict[Any, Any] = {}
    for row in sorted(rows, key=lambda row: str(runs[row["id"]])):
        run = runs[row["id"]]
        key = run, row["gpu"], row["nodes"], row.get("accumulation", 1)
        if key not in known:
            made = run if isinstance(run, str) else predicted(there, row, run)
            known[key] = {"refused": made} if isinstance(made, str) else rounded(made)
        found[row["id"]] = known[key]
    found = {row["id"]: found[row["id"]] for row in rows}
    lines = [f" {json.dumps(name)}: {json.dumps(row)}" for name, row in found.items()]
    text = '{"rows": {\n' + ",\n".join(lines) + "\n}}"
    if options.write:
        options.write.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
