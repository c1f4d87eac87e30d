"""The published peak of a compiled training on 8 GPUs, and the one that `gpuprobe estimate`
predicts.

    python benchmarks/nanochat_peak.py [--results FOLDER]

nanochat's speedrun of October 2025 (20 layers, 561 million parameters, 32 sequences of 2,048
tokens on each of 8 GPUs) prints ``torch.cuda.max_memory_allocated`` at its end: 75422.02 MiB in
six public reports of 14 October to 11 November 2025, of which one names H20 GPUs and torch
2.8.0+cu128. The program is ``nanochat_train.py``, which needs three steps: in the third, what the
optimizers of the second have sent is still there.

Run it with torch 2.8 or 2.9 and Triton; later versions of the compiler generate other programs.
Takes two minutes. The exit code is 1 if the estimate rounds to another figure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "benchmarks" / "nanochat_train.py"
PUBLISHED = 75422.02
GPU, RANKS, STEPS = "8xh100-80gb", 8, 3


def estimated(folder: Path) -> float:
    """MiB, from ``folder`` if it is there already."""
    kept = folder / "nanochat.json"
    if not kept.exists():
        words = ["--gpu", GPU, "--ranks", str(RANKS), "--steps", str(STEPS)]
        done = subprocess.run(
            [sys.executable, "-m", "gpuprobe", "estimate", *words, "--json", str(PROGRAM)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise SystemExit("the estimate failed")
        kept.write_bytes(done.stdout)
    found: float = json.loads(kept.read_text())["peak_allocated"] / 2**20
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    version = metadata.version("torch").split(".")[:2]
    if version not in (["2", "8"], ["2", "9"]) or importlib.util.find_spec("triton") is None:
        raise SystemExit(f"needs torch 2.8 or 2.9 with Triton, not {metadata.version('torch')}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = estimated(folder)
    print(f"published  {PUBLISHED:>9.2f} MiB")
    print(f"estimated  {found:>9.2f} MiB  {found / PUBLISHED - 1:+.4%}")
    return round(found, 2) != PUBLISHED


if __name__ == "__main__":
    raise SystemExit(main())
