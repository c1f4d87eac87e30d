"""No program's estimate changes when values become known: random programs over all of torch's
operators.

    python benchmarks/random_programs.py [--programs 1000] [--first SEED] [--state FILE]

A program calls eight entries of ``op_db`` (``torch.testing._internal.common_methods_invocations``),
of the dtypes that CUDA supports, on the samples of torch's own tests or on what an earlier call
returned, some of them in place, some on views of other strides, and runs the backward pass from
the results. Each is run with all values (``compute="real"``), and without, with three limits
of what is computed nevertheless: nothing, what `compute="shapes"` computes, everything.

A program agrees if every call allocates and frees the same sizes in the same order and returns the
same shapes, strides, dtypes and devices, whatever is known. If nothing is computed, a call may
need a value; what ran until there is compared. Prints a table, and each program that does not
agree with the first call that differs. ``--state`` keeps the results, and continues from there.
Needs ``expecttest``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import operator_coverage as coverage  # noqa: E402

from gpuprobe.model.memory import TraceAction  # noqa: E402

GPU = "h100-80gb"
CALLS = 8
BATCH = 20  # programs of one virtual GPU
_FREED = (TraceAction.FREE_REQUESTED.code, TraceAction.FREE_COMPLETED.code)
SAMPLES = 6  # of an operator and dtype
DTYPES = ("float32", "float32", "float16", "bfloat16", "float64", "complex64", "int64", "bool")
LIMITS = {
    "nothing": (0.0, 0.0),
    "small": (2.0**20, 2.0**28),
    "everything": (math.inf, math.inf),
}
"""The most bytes of a floating and of another tensor whose values are computed."""


@dataclasses.dataclass
class Step:
    """One call: an entry of ``op_db``, a sample, and how it is called."""

    op: Any
    sample: Any
    dtype: Any
    in_place: bool
    layout: int
    backward: bool
    choice: float  # which earlier result is the first argument, if any fits


def layouts(tensor: Any, which: int) -> Any:
    """A tensor of the same shape with other strides."""
    if tensor.dim() < 2 or not tensor.numel() or tensor.layout is not _torch().strided:
        return tensor
    if which == 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if which == 2:
        return tensor[tuple(slice(0, 1) for _ in tensor.shape)].expand(tensor.shape)
    return tensor


def _torch() -> Any:
    import torch

    return torch


# -- making programs


class Table:
    """``op_db``, and samples of it on the host."""

    def __init__(self) -> None:
        import torch

        import gpuprobe

        with gpuprobe.virtual_gpu(GPU):  # the table queries the GPU's capability
            from torch.testing._internal.common_methods_invocations import op_db
        self._ops = op_db
        self._samples: dict[tuple[int, Any], list[Any]] = {}
        self._dtypes = [getattr(torch, name) for name in DTYPES]

    def program(self, seed: int) -> list[Step]:
        choose = random.Random(seed)
        found: list[Step] = []
        while len(found) < CALLS:
            at = choose.randrange(len(self._ops))
            dtype = choose.choice(self._dtypes)
            samples = self._of(at, dtype)
            if not samples:
                continue
            op = self._ops[at]
            grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
            sample = choose.choice(samples)
            in_place = op.inplace_variant is not None and not sample.broadcasts_input
            found.append(
                Step(
                    op,
                    sample,
                    dtype,
                    in_place and choose.random() < 0.2,
                    choose.choice((0, 0, 0, 1, 2)),
                    grad and choose.random() < 0.7,
                    choose.random(),
                )
            )
        return found

    def _of(self, at: int, dtype: Any) -> list[Any]:
        import torch

        key = (at, dtype)
        if key in self._samples:
            return self._samples[key]
        op, kept = self._ops[at], []
        if dtype in op.supported_dtypes("cuda") and op.name not in coverage.READS_HOST:
            torch.manual_seed(at)
            try:
                grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
                for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
                    if sample.kwargs.get("driver") in (None, "gels"):  # CUDA's only one
                        kept.append(sample)
                    if len(kept) >= 40:
                        break
            except Exception:  # noqa: BLE001 - the table's own samples, of dtypes the host lacks
                kept = []
        step = max(1, len(kept) // SAMPLES)
        self._samples[key] = kept[::step][:SAMPLES]
        return self._samples[key]


# -- running them


@dataclasses.dataclass
class Trace:
    """What each call allocated and freed, and returned; ``ended``: why a program ended early."""

    calls: list[list[Any]]
    ended: str = ""


def run(program: list[Step], skip: frozenset[int], events: list[Any], bare: bool) -> Trace:
    """``skip``: calls that are left out. ``bare``: only find out which calls are refused."""
    import torch

    from gpuprobe.errors import ValueNeeded

    trace = Trace([])
    kept: list[Any] = []
    for number, step in enumerate(program):
        if number in skip:
            continue
        events.clear()
        try:
            looks = call(step, kept)
        except ValueNeeded as error:
            trace.ended = f"{number} {step.op.formatted_name}: {error}"
            break
        except Exception as error:
            if not bare:
                raise
            trace.ended = f"{number}: {error}"
            break
        trace.calls.append([step.op.formatted_name, looks, in_any_order(events)])
        while len(kept) > 4:
            del kept[int(step.choice * len(kept))]
    kept.clear()
    torch._C._cuda_clearCublasWorkspaces()
    return trace


def in_any_order(events: list[Any]) -> list[Any]:
    """Events of the allocator, with what is freed in a row in the order of sizes: graphs of other
    nodes (dropout with values is one of Python's) are taken apart in another order.
    """
    found: list[Any] = []
    freed: list[Any] = []
    for action, size in events:
        if action in _FREED:
            freed.append((action, size))
            continue
        found += [*sorted(freed), (action, size)]
        freed.clear()
    return found + sorted(freed)


def call(step: Step, kept: list[Any]) -> list[Any]:
    """Returns the looks of all results and gradients."""
    import torch

    first, args, kwargs = coverage.on("cuda", step.sample, {})
    torch.manual_seed(0)
    if isinstance(first, torch.Tensor):
        alike = [item for item in kept if item.shape == first.shape and item.dtype == first.dtype]
        grad = first.requires_grad
        if alike and step.choice < 0.7:
            first = alike[int(step.choice * len(alike) / 0.7)]
        first = layouts(first.detach(), step.layout).requires_grad_(grad)
    run_it: Callable[..., Any] = step.op
    if step.in_place:
        first, run_it = first.detach().clone(), step.op.inplace_variant
    given = [first, list(args), kwargs]
    leaves = [item for item in coverage.tensors_of(given) if item.requires_grad and item.is_leaf]
    if step.in_place or not step.backward:
        leaves = []
    with torch.set_grad_enabled(bool(leaves)):
        result = run_it(first, *args, **kwargs)
    results = list(coverage.tensors_of(result))
    looks = [coverage.looks(item) for item in results]
    ends = [item for item in results if item.requires_grad]
    if leaves and ends:
        ones = [torch.ones_like(item) for item in ends]
        grads = torch.autograd.grad(ends, leaves, ones, allow_unused=True)
        looks += [coverage.looks(item) for item in grads]
        del grads, ones
    kept.extend(item.detach() for item in results if item.layout is torch.strided)
    return looks


def run_all(
    programs: list[list[Step]], skips: list[frozenset[int]], mode: str, limits: Any, bare: bool
) -> list[Trace]:
    """Run several programs on one virtual GPU."""
    import torch

    import gpuprobe

    found = []
    with gpuprobe.virtual_gpu(GPU, "real" if mode == "real" else "shapes") as session:
        if limits is not None:
            session.machine.limits.floating, session.machine.limits.others = limits
        events: list[Any] = []

        def listen(action: int, address: int, size: int, stream: int, pool: int) -> None:
            events.append((action, size))

        session.machine.devices[0].listeners.append(listen)
        for program, skip in zip(programs, skips, strict=True):
            gc.collect()
            torch.cuda.empty_cache()
            gc.disable()
            try:
                found.append(run(program, skip, events, bare))
            finally:
                gc.enable()
    return found


# -- comparing


def refused(programs: list[list[Step]]) -> list[frozenset[int]]:
    """For each program the calls that raise with values: a form that an operator does not take."""
    skips = [frozenset[int]() for _ in programs]
    open_ones = list(range(len(programs)))
    while open_ones:
        traces = run_all(
            [programs[i] for i in open_ones], [skips[i] for i in open_ones], "real", None, True
        )
        again = []
        for i, trace in zip(open_ones, traces, strict=True):
            if trace.ended:
                skips[i] |= {int(trace.ended.partition(":")[0].split()[0])}
                again.append(i)
        open_ones = again
    return skips


def difference(found: Trace, wanted: Trace) -> str:
    """The first call that differs, in words; "" for none."""
    for one, other in zip(found.calls, wanted.calls, strict=False):
        for what, left, right in zip(("call", "results", "memory"), one, other, strict=True):
            if left != right:
                return f"{one[0]}: {what} {left}, with values {right}"
    return "" if found.ended or len(found.calls) == len(wanted.calls) else "another number of calls"


def judge(table: Table, seeds: list[int]) -> list[dict[str, Any]]:
    """Run the programs of some seeds in all ways, and compare."""
    gc.collect()
    gc.freeze()  # so that collections after each program skip present objects
    try:
        return _judged(table, seeds)
    finally:
        gc.unfreeze()


def _judged(table: Table, seeds: list[int]) -> list[dict[str, Any]]:
    programs = [table.program(seed) for seed in seeds]
    skips = refused(programs)
    wanted = run_all(programs, skips, "real", None, False)
    rows: list[dict[str, Any]] = [
        {"seed": seed, "calls": len(trace.calls), "refused": len(skip)}
        for seed, trace, skip in zip(seeds, wanted, skips, strict=True)
    ]
    for name, limits in LIMITS.items():
        try:
            found = run_all(programs, skips, "shapes", limits, False)
        except Exception:  # noqa: BLE001 - one of them: which, and with what, is found one by one
            found = [_alone(one, skip, limits) for one, skip in zip(programs, skips, strict=True)]
        for row, trace, other in zip(rows, found, wanted, strict=True):
            row[name] = difference(trace, other)
            row[f"{name}: calls"] = len(trace.calls)
            if trace.ended:
                row[f"{name}: ended"] = trace.ended
    return rows


def _alone(program: list[Step], skip: frozenset[int], limits: Any) -> Trace:
    try:
        return run_all([program], [skip], "shapes", limits, False)[0]
    except Exception as error:  # noqa: BLE001 - it is what is reported
        return Trace([[f"raised {type(error).__name__}: {error}", [], []]])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the documentation quotes."""
    return {
        "programs": len(rows),
        "calls": sum(row["calls"] for row in rows),
        "figures": [
            {
                "computed": name,
                "agree": sum(not row[name] for row in rows),
                "calls": sum(row[f"{name}: calls"] for row in rows),
                "ended": sum(f"{name}: ended" in row for row in rows),
            }
            for name in LIMITS
        ],
    }


def table_of(rows: list[dict[str, Any]]) -> str:
    found = summary(rows)
    lines = [f"{found['programs']} programs, {found['calls']} calls", ""]
    lines.append("what is computed   programs that agree   calls compared   ended for a value")
    for row in found["figures"]:
        agree = f"{row['agree']:8} of {len(rows):5}"
        lines.append(f"{row['computed']:16}   {agree}   {row['calls']:14}   {row['ended']:17}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--state", type=Path, help="keep what was found, and go on from there")
    parser.add_argument("--minutes", type=float, help="end after so many; the next call goes on")
    parser.add_argument("--results", type=Path, help="write the counts that the docs quote here")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    if given.state is not None and given.state.exists():
        rows = [json.loads(line) for line in given.state.read_text().splitlines()]
    done = {row["seed"] for row in rows}
    wanted = range(given.first, given.first + given.programs)
    todo = [seed for seed in wanted if seed not in done]
    began = time.monotonic()
    if todo:
        table = Table()
    for at in range(0, len(todo), BATCH):
        if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
            print(f"{len(todo) - at} programs are left", file=sys.stderr)
            break
        new = judge(table, todo[at : at + BATCH])
        rows.extend(new)
        if given.state is not None:
            with given.state.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    rows = [row for row in rows if row["seed"] in set(wanted)]
    kinds: Counter[str] = Counter()
    for row in rows:
        for name in LIMITS:
            if row[name]:
                kinds[row[name].partition(":")[0]] += 1
                print(f"program {row['seed']}, {name} computed: {row[name][:600]}")
    for kind, count in kinds.most_common():
        print(f"{count:5} {kind}")
    print(table_of(rows))
    if given.results is not None:
        given.results.write_text(json.dumps(summary(rows), indent=1) + "\n")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
