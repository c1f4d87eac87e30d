"""torch's own table of operators, on a virtual GPU: every dtype that CUDA supports.

    python benchmarks/operator_coverage.py [--state DIR] [--samples N] [--ops NAME ...] [--retry]

For every entry of ``op_db`` (``torch.testing._internal.common_methods_invocations``) and every
dtype that it lists for CUDA, sample inputs are made on the host, moved to a virtual GPU and run,
forward and, where CUDA supports it, backward, with values (``real``) and without (``shapes``).

A pair of operator and dtype passes with values if nothing raises and results and gradients are
the host's (computed there in the nearest dtype where the host lacks that one); it passes without
values if nothing raises and results, gradients (shapes, strides, dtypes, devices) and the peak of
allocated memory are those with values. Prints a table and each failure; writes ``STATE/all.json``.
``--results benchmarks/operator_results.json`` writes what the documentation quotes.

Takes ten minutes or more, and continues where it stopped: ``STATE`` keeps what was found,
``--retry`` runs again what failed. Workers run some operators each; one that dies or that takes
longer than `LIMIT` for an operator is replaced, and that operator is noted as such. Needs
``expecttest``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

LIMIT = 120.0  # seconds for one operator in one mode
CHUNK = 48  # operators of one worker
GPU = "h100-80gb"
MODES = ("real", "shapes")
NOT_NUMBERS = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                         "new_empty_strided"})  # fmt: skip
"""Operators whose results have no values that mean anything."""
READS_HOST = frozenset({"tensor_split"})
"""Operators of which CUDA takes one tensor on the device, and the others on the host only."""
ON_HOST = frozenset({"torch.ops.aten._efficient_attention_forward"})
"""Operators of which CUDA returns some results on the host: the state of its generator."""
STATISTICS = frozenset({"native_batch_norm", "_native_batch_norm_legit"})
"""Operators that return what they save for the backward pass: empty on the host in evaluation."""


# -- one call, and what came of it


@dataclasses.dataclass
class Outcome:
    """``results`` and ``grads`` in the order of the call; ``peak`` in bytes above what was
    allocated before it.
    """

    results: list[Any]
    grads: list[Any]
    peak: int = 0
    error: str = ""


def tensors_of(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to everything but containers."""
    if type(value) in (list, tuple):
        return type(value)(changed(item, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(item, change) for item in value))
    if type(value) is dict:
        return {name: changed(item, change) for name, item in value.items()}
    if isinstance(value, slice):
        return value
    return change(value)


def copied(tensor: Any, device: Any, dtype: Any = None) -> Any:
    """A leaf of the same sizes, strides and values."""
    import torch

    grad = tensor.requires_grad
    with torch.no_grad():
        given = tensor.detach()
        if given.layout is not torch.strided:
            made = given.to(device=device, dtype=dtype, copy=True)
        else:
            conj, neg = given.is_conj(), given.is_neg()
            given = torch._neg_view(given) if neg else given
            given = given.conj() if conj else given
            length = given.untyped_storage().nbytes() // given.element_size()
            flat = given.as_strided((length,), (1,), 0)
            flat = flat.to(device=device, dtype=dtype, copy=True)
            made = flat.as_strided(given.size(), given.stride(), given.storage_offset())
            made = made.conj() if conj else made
            made = torch._neg_view(made) if neg else made
    return made.requires_grad_() if grad else made


def on(
    device: Any, sample: Any, dtypes: dict[Any, Any], *, first_only: bool = False
) -> tuple[Any, Any, Any]:
    """The arguments of a sample, moved; ``dtypes`` replaces some dtypes by others."""
    import torch

    known: dict[int, Any] = {}

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                place = "cpu" if first_only and value is not sample.input else device
                known[id(value)] = copied(value, place, dtypes.get(value.dtype))
            return known[id(value)]
        if isinstance(value, torch.device) and value.type == "cpu":
            return torch.device(device)
        if isinstance(value, torch.dtype):
            return dtypes.get(value, value)
        if isinstance(value, torch.Generator):
            return torch.Generator(device=device)
        return torch.device(device) if isinstance(value, str) and value == "cpu" else value

    whole = (sample.input, sample.args, sample.kwargs)
    return tuple(changed(part, change) for part in whole)  # type: ignore[return-value]


def run(op: Any, sample: Any, device: str, backward: bool, dtypes: dict[Any, Any]) -> Outcome:
    """One call on a device. What it raises is noted as the outcome's ``error``."""
    import torch

    outcome = Outcome([], [])
    try:
        host_too = op.name in READS_HOST
        first, args, kwargs = on(device, sample, dtypes, first_only=host_too)
        before = 0
        if device == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        with torch.set_grad_enabled(backward):
            result = op(first, *args, **kwargs)
            outcome.results = list(tensors_of(result))
            if backward:
                outcome.grads = gradients(sample, result, (first, args, kwargs))
        if device == "cuda":
            outcome.peak = torch.cuda.max_memory_allocated() - before
    except Exception as error:  # noqa: BLE001 - this is what is counted
        lines = str(error).strip().splitlines()
        outcome.error = f"{type(error).__name__}: {' '.join(lines)[:400]}"
    return outcome


def gradients(sample: Any, result: Any, arguments: Any) -> list[Any]:
    import torch

    leaves = [tensor for tensor in tensors_of(list(arguments)) if tensor.requires_grad]
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    ends = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    if not leaves or not ends:
        return []
    given = [torch.ones_like(tensor) for tensor in ends]
    return list(torch.autograd.grad(ends, leaves, given, allow_unused=True))


# -- comparing


def looks(tensor: Any) -> Any:
    """What is compared of a tensor between both modes."""
    import torch

    if tensor is None:
        return None
    strides: Any = None
    if tensor.layout is torch.strided:
        # The stride of a dimension with one element, or of no elements, has no meaning.
        strides = [
            stride
            for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
            if size != 1 and tensor.numel()
        ]
    return [str(tensor.dtype), list(tensor.shape), strides, str(tensor.device), str(tensor.layout)]


def host(tensor: Any) -> Any:
    """Values as an ordinary tensor, which outlives a virtual GPU."""
    if tensor is None:
        return None
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def differs(found: Any, wanted: Any) -> str:
    """How values differ; "" where they do not. ``wanted`` may be of another dtype."""
    import torch

    if found is None or wanted is None:
        return "" if found is wanted else f"gradient is {'None' if found is None else 'not None'}"
    if found.layout is not torch.strided:
        found, wanted = found.to_dense(), wanted.to_dense()
    if tuple(found.shape) != tuple(wanted.shape):
        return f"shape {tuple(found.shape)}, on the host {tuple(wanted.shape)}"
    same = found.dtype is wanted.dtype
    whole = not (found.is_floating_point() or found.is_complex())
    if (
        not same
        and not (whole and wanted.is_floating_point())
        and (found.is_floating_point(), found.is_complex())
        != (
            wanted.is_floating_point(),
            wanted.is_complex(),
        )
    ):
        return f"dtype {found.dtype}, on the host {wanted.dtype}"
    wide = torch.complex128 if found.is_complex() else torch.float64
    if not found.is_floating_point() and not found.is_complex():
        wide = torch.int64
    one, other = found.to(wide), wanted.to(found.dtype).to(wide)
    if found.dtype is torch.complex32 and not same:
        # Formulas of several operators overflow on the way, in half precision, as on CUDA.
        fits = one.isfinite()
        one, other = one[fits], other[fits]
    if found.is_floating_point() or found.is_complex():
        # Kernels sum up in different orders: what is small next to the rest is less exact.
        fine = 64 * torch.finfo(found.dtype).eps
        scale = float(other.abs().nan_to_num(0, 0, 0).max()) if other.numel() else 0.0
        close = torch.allclose(one, other, rtol=fine, atol=fine * max(1.0, scale), equal_nan=True)
    else:
        close = torch.equal(one, other)
    return "" if close else f"values differ ({found.dtype}; computed in {wanted.dtype})"


# -- a worker


def nearest(dtype: Any) -> list[Any]:
    """Dtypes to compute a reference in, from the nearest."""
    import torch

    if dtype is torch.complex32:
        return [dtype, torch.complex64]
    if dtype.is_floating_point and dtype.itemsize < 4:
        return [dtype, torch.float32]
    if dtype is torch.bool:
        return [dtype, torch.uint8, torch.int64]
    if not dtype.is_floating_point and not dtype.is_complex:
        return [dtype, torch.int64, torch.float64]
    return [dtype]


@dataclasses.dataclass
class Case:
    """One sample of an operator and a dtype, and the host's results."""

    sample: Any
    backward: bool
    wanted: Outcome | None  # None where the host has no answer
    looks: Any = None  # of the run with values


def cases_of(op: Any, dtype: Any, count: int) -> Iterator[Case]:
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cuda")
    kept: list[Any] = []
    try:
        for sample in op.sample_inputs("cpu", dtype, requires_grad=backward):
            if sample.kwargs.get("driver") in (None, "gels"):  # CUDA's only one
                kept.append(sample)
            if len(kept) >= 256:
                break
    except (IndexError, RuntimeError):
        if not kept:
            raise
    step = max(1, len(kept) / count)  # spread over all
    for at in range(min(count, len(kept))):
        sample = kept[int(at * step)]
        wanted = None
        for other in nearest(dtype):
            outcome = run(op, sample, "cpu", backward, {dtype: other} if other != dtype else {})
            if not outcome.error:
                wanted = Outcome([host(t) for t in outcome.results], list(map(host, outcome.grads)))
                break
        yield Case(sample, backward, wanted)


def _unlike(seen: list[Any], looks: list[Any] | None) -> tuple[str, str]:
    """The first difference of a run without values from one with them; ("", "") for none."""
    if looks is None:
        return "", ""
    for one, other in zip(seen, looks, strict=False):
        if one != other:
            return "peak" if isinstance(one, int) else "layout", f"{one}, with values {other}"
    return ("layout", "another number of results") if len(seen) != len(looks) else ("", "")


def judged(op: Any, case: Case, mode: str) -> tuple[str, str]:
    """Kind of failure and what it is in words; ("", "") for none."""
    outcome = run(op, case.sample, "cuda", case.backward, {})
    if outcome.error:
        kind = outcome.error.partition(":")[0]
        return ("raised" if kind not in ("NotModelled", "ValueNeeded") else kind), outcome.error
    seen = [*map(looks, outcome.results), "gradients", *map(looks, outcome.grads), outcome.peak]
    if mode == "shapes":
        return _unlike(seen, case.looks)
    case.looks = seen
    off = [place for item in seen if isinstance(item, list) and (place := item[3]) != "cuda:0"]
    if off and op.name not in ON_HOST:
        return "place", f"a result or gradient on {off[0]}"
    if case.wanted is None or op.name in NOT_NUMBERS:
        return "", ""
    for what in ("results", "grads"):
        found, wanted = getattr(outcome, what), getattr(case.wanted, what)
        if len(found) != len(wanted):
            return "values", f"{len(found)} {what}, on the host {len(wanted)}"
        for one, other in zip(found, wanted, strict=True):
            if op.name in STATISTICS and not other.numel():
                continue
            if difference := differs(host(one), other):
                return "values", f"{what}: {difference}"
    return "", ""


def work(path: Path, todo: dict[int, list[str]], samples: int) -> None:
    """Run some operators and append what comes of it to a file: a line before each pair and
    mode, a line after it.
    """
    import torch

    import gpuprobe

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with gpuprobe.virtual_gpu(GPU):  # the table queries the GPU's capability
        from torch.testing._internal.common_methods_invocations import op_db
    gc.freeze()  # the table: there is no need to look through it after each operator
    wanted = {mode for modes in todo.values() for mode in modes}
    out = path.open("a", buffering=1)

    def note(**row: Any) -> None:
        out.write(json.dumps(row) + "\n")

    cases: dict[tuple[int, Any], list[Case]] = {}
    broken: dict[tuple[int, Any], str] = {}
    for index in todo:
        note(at=index, mode="host")
        op = op_db[index]
        for dtype in sorted(op.supported_dtypes("cuda"), key=str):
            try:
                torch.manual_seed(0)
                cases[index, dtype] = list(cases_of(op, dtype, samples))
            except Exception as error:  # noqa: BLE001 - the table's own samples
                broken[index, dtype] = f"{type(error).__name__}: {str(error)[:200]}"

    def run_operator(index: int, mode: str) -> None:
        op = op_db[index]
        note(at=index, mode=mode)
        for dtype in sorted(op.supported_dtypes("cuda"), key=str):
            key = (index, dtype)
            row = {"op": op.formatted_name, "index": index, "mode": mode,
                   "dtype": str(dtype).removeprefix("torch.")}  # fmt: skip
            if key in broken:
                note(**row, kind="no sample", what=broken[key], samples=0)
                continue
            outcomes = (judged(op, case, mode) for case in cases[key])
            kind, what = next((found for found in outcomes if found[0]), ("", ""))
            if mode in todo[index]:
                note(**row, kind=kind, what=what, samples=len(cases[key]))
        gc.collect()

    for mode in MODES:
        if mode not in wanted and not (mode == "real" and "shapes" in wanted):
            continue
        with gpuprobe.virtual_gpu(GPU, compute=mode):
            for index in todo:
                run_operator(index, mode)
    note(done=True)


# -- the whole


def follow(state: Path, todo: dict[int, list[str]], samples: int) -> None:
    """Run a worker; note the operator that crashes or hangs it, and continue."""
    lines = state / "rows.jsonl"
    while todo:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.touch()
            worker = subprocess.Popen(
                [sys.executable, __file__, "--worker", str(path), "--samples", str(samples)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            assert worker.stdin is not None
            assert worker.stderr is not None
            worker.stdin.write(json.dumps(todo).encode())
            worker.stdin.close()
            size, since = -1, time.monotonic()
            ended = None
            os.set_blocking(worker.stderr.fileno(), False)
            tail = b""
            while ended is None:
                time.sleep(0.2)
                tail = (tail + (worker.stderr.read() or b""))[-4000:]
                ended = worker.poll()
                now = path.stat().st_size
                if now != size:
                    size, since = now, time.monotonic()
                elif ended is None and time.monotonic() - since > LIMIT * (1 if size else 5):
                    worker.kill()
                    worker.wait()
                    ended = 0
                    tail = b"took too long"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [row for row in rows if "op" in row]
        if not any(row.get("done") for row in rows):
            at = [row for row in rows if "at" in row]
            if not at:
                raise SystemExit(f"a worker died at its start: {tail.decode(errors='replace')}")
            last, mode = at[-1]["at"], at[-1]["mode"]
            what = "took too long" if tail == b"took too long" else f"died ({ended}): "
            what += "" if ended == 0 else tail.decode(errors="replace").strip()[-200:]
            kinds = MODES if mode == "host" else [mode]
            for other in kinds:
                row = {"op": f"#{last}", "index": last, "mode": other, "dtype": "*", "samples": 0}
                kept.append({**row, "kind": "crash", "what": f"{what} ({mode})"})
            seen = {(row["index"], row["mode"]) for row in rows if "op" in row}
            ended_ones = {(row["index"], row["mode"]) for row in kept}
            finished = {pair for pair in seen if pair != (last, mode)} | (
                ended_ones & {(last, other) for other in kinds}
            )
            todo = {
                index: left
                for index, modes in todo.items()
                if (left := [m for m in modes if (index, m) not in finished])
            }
        else:
            todo = {}
        with lines.open("a") as file:
            for row in kept:
                file.write(json.dumps(row) + "\n")


def rows_of(state: Path) -> dict[tuple[int, str, str], dict[str, Any]]:
    """The newest row of each pair and mode."""
    path = state / "rows.jsonl"
    found: dict[tuple[int, str, str], dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["dtype"] != "*":
                found.pop((row["index"], "*", row["mode"]), None)
            found[row["index"], row["dtype"], row["mode"]] = row
    return found


def table(rows: Iterable[dict[str, Any]]) -> str:
    """How many pairs pass in each mode, and why the others do not."""
    lines = []
    for mode in MODES:
        mine = [row for row in rows if row["mode"] == mode and row["kind"] != "no sample"]
        kinds = Counter(row["kind"] for row in mine)
        passed = kinds.pop("", 0)
        share = 100.0 * passed / len(mine) if mine else 0.0
        rest = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        lines.append(f"{mode:7} {passed:5} of {len(mine):5}  {share:6.2f}%   {rest}")
    return "\n".join(lines)


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the documentation quotes: counts, and each failure once, with its dtypes."""
    import torch

    rows = [row for row in rows if row["kind"] != "no sample"]
    figures, failures = [], []
    for mode in MODES:
        mine = [row for row in rows if row["mode"] == mode]
        passed = sum(not row["kind"] for row in mine)
        figures.append({"mode": mode, "pairs": len(mine), "passed": passed})
        groups: dict[tuple[str, str, str], list[str]] = {}
        for row in mine:
            if row["kind"]:
                groups.setdefault((row["op"], row["kind"], row["what"]), []).append(row["dtype"])
        failures += [
            {"mode": mode, "op": op, "dtypes": dtypes, "kind": kind, "what": what[:200]}
            for (op, kind, what), dtypes in sorted(groups.items())
        ]
    return {
        "torch": torch.__version__.partition("+")[0],
        "operators": len({row["index"] for row in rows}),
        "figures": figures,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, default=Path("operator_coverage"))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--ops", nargs="*", help="names in op_db; default: all")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--minutes", type=float, help="end after so many; the next call goes on")
    parser.add_argument("--show", action="store_true", help="print what is known, run nothing")
    parser.add_argument("--results", type=Path, help="write the counts that the docs quote here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        todo = {int(key): modes for key, modes in json.load(sys.stdin).items()}
        work(given.worker, todo, given.samples)
        return
    given.state.mkdir(parents=True, exist_ok=True)
    rows = rows_of(given.state)
    if not given.show:
        names = subprocess.run([sys.executable, "-c", _NAMES], capture_output=True, check=True)
        ops = json.loads(names.stdout.decode().splitlines()[-1])
        done = {
            (row["index"], row["mode"])
            for row in rows.values()
            if not (given.retry and row["kind"])
        }
        failed = {(r["index"], r["mode"]) for r in rows.values() if given.retry and r["kind"]}
        todo = {}
        for index, name in enumerate(ops):
            if given.ops and name.partition(".variant")[0] not in given.ops:
                continue
            modes = [
                mode
                for mode in MODES
                if (index, mode) not in done or (index, mode) in failed or given.ops
            ]
            if modes:
                todo[index] = list(modes)
        indices = list(todo)
        began = time.monotonic()
        for at in range(0, len(indices), CHUNK):
            if given.minutes is not None and time.monotonic() - began > 60 * given.minutes:
                print(f"{len(indices) - at} operators are left", file=sys.stderr)
                break
            follow(given.state, {index: todo[index] for index in indices[at : at + CHUNK]},
                   given.samples)  # fmt: skip
            rows = rows_of(given.state)
            print(f"{at + CHUNK} of {len(indices)} operators", table(rows.values()), sep="\n",
                  file=sys.stderr, flush=True)  # fmt: skip
    found = sorted(rows.values(), key=lambda row: (row["mode"], row["op"], row["dtype"]))
    for row in found:
        if row["kind"] and row["kind"] != "no sample":
            print(f"{row['mode']:7} {row['op']} {row['dtype']}: {row['kind']}: {row['what']}")
    print(table(found))
    (given.state / "all.json").write_text(json.dumps(found, indent=1) + "\n")
    if given.results is not None:
        given.results.write_text(json.dumps(summary(found), indent=1) + "\n")


_NAMES = """
import json, warnings
warnings.simplefilter("ignore")
from torch.testing._internal.common_methods_invocations import op_db
print(json.dumps([op.name for op in op_db]))
"""

if __name__ == "__main__":
    main()
