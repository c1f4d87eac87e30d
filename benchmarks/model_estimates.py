"""Estimate every model that gpuprobe knows, and print a table: ``docs/verification/models.md``.

Run with a build of torch with CUDA, transformers, peft and bitsandbytes::

    python benchmarks/model_estimates.py --method full > full.jsonl

Each model is one ``gpuprobe estimate --model``; each line of the result is JSON. With ``--by-hand``
the script of ``--write-script`` is also run by ``gpuprobe estimate SCRIPT``, and both are compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpuprobe.planning.models.configs import known_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(known_models()))
    parser.add_argument("--gpu", default="h200-141gb")
    parser.add_argument("--method", default="full")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--by-hand", action="store_true")
    args = parser.parse_args()
    for name in args.models:
        print(json.dumps(row(name, args)), flush=True)


def row(name: str, args: argparse.Namespace) -> dict[str, object]:
    """The estimate of a model: bytes, seconds, and whether a run by hand gives the same."""
    model = known_models()[name]
    options = ["--model", name, "--method", args.method, "--no-suggestions"]
    if model.task != "images":
        most = {"speech": 128}.get(model.task, args.sequence_length)
        options += ["--sequence-length", str(most)]
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder, "train.py"))
        begin = time.monotonic()
        found = estimate([*options, "--write-script", script], args.gpu)
        result = {
            "model": name,
            "parameters": model.parameters,
            "method": args.method,
            "seconds": round(time.monotonic() - begin, 1),
            **found,
        }
        if args.by_hand:
            result["by_hand"] = estimate([script, "--no-suggestions"], args.gpu) == found
    return result


def estimate(words: list[str], gpu: str) -> dict[str, object]:
    """The peak of an estimate in bytes, or why there is none."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "estimate", *words, "--gpu", gpu, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        return {"error": done.stderr.strip().rpartition("\n")[2]}
    document = json.loads(done.stdout)
    keys = ("peak_allocated", "reserved", "total", "steps", "engine")
    return {key: document[key] for key in keys if key in document}


if __name__ == "__main__":
    main()
