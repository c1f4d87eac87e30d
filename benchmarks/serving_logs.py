"""Start-ups of vLLM 0.19 on H100s that others logged and published, restated without a GPU.

    PYTHONPATH=. python benchmarks/serving_logs.py run --python INTERPRETER [--match TEXT …]
    PYTHONPATH=. python benchmarks/serving_logs.py run --other --python INTERPRETER [--match TEXT …]
    PYTHONPATH=. python benchmarks/serving_logs.py run --newer --python INTERPRETER [--match TEXT …]
    PYTHONPATH=. python benchmarks/serving_logs.py table

``INTERPRETER`` has vLLM 0.19.1. The figures are those of ``tests/recorded/vllm/public_logs.json``,
``serving_models.json`` has the models' configurations, each with its source. vLLM profiles
multimodal models with their processors: ``serving_multimodal.json`` has these models with the
configurations of their processors, and the special tokens of their tokenizers (`write_tokenizer`).
A log is left out (`why_not`) if its model is in neither file.

Half of the logs is held out: those whose model's name, in lower case, has a SHA-256 with an odd
first byte. The constants of ``gpuprobe/planning/serving/figures.py`` come from the other half.
Figures, configurations and split were committed before the first run.

``--other`` runs start-ups from other sources, on other GPUs and with other versions of vLLM:
``tests/recorded/vllm/other_logs.json``. All of them are held out.

``--newer`` runs start-ups of vLLM 0.25 and newer with an ``INTERPRETER`` that has the version of
the log, or the nearest newer one: ``tests/recorded/vllm/newer_logs.json``. All of them are held
out.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from gpuprobe.planning.serving.figures import graph_bytes

HERE = Path(__file__).resolve().parent
LOGS = HERE.parent / "tests" / "recorded" / "vllm" / "public_logs.json"
MODELS = HERE / "serving_models.json"
MULTIMODAL = HERE / "serving_multimodal.json"
RESULTS = HERE / "serving_results.json"
OTHER = LOGS.with_name("other_logs.json")
OTHER_RESULTS = HERE / "serving_results_other.json"
NEWER = LOGS.with_name("newer_logs.json")
NEWER_RESULTS = HERE / "serving_results_newer.json"
GIB: Final = 1 << 30
VERDICTS: Final = (
    {"model": "microsoft/phi-2", "tp": 1, "pp": 1, "max_model_len": 8192, "started": False},
    {"model": "Qwen/Qwen3-14B", "tp": 5, "pp": 1, "max_model_len": 8192, "started": False},
)
"""Logs of starts that failed before any figure, for a reason that is not the machine's."""

CORRECTED: Final = {
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": {
        "modules_in_block_to_quantize": [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.up_proj", "mlp.gate_proj"],
            ["mlp.down_proj"],
        ]
    }
}
"""Fields of ``quantization_config`` that were missing in the first run. vLLM takes them from the
checkpoint's weights, without which the model was in 16 bits: weights of 14.99 GiB in place of 5.38.
"""

FIRST_PROFILED: Final = {4: 2}
"""The rank whose weights and activations a log of a pipeline has, by the number of ranks, if it is
not the first one: figures are those of the first line, and ranks end their profiling run in any
order. Lines in the logs themselves name the ranks.
"""

Row = dict[str, Any]


def logs() -> list[Row]:
    """The logs, with ``gpu_memory_utilization`` 0.95 if one does not state another."""
    rows: list[Row] = json.loads(LOGS.read_text(encoding="utf-8"))["logs"]
    return rows + [{**row, "utilization": 0.95} for row in VERDICTS]


def models() -> dict[str, Row]:
    """Configurations by the names of models: ``source`` and ``config``; of multimodal models also
    ``files``, the contents of further files by their names, and ``tokenizer`` (`write_tokenizer`)
    or ``tekken`` (`write_tekken`), ``code``, files next to this one by the names that they get, and
    ``options`` for vLLM.
    """
    return text_models() | multimodal_models()


def text_models() -> dict[str, Row]:
    """The models that process text only."""
    found: dict[str, Row] = json.loads(MODELS.read_text(encoding="utf-8"))
    return found


def multimodal_models() -> dict[str, Row]:
    """The models that vLLM profiles with their processors."""
    found: dict[str, Row] = json.loads(MULTIMODAL.read_text(encoding="utf-8"))
    return found


def frozen_digest() -> str:
    """A SHA-256 of all figures, and of the configurations of models that process text only."""
    data = json.dumps([logs(), text_models()], sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def multimodal_digest(model: str) -> str:
    """A SHA-256 of a multimodal model's configurations, tokenizer and code."""
    row = multimodal_models()[model]
    data = json.dumps(row, sort_keys=True).encode()
    code = b"".join((HERE / source).read_bytes() for source in row.get("code", {}).values())
    return hashlib.sha256(data + code).hexdigest()


def held_out(log: Row) -> bool:
    """Whether a log is of the half that no constant was made from."""
    return hashlib.sha256(log["model"].lower().encode()).digest()[0] % 2 == 1


def options(log: Row) -> list[str]:
    """The options of ``vllm serve`` that a log shows."""
    words = ["--max-model-len", str(log["max_model_len"]), "--no-enable-prefix-caching"]
    for name, option in (
        ("utilization", "--gpu-memory-utilization"),
        ("dtype", "--dtype"),
        ("quantization", "--quantization"),
        ("kv_cache_dtype", "--kv-cache-dtype"),
    ):
        if log.get(name) is not None:
            words += [option, str(log[name])]
    for name, option in (("tp", "--tensor-parallel-size"), ("pp", "--pipeline-parallel-size")):
        if log[name] > 1:
            words += [option, str(log[name])]
    return words


def name(log: Row) -> str:
    """The key of a log: its model and options."""
    return " ".join([log["model"], *options(log)])


def why_not(log: Row) -> str:
    """The reason why a log cannot be restated, ``""`` if it can."""
    return "" if log["model"] in models() else "its model's files are needed"


def other() -> Row:
    """Start-ups from other sources: ``logs``, ``models`` that `models` lacks, ``left_out``."""
    found: Row = json.loads(OTHER.read_text(encoding="utf-8"))
    return found


def newer() -> Row:
    """Start-ups of newer versions, with the same parts as `other`."""
    found: Row = json.loads(NEWER.read_text(encoding="utf-8"))
    return found


def other_name(log: Row) -> str:
    """The key of a log from another source."""
    return " ".join([log["gpu"], log["model"], *log["options"]])


def run(python: str, parts: list[str], warm: bool = False) -> None:
    """Run the logs whose names have any of ``parts``, in their order, and add the results to
    ``RESULTS``. The logs are of new containers, so graphs are compiled anew unless ``warm``.
    """
    known = models()
    chosen = [log for part in parts for log in logs() if part in name(log) and not why_not(log)]
    for log in chosen:
        if not warm:
            for folder in _compiled():
                shutil.rmtree(folder, ignore_errors=True)
        gpus = log["tp"] * log["pp"]
        gpu = f"{gpus}xh100-80gb" if gpus > 1 else "h100-80gb"
        model = known[log["model"]]
        config = model["config"]
        config.get("quantization_config", {}).update(CORRECTED.get(log["model"], {}))
        words = [*options(log), *model.get("options", [])]
        _add(RESULTS, name(log), _estimate(python, gpu, model, words))


def run_other(python: str, parts: list[str], document: Row, path: Path) -> None:
    """Run the logs of a ``document`` whose names have any of ``parts``, and add the results to the
    file at ``path``.
    """
    known = {**models(), **document["models"]}
    for part in parts:
        for log in document["logs"]:
            if part in other_name(log):
                model = known[log["model"]]
                digest = hashlib.sha256(json.dumps(model["config"]).encode()).hexdigest()[:12]
                folder = str(Path(tempfile.gettempdir()) / f"serving-logs-{digest}")
                row = _estimate(python, log["gpu"], model, log["options"], folder)
                _add(path, other_name(log), row)


def write_model(folder: Path, model: Row) -> None:
    """Write a model's folder, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": model["config"], **model.get("files", {})}.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    for name, source in model.get("code", {}).items():
        shutil.copyfile(HERE / source, folder / name)
    if "tokenizer" in model:
        write_tokenizer(folder, **model["tokenizer"])
    if "tekken" in model:
        write_tekken(folder, model["tekken"])


def write_tokenizer(
    folder: Path, size: int, special: dict[str, int], words: dict[str, int], config: Row
) -> None:
    """Write a tokenizer with a model's special tokens and their ids. The inputs that vLLM profiles
    a model with consist of these and of ``words``, so they have as many tokens as with the model's
    own tokenizer. All other ids below ``size`` belong to words that occur in no text.
    """
    tokens = {number: text for text, number in {**words, **special}.items()}
    added = [
        {
            "id": number,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for text, number in special.items()
    ]
    steps = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    vocabulary = {tokens.get(number, f"token {number}"): number for number in range(size)}
    document = {
        "version": "1.0",
        "added_tokens": added,
        **dict.fromkeys(steps),
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": config["unk_token"]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_tekken(folder: Path, document: Row) -> None:
    """Write a tokenizer in Mistral's format, and the file by which vLLM detects that a model is in
    that format: one with weights, here one of no elements. ``document`` is a tekken.json without
    its vocabulary, whose words occur in no text, but for the 256 bytes.
    """
    sizes = document["config"]
    number = sizes["default_vocab_size"] - sizes["default_num_special_tokens"]
    words = [bytes([byte]) for byte in range(256)]
    words += [f"token {rank}".encode() for rank in range(256, number)]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    text = json.dumps({**document, "vocab": vocabulary})
    (folder / "tekken.json").write_text(text, encoding="utf-8")
    header = json.dumps({"none": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}}).encode()
    weights = len(header).to_bytes(8, "little") + header
    (folder / "consolidated.safetensors").write_bytes(weights)


def _estimate(python: str, gpu: str, model: Row, words: list[str], folder: str = "") -> Row:
    """What ``gpuprobe estimate`` finds for a model of `models` and these options. In the same
    ``folder`` vLLM finds what it compiled for the model before; by default it is a new one.
    """
    with contextlib.ExitStack() as stack:
        if not folder:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-logs-"))
        path = Path(folder) / "model"
        write_model(path, model)
        command = [python, "-m", "gpuprobe", "estimate", "--json", "--gpu", gpu, "--"]
        command += ["vllm", "serve", str(path), *words]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        began = time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - began
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = {"started": None, "error": done.stderr.strip()[-400:]}
    return {"seconds": round(seconds), **_kept(found, folder)}


def _add(path: Path, key: str, row: Row) -> None:
    """Add a result to a file of them."""
    results: Row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[key] = row
    print(f"{row['seconds']:4.0f} s  {key}", flush=True)
    print(f"        {json.dumps(row)[:300]}", flush=True)
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in results.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _compiled() -> Iterator[Path]:
    """The folders with graphs that vLLM and Inductor compiled. Kernels are kept: whether Triton
    compiles them again changes no figure.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    serving = (Path(base) if base else Path.home() / ".cache") / "gpuprobe" / "serving"
    for part in ("inductor", "torch_compile_cache"):
        yield from serving.glob(f"*/{part}")


_KEPT: Final = (
    "started", "stage", "error", "compile_cache", "weights", "activation", "graphs_reserved",
    "graphs_captured", "graph_nodes", "non_torch", "kv_cache", "tokens", "ranks", "later",
)  # fmt: skip


def _kept(found: Row, folder: str) -> Row:
    row = {name: found[name] for name in _KEPT if found.get(name) is not None}
    if "+cu13" in found.get("torch", ""):
        row["cuda"] = 13
    if found.get("graphs") is not None:
        row["graph_pool"] = found["graphs"] - driver({**found, **row})
    row["error"] = row.get("error", "").replace(folder, "").partition("\n")[0][:200]
    if found.get("vllm") not in (None, "0.19.1"):
        row["vllm"] = found["vllm"]
    return {name: value for name, value in row.items() if value not in ("", [])}


def driver(found: Row) -> int:
    """The driver's part of CUDA graphs as estimated, by their number and that of their nodes."""
    graph, node = graph_bytes(found.get("cuda", 12))
    return int(graph * found["graphs_captured"] + node * found["graph_nodes"])


def graphs(found: Row) -> float | None:
    """GiB that capturing CUDA graphs takes."""
    if "graph_nodes" not in found or "graph_pool" not in found:
        return None
    return float((found["graph_pool"] + driver(found)) / GIB)


def error(ours: float | None, theirs: float | None) -> float | None:
    """The error of a figure in percent of the log's."""
    return None if ours is None or not theirs else (ours / theirs - 1) * 100


def compared() -> list[Row]:
    """For each log with a result: errors in percent of weights, activations, KV cache in GiB and in
    tokens, and both verdicts.
    """
    results: Row = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = []
    for log in logs():
        found = results.get(name(log))
        if found is None:
            continue
        ranks = found.get("ranks")
        first = ranks[FIRST_PROFILED.get(log["pp"], 0)] if ranks else found
        gib = {key: _gib(first.get(key)) for key in ("weights", "activation", "kv_cache")}
        if log["pp"] > 1:  # the log has what a rank has left, which is not what all ranks take
            gib["kv_cache"] = None
        rows.append(
            {
                "log": log,
                "found": found,
                "held_out": held_out(log),
                "weights": error(gib["weights"], log.get("weights")),
                "activation": error(gib["activation"], log.get("activation")),
                "kv_cache": error(gib["kv_cache"], log.get("kv")),
                "tokens": error(found.get("tokens"), log.get("tokens")),
                "graphs": error(graphs(found), log.get("graphs")),
                "corrected": log["model"] in CORRECTED,
                "verdict": found["started"] == log["started"],
            }
        )
    return rows


FIGURES: Final = ("weights", "activation", "kv_cache", "tokens", "graphs")


def page() -> str:
    """The errors as Markdown: means of both halves, and of the start-ups from other sources."""
    rows = compared()
    left_out = [log for log in logs() if why_not(log)]
    missing = f"{len(left_out)} need files of their models. " if left_out else ""
    text = [
        f"{len(rows)} of {len(logs())} logs were run. {missing}"
        "Errors in percent: mean of the absolute ones, and the largest.",
        "",
        "| logs | number | weights | activation peak | KV cache, GiB | KV cache, tokens | graphs "
        "| starts or fails as logged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for title, half in (
        ("held out, one GPU", [row for row in rows if row["held_out"] and not _several(row)]),
        ("held out, several GPUs", [row for row in rows if row["held_out"] and _several(row)]),
        ("used, one GPU", [row for row in rows if not row["held_out"] and not _several(row)]),
        ("used, several GPUs", [row for row in rows if not row["held_out"] and _several(row)]),
        ("other sources, vLLM 0.6 to 0.24", compared_other()),
        ("other sources, vLLM 0.25 to 0.31", compared_newer()),
    ):
        cells = [_summary([row.get(figure) for row in half]) for figure in FIGURES]
        right = sum(row["verdict"] for row in half)
        text.append(f"| {title} | {len(half)} | {' | '.join(cells)} | {right} of {len(half)} |")
    later = [row["later"] for row in compared_other() if "later" in row]
    text += ["", f"Tokens of {len(later)} second starts from other sources: {_summary(later)}."]
    return "\n".join(text) + "\n"


def details() -> str:
    """`page`, then each log, as Markdown."""
    text = [
        page(),
        "| log | half | weights | activation peak | KV cache, GiB | KV cache, tokens | CUDA graphs "
        "| result |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in compared():
        cells = ["–" if row[key] is None else f"{row[key]:+.2f}" for key in FIGURES]
        half = "held out" if row["held_out"] else "used"
        logged, ours = _verdict(row["log"]["started"]), _verdict(row["found"]["started"])
        half += ", corrected" if row["corrected"] else ""
        result = logged if row["verdict"] else f"{logged}; here: {ours}"
        text.append(f"| {_title(row['log'])} | {half} | {' | '.join(cells)} | {result} |")
    return "\n".join([*text, *_other_page()]) + "\n"


def compared_other() -> list[Row]:
    """For each log from another source with a result: errors in percent, and both verdicts."""
    return _compared(other(), OTHER_RESULTS)


def compared_newer() -> list[Row]:
    """As `compared_other`, for start-ups of newer versions."""
    return _compared(newer(), NEWER_RESULTS)


def _compared(document: Row, path: Path) -> list[Row]:
    results: Row = {}
    if path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for log in document["logs"]:
        found = results.get(other_name(log))
        if found is None:
            continue
        first = found["ranks"][0] if found.get("ranks") else found
        ours = {
            "weights": _gib(first.get("weights")),
            "activation": _printed_peak(first),
            "kv_cache": _gib(first.get("kv_cache")),
            "tokens": found.get("tokens"),
            "graphs": graphs(found),
        }
        errors = {key: error(ours[key], log[key]) for key in log["compared"]}
        if found.get("later") and "tokens" in log["compared"]:
            errors["later"] = error(found["later"]["tokens"], log["tokens"])
        verdict = found["started"] == log["started"]
        rows.append({"log": log, "found": found, "verdict": verdict, **errors})
    return rows


def _printed_peak(found: Row) -> float | None:
    """The activation peak as vLLM prints it, with what it sets aside for CUDA graphs."""
    if found.get("activation") is None:
        return None
    return _gib(found["activation"] + (found.get("graphs_reserved") or 0))


def _other_page() -> list[str]:
    rows, document = compared_other(), other()
    text = [
        "",
        f"{len(rows)} of {len(document['logs'])} start-ups from other sources were run.",
        "",
        "| start-up | vLLM | compile cache here | weights | KV cache, GiB | KV cache, tokens "
        "| tokens, later start | graphs | result | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        log = row["log"]
        found = [row.get(key) for key in ("weights", "kv_cache", "tokens", "later", "graphs")]
        cells = ["–" if value is None else f"{value:+.2f}" for value in found]
        logged, ours = _verdict(log["started"]), _verdict(row["found"]["started"])
        if "later" in row["found"] and row["found"]["later"]["started"] != row["found"]["started"]:
            ours += f", later {_verdict(row['found']['later']['started'])}"
        result = logged if ours == logged else f"{logged}; here: {ours}"
        title = f"{log['gpu']}: {log['model']} {' '.join(log['options'])}".strip()
        cells.insert(0, row["found"].get("compile_cache", "–"))
        cells.insert(0, log["vllm"])
        text.append(f"| {title} | {' | '.join(cells)} | {result} | {log['source']} |")
    return [*(text if rows else []), *_newer_page()]


def _newer_page() -> list[str]:
    rows, document = compared_newer(), newer()
    text = [
        "",
        f"{len(rows)} of {len(document['logs'])} start-ups of newer versions were run.",
        "",
        "| start-up | vLLM | vLLM here | compile cache here | weights | activation peak "
        "| KV cache, GiB | KV cache, tokens | graphs | result | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        log, found = row["log"], row["found"]
        errors = [row.get(key) for key in FIGURES]
        title = f"{log['gpu']}: {log['model']} {' '.join(log['options'])}".strip()
        cells = [title, log["vllm"], found["vllm"], found.get("compile_cache", "–")]
        cells += ["–" if value is None else f"{value:+.2f}" for value in errors]
        logged, ours = _verdict(log["started"]), _verdict(found["started"])
        cells.append(logged if ours == logged else f"{logged}; here: {ours}")
        text.append(f"| {' | '.join([*cells, log['source'].partition(':')[0]])} |")
    return text if rows else []


def _verdict(started: bool | None) -> str:
    return {True: "starts", False: "fails", None: "not run"}[started]


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _several(row: Row) -> bool:
    return bool(row["log"]["tp"] * row["log"]["pp"] > 1)


def _title(log: Row) -> str:
    parts = [log["model"], f"{log['max_model_len']:,}"]
    parts += [f"TP {log['tp']}"] if log["tp"] > 1 else []
    parts += [f"PP {log['pp']}"] if log["pp"] > 1 else []
    parts += [log["dtype"]] if log.get("dtype") else []
    parts += [f"--quantization {log['quantization']}"] if log.get("quantization") else []
    parts += [f"KV cache {log['kv_cache_dtype']}"] if log.get("kv_cache_dtype") else []
    return ", ".join(parts)


def _summary(values: list[float | None]) -> str:
    known = [abs(value) for value in values if value is not None]
    return f"{mean(known):.2f}, {max(known):.2f}" if known else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description="public start-up logs of vLLM, without a GPU")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--python", default=sys.executable)
    runs.add_argument(
        "--match",
        action="append",
        metavar="TEXT",
        help="only logs whose model and options have it; several times, in this order",
    )
    runs.add_argument("--warm", action="store_true", help="use graphs that were compiled before")
    runs.add_argument("--other", action="store_true", help="start-ups from other sources")
    runs.add_argument("--newer", action="store_true", help="start-ups of newer versions of vLLM")
    commands.add_parser("table")
    args = parser.parse_args()
    if args.command == "run" and args.other:
        run_other(args.python, args.match or [""], other(), OTHER_RESULTS)
    elif args.command == "run" and args.newer:
        run_other(args.python, args.match or [""], newer(), NEWER_RESULTS)
    elif args.command == "run":
        run(args.python, args.match or [""], args.warm)
    else:
        sys.stdout.write(details())
        print(f"median {median(row['found']['seconds'] for row in compared())} s", file=sys.stderr)


if __name__ == "__main__":
    main()
