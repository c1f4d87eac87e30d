"""What torch allocates for its own samples of its operators (`op_db`), bare and recorded.

    python benchmarks/unchanged_operators.py [--under hazards|values] [--samples 3] [--only PATTERN]

Recording can change how some operators and formulas of derivatives work: a dispatch mode of Python
has them take tensors for instances of a subclass, and make new ones where they would work in place.
Each sample runs forward and backward: bare; and where torch has a device (with a CUDA build, the
native engine's, on which kernels compute nothing) within `detect_hazards`, or with
``--under values`` while the native engine computes values; on the CPU within a trace. Compared are
the sizes of all allocations and frees, in order, and errors. Needs expecttest.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import native_start  # noqa: E402

if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    native_start.restart("h100-80gb")

import torch  # noqa: E402
import unchanged_programs  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

import gpuprobe  # noqa: E402
from gpuprobe.native.values.session import Values  # noqa: E402


def run(op: Any, sample: Any, backward: bool) -> None:
    result = op(sample.input, *sample.args, **sample.kwargs)
    if backward:
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        sums = [
            (one.abs() if one.is_complex() else one).sum()
            for one in results
            if isinstance(one, torch.Tensor) and one.requires_grad
        ]
        if sums:
            sum(sums).backward()  # type: ignore[union-attr]


def allocations(op: Any, sample: Any, backward: bool, device: str) -> tuple[list[int], str]:
    """Sizes, frees negative, and the error's type."""
    error = ""
    with unchanged_programs.profiled("cpu" if device == "cpu" else "cuda") as profile:
        try:
            run(op, sample, backward)
        except Exception as raised:  # noqa: BLE001 - the same one is expected under a watch
            error = type(raised).__name__
    return unchanged_programs.settled_sizes(profile.sizes), error


def watched(op: Any, sample: Any, backward: bool, device: str, under: str) -> tuple[list[int], str]:
    if under == "values":
        with Values():
            return allocations(op, sample, backward, device)
    if device == "cpu":
        output = Path(tempfile.gettempdir()) / "operators.gpuprobe"
        with gpuprobe.record(output, trace_steps="all", force=True):
            return allocations(op, sample, backward, device)
    with gpuprobe.detect_hazards() as found:
        result = allocations(op, sample, backward, device)
    failures = [text for text in found.coverage if "failure" in text]
    return result if not failures else (result[0], failures[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--under", choices=("hazards", "values"), default="hazards")
    parser.add_argument("--dtypes", default="float32", help="names separated by commas")
    parser.add_argument("--samples", type=int, default=3, help="of each operator; 0: all")
    parser.add_argument("--only", default="", help="regular expression of operators' names")
    parser.add_argument("--show", type=int, default=1, help="differences to print, of each")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.01)  # counts that nothing computes are large
    counts: Counter[str] = Counter()
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        for dtype in (getattr(torch, text) for text in given.dtypes.split(",")):
            if not re.search(given.only, name) or dtype not in op.supported_dtypes(device):
                continue
            backward = dtype in op.supported_backward_dtypes(device) and op.supports_autograd
            try:
                with Values() if given.under == "values" else nullcontext():
                    samples = list(op.sample_inputs(device, dtype, requires_grad=backward))
            except Exception:  # noqa: BLE001 - values decide
                counts["without samples"] += 1
                continue
            different = 0
            for sample in samples[: given.samples or None]:
                allocations(op, sample, backward, device)  # what only the first call makes
                bare = allocations(op, sample, backward, device)
                other = watched(op, sample, backward, device, given.under)
                if bare != other:
                    bare = allocations(op, sample, backward, device)
                    other = watched(op, sample, backward, device, given.under)
                if given.under == "values" and bare[1]:
                    counts["values decide"] += 1  # nothing computes those that the bare call reads
                    continue
                counts["calls"] += 1
                if bare != other:
                    counts["different"] += 1
                    different += 1
                    if different <= given.show:
                        print(f"{name} {dtype}: bare {bare}, watched {other}"[:600], flush=True)
            counts["operators"] += 1
            counts["operators that differ"] += bool(different)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return int(bool(counts["different"]))


if __name__ == "__main__":
    sys.exit(main())
