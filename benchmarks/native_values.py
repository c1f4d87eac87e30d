"""Values of torch's own operator tests (``op_db``, float32) on the native engine and on the CPU.

For each operator, the first samples are computed on the CPU and, with `Values`, on the device, with
their gradients, and the largest difference is printed, relative to the largest value. Operators
that the runtime does not answer and those that are refused are listed by name. Needs a CUDA build
of torch, expecttest and no GPU.

    python benchmarks/native_values.py [--samples 5] [OPERATOR ...]
    python benchmarks/native_values.py --programs [--compute real,auto,shapes] [PROGRAM ...]

The last runs the programs of ``tests/native/value_programs``, whose path, sizes or numbers depend
on values, and compares what they print with the same program on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native_operators

RANDOM = ("dropout", "bernoulli", "normal", "rand", "uniform", "multinomial", "geometric",
          "exponential", "cauchy", "empty", "rrelu", "new_empty", "poisson")  # fmt: skip
CLOSE = 1e-4
GPU = "h100-80gb"
LIMIT = 60  # seconds for an operator


def move(value: Any, device: str) -> Any:
    """A copy of nested tensors on a device; names of the CPU become that device."""
    import torch
    from torch.utils._pytree import tree_map

    def one(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            made = item.detach().to(device, copy=True)
            return made.requires_grad_(item.requires_grad)
        return (
            torch.device(device)
            if isinstance(item, (torch.device, str)) and str(item) == "cpu"
            else item
        )

    return tree_map(one, value)


def results(op: Any, sample: Any, device: str) -> list[Any]:
    """What an operator returns on a device, and the gradients, on the CPU."""
    import torch
    from torch.utils._pytree import tree_flatten

    torch.manual_seed(0)
    given, args, kwargs = (
        move(part, device) for part in (sample.input, sample.args, sample.kwargs)
    )
    out = op(given, *args, **kwargs)
    flat = [item for item in tree_flatten(out)[0] if isinstance(item, torch.Tensor)]
    leaves = [
        item
        for item in tree_flatten((given, args, kwargs))[0]
        if isinstance(item, torch.Tensor) and item.requires_grad
    ]
    differentiable = [item for item in flat if item.requires_grad]
    grads: Any = []
    if differentiable and leaves and op.supports_autograd:
        grads = torch.autograd.grad(
            differentiable, leaves, [torch.ones_like(item) for item in differentiable],
            allow_unused=True,
        )  # fmt: skip
    return [
        item.detach().to_dense().cpu() if item.layout is not torch.strided else item.detach().cpu()
        for item in (*flat, *(grad for grad in grads if grad is not None))
    ]


def distance(a: Any, b: Any) -> float:
    """The largest difference of two tensors, relative to the largest value."""
    import torch

    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = a.resolve_conj().to(torch.complex128), b.resolve_conj().to(torch.complex128)
    a, b = torch.view_as_real(a), torch.view_as_real(b)
    same = (a == b) | (a.isnan() & b.isnan())
    a, b = torch.where(same, 0, a), torch.where(same, 0, b)
    if not bool((a.isfinite() & b.isfinite()).all()):
        return math.inf
    return float((a - b).abs().max() / (a.abs().max() + 1e-12))


def compared(op: Any, inputs: list[Any]) -> dict[str, Any]:
    """How far the values of an operator are from the CPU's, over some samples."""
    from gpuprobe.native.values.session import Values

    worst, errors, ran = 0.0, [], 0
    for sample in inputs:
        try:
            expected = results(op, sample, "cpu")
        except Exception:  # noqa: BLE001 - not on the CPU: nothing to compare
            continue
        try:
            with Values():
                found = results(op, sample, "cuda")
            if not any(word in op.name for word in RANDOM):
                parts = [distance(a, b) for a, b in zip(expected, found, strict=False)]
                worst = max([worst, *parts, 0.0 if len(expected) == len(found) else math.inf])
            ran += 1
        except Exception as error:  # noqa: BLE001 - listed
            errors.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}")
    return {"ran": ran, "worst": worst, "errors": errors}


def row_of(op: Any, samples: int) -> dict[str, Any]:
    """One operator's first samples, as `compared` has them; or why it has none."""
    import torch

    row: dict[str, Any] = {"name": f"{op.name}.{op.variant_test_name}".rstrip(".")}
    try:
        made = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        inputs = list(itertools.islice(made, samples))
    except Exception as error:  # noqa: BLE001 - its samples need something that is missing
        return {**row, "no_samples": str(error)[:90]}
    return {**row, **compared(op, inputs)}


def operators(names: list[str], samples: int) -> None:
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    # torch counts devices with NVML then, and not with CUDA, after which it refuses to fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    load(parse_spec(GPU))
    import torch

    torch.set_num_threads(1)
    table = native_operators.operators(GPU)
    ops = [op for op in table if torch.float32 in op.dtypes and (not names or op.name in names)]
    rows: list[dict[str, Any]] = []
    lost: list[str] = []
    begun = 0
    while begun < len(ops):

        def run(report: Callable[[dict[str, Any]], None], first: int = begun) -> None:
            for op in ops[first:]:
                report({})
                report(row_of(op, samples))

        for entry in native_operators.in_child(run, LIMIT):
            if not entry:
                begun += 1
            elif "lost" in entry:
                lost.append(f"{ops[begun - 1].name}: {entry['lost']}")
            else:
                rows.append(entry)
    ran = [row for row in rows if row.get("ran")]
    equal = [row for row in ran if row["worst"] == 0]
    close = [row for row in ran if 0 < row["worst"] <= CLOSE]
    print(
        f"{len(ops)} operators, {len(ran)} ran on the device: {len(equal)} equal, "
        f"{len(close)} within {CLOSE}"
    )
    print("\ndiffer:")
    for row in ran:
        if row["worst"] > CLOSE:
            print(f"  {row['name']:<50} {row['worst']:.3g}")
    print("\nerrors:")
    for row in rows:
        for text in dict.fromkeys(row.get("errors", ())):
            print(f"  {row['name']:<50} {text}")
    print("\nno samples:", [row["name"] for row in rows if "no_samples" in row])
    print("lost:", lost)


PROGRAMS = Path(__file__).parents[1] / "tests" / "native" / "value_programs"
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|nan|inf")


def ran(program: Path, device: str, compute: str, limit: int = 600) -> tuple[int, str, str]:
    """The exit code, output and messages of a program below ``gpuprobe run`` on a T4, in a process
    that is forked from this one: importing torch takes longer than most of the programs.
    """
    arguments = ["run", "--gpu", "t4", *(["--compute", compute] if compute else [])]
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        process = os.fork()
        if not process:
            os.chdir(folder)
            for number, path in ((1, out), (2, errors)):
                os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
            signal.alarm(limit)
            code = 70
            try:
                from gpuprobe.cli import main

                arguments += ["-o", "run.gpuprobe", str(program), device]
                sys.orig_argv = [sys.executable, "-m", "gpuprobe", *arguments]  # may start again
                code = main(arguments)
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return code, out.read_text(), errors.read_text()


def same_output(expected: str, printed: str) -> bool:
    """Whether two outputs are equal, their fractions within 1%: a CPU kernel may sum otherwise."""
    if NUMBER.sub("#", expected) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(expected), NUMBER.findall(printed), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=1e-2, abs_tol=1e-3) for a, b in pairs)


def outcome(program: Path, expected: str, run: tuple[int, str, str]) -> str:
    """``same``, ``named`` (a message names the line of the program that decided) or ``silent``."""
    code, printed, messages = run
    if code == 0 and same_output(expected, printed):
        return "same"
    named = any(
        f"{program.name}:" in line
        for line in messages.splitlines()
        if not line.startswith("  File")
    )
    return "named" if named else "silent"


def programs(names: list[str], ways: list[str]) -> None:
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec("t4"))
    import torch  # noqa: F401 - for the processes that are forked

    import gpuprobe.cli

    assert gpuprobe.cli
    totals: dict[str, dict[str, int]] = {way: {} for way in ways}
    print(f"{'program':<24}" + "".join(f"{way:>16}" for way in ways), flush=True)
    for program in sorted(PROGRAMS.glob("*.py")):
        if names and program.stem not in names:
            continue
        code, expected, messages = ran(program, "cpu", "")
        if code:
            raise SystemExit(f"{program.name} fails on the CPU:\n{messages}")
        cells = []
        for way in ways:
            begin = time.perf_counter()
            run = ran(program, "cuda", way)
            result = outcome(program, expected, run)
            totals[way][result] = totals[way].get(result, 0) + 1
            cells.append(f"{result} {time.perf_counter() - begin:5.1f} s")
            if result == "silent":
                print(f"--- {way}: exit {run[0]}\n{expected}---\n{run[1]}{run[2][-600:]}")
        print(f"{program.stem:<24}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    for way, counts in totals.items():
        print(f"{way}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--compute", default="real,auto,shapes", help="with --programs")
    given = parser.parse_args()
    if given.programs:
        programs(given.operators, given.compute.split(","))
    else:
        operators(given.operators, given.samples)
