"""Run torch's own samples of its operators (`op_db`) on the native engine, forward and backward.

Needs a CUDA build of torch (no GPU, none of NVIDIA's libraries) and expecttest:

    python benchmarks/native_operators.py --dtypes float32 --samples 5 --results results.jsonl

Each operator and dtype runs in a process that is forked from one that has imported torch, with a
time limit, so a crash or an endless loop loses one operator only. Results are appended to
``--results``; a second run continues where the first one stopped.

Each sample either runs, or is refused by name (a function that the native engine does not answer
was called and the operator raised an error), or raises another error. Kernels compute nothing, so
tensors hold zeros: errors that a value decides (`VALUE_DECIDES`) are counted apart, and so are
samples that the CPU refuses too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.process import LogKind, Runtime, load

VALUE_DECIDES: Final = (
    r"probability tensor contains|invalid multinomial distribution",
    r"singular|not positive-definite|failed to converge|ill-conditioned",
    r"repeats can not be negative|must be non-negative|must be positive|should be (non-)?negative",
    r"Expected (value argument|parameter)|All elements .* must be|must be in the range",
    r"index \d+ is out of bounds|out of range|size of .* must match|Sizes of tensors must match",
    r"has a value of zero|division by zero|Integers? to negative|lengths? .* (sum|greater|least)",
    r"cannot convert float|a Tensor with 0 elements|Boolean value of Tensor|target_lengths?",
    r"[Ii]nvalid (offsets|lengths)|offsets\[|expected .*offsets|must be (strictly )?monoton",
    r"should not contain infs or NaNs|weights cannot be negative|normal expects all elements",
    r"Index to scalar can have only 1 value|index -1 is out of bounds|expected a non-empty list",
    r"vectors in the complex case are specified up to",
    r"input_lengths|bins must|min .* max|values? .* (sum|add up) to",
)
"""Messages of errors that depend on what a tensor holds. What is not listed counts as an error."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", default="h100-80gb", help="a GPU of the catalogue")
    parser.add_argument("--dtypes", default="float32", help="names separated by commas, or `all`")
    parser.add_argument("--samples", type=int, default=5, help="of each operator; 0: all")
    parser.add_argument("--only", default="", help="regular expression of operators' names")
    parser.add_argument("--results", type=Path, default=Path("native_operators.jsonl"))
    parser.add_argument("--limit", type=float, default=60, help="seconds for a sample")
    parser.add_argument("--table-only", action="store_true", help="print what --results holds")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    results = _read(arguments.results)
    if not arguments.table_only:
        # torch counts devices with NVML then, and not with CUDA, after which it refuses to fork.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        runtime = load(parse_spec(arguments.gpu))
        _run(arguments, runtime, results)
    print("\n".join(_table(results)))
    return int(any(entry["crashed"] or entry["hung"] for entry in results.values()))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return {entry["key"]: entry for entry in map(json.loads, file)}


def _run(
    arguments: argparse.Namespace, runtime: Runtime, results: dict[str, dict[str, Any]]
) -> None:
    import torch

    op_db = operators(arguments.gpu)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = None if arguments.dtypes == "all" else set(arguments.dtypes.split(","))
    with arguments.results.open("a", encoding="utf-8") as file:
        for op in op_db:
            if not re.search(arguments.only, op.full_name):
                continue
            for dtype in sorted(op.supported_dtypes("cuda"), key=str):
                name = str(dtype).removeprefix("torch.")
                key = f"{op.full_name} {name} {arguments.samples}"
                if key in results or (chosen is not None and name not in chosen):
                    continue
                entry = _counted(
                    lambda report, op=op, dtype=dtype: _samples(
                        op, dtype, arguments.samples, runtime, report
                    ),
                    arguments.limit,
                )
                results[key] = {"key": key, "operator": op.full_name, "dtype": name, **entry}
                file.write(json.dumps(results[key]) + "\n")
                file.flush()


def operators(gpu: str) -> Sequence[Any]:
    """`op_db`, imported without initialising CUDA: importing it queries the device, after which
    children could not be forked. ``gpu``: the one whose capability the query gets.
    """
    import torch
    import torch.utils._triton

    capability = parse_spec(gpu)[0].capability
    asked = torch.cuda.get_device_capability
    torch.utils._triton.has_triton = lambda: True
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        torch.cuda.get_device_capability = asked
    if torch.cuda.is_initialized():
        raise SystemExit("importing op_db has initialised CUDA: children cannot be forked")
    found: Sequence[Any] = op_db
    return found


def in_child(
    work: Callable[[Callable[[dict[str, Any]], None]], None], limit: float
) -> Iterator[dict[str, Any]]:
    """What ``work`` reports in a forked process; finally ``lost`` if it did not end regularly, or
    reported nothing for ``limit`` seconds. With OPERATORS_STDERR set, it may print.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        if not os.environ.get("OPERATORS_STDERR"):
            os.dup2(null, 2)
        out = os.fdopen(writing, "w", encoding="utf-8")

        def report(entry: dict[str, Any]) -> None:
            out.write(json.dumps(entry) + "\n")
            out.flush()

        try:
            work(report)
        except BaseException as error:  # noqa: BLE001 - the parent reports it
            report({"lost": f"{type(error).__name__}: {error}"[:200]})
        os._exit(0)
    os.close(writing)
    data, hung, until = b"", False, time.monotonic() + limit
    while True:
        ready, _, _ = select.select([reading], [], [], max(0, until - time.monotonic()))
        part = os.read(reading, 1 << 16) if ready else b""
        if not ready:
            hung = True
            os.kill(child, signal.SIGKILL)
        if not part:
            break
        data += part
        *lines, data = data.split(b"\n")
        for line in lines:
            until = time.monotonic() + limit
            yield json.loads(line)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if hung:
        yield {"lost": HUNG}
    elif os.WIFSIGNALED(status):
        yield {"lost": signal.Signals(os.WTERMSIG(status)).name}


HUNG: Final = "took too long"


def _counted(work: Callable[[Callable[[str, str], None]], None], limit: float) -> dict[str, Any]:
    """The outcomes that ``work`` reports in a forked process, counted; and how that ended."""
    counts: dict[str, Counter[str]] = {}
    begun, lost = "", ""

    def run(report: Callable[[dict[str, Any]], None]) -> None:
        work(lambda outcome, detail: report({"outcome": outcome, "detail": detail[:300]}))

    for entry in in_child(run, limit):
        lost = entry.get("lost", "")
        if entry.get("outcome") == "begin":
            begun = entry["detail"]
        elif not lost:
            begun = ""
            counts.setdefault(entry["outcome"], Counter())[entry["detail"]] += 1
    crashed = lost.startswith("SIG")
    if lost and not crashed and lost != HUNG:
        counts.setdefault("error", Counter())[f"driver: {lost}"] += 1
    return {
        **{name: dict(counts.get(name, {})) for name in OUTCOMES},
        "crashed": f"{lost} in {begun or 'samples'}" if crashed else "",
        "hung": (begun or "samples") if lost == HUNG else "",
    }


OUTCOMES: Final = ("ran", "refused", "value", "cpu", "error", "around")
"""Ran; raised after a refusal (the functions); raised because of a value; raises on the CPU too;
raised something else; ran after a refusal that torch works around.
"""


class _Attempts:
    """Runs calls and reports the outcome of each."""

    def __init__(self, runtime: Runtime, report: Callable[[str, str], None]) -> None:
        self._runtime = runtime
        self._report = report
        runtime.start_log(4096)

    def refused(self) -> str:
        """The functions that refused since the last call of this, and a new log: what was dropped
        in between is forgotten."""
        names = [call.name for call in self._runtime.take_log() if call.kind is LogKind.UNANSWERED]
        self._runtime.start_log(4096)
        return ", ".join(dict.fromkeys(names))

    def attempt(
        self, kind: str, number: int, call: Callable[[], Any], cpu: Callable[[], Any]
    ) -> Any:
        import torch

        self._report("begin", f"{kind} {number}")
        try:
            out = call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the outcome of a sample
            names = self.refused()
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            if names:
                self._report("refused", names)
            elif any(re.search(pattern, message) for pattern in VALUE_DECIDES):
                self._report("value", message)
            elif _raises(cpu):
                self._report("cpu", message)
            else:
                self._report("error", f"{kind}: {message}")
            return None
        names = self.refused()
        self._report("around" if names else "ran", names or kind)
        return out


def _forward(op: Any, sample: Any, backward: bool) -> Any:
    out = op(sample.input, *sample.args, **sample.kwargs)
    return sample.output_process_fn_grad(out) if backward else out


def _differentiable(value: Any) -> list[Any]:
    return [t for t in tensors(value) if t.requires_grad]


def _backward(outputs: list[Any], inputs: list[Any]) -> bool:
    import torch

    torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)
    return True


def _samples(
    op: Any, dtype: Any, most: int, runtime: Runtime, report: Callable[[str, str], None]
) -> None:
    """Run forward and backward of the samples that torch makes on the device; made on the CPU and
    copied if that needs values.
    """
    import torch

    attempts = _Attempts(runtime, report)
    backward = dtype in op.supported_backward_dtypes("cuda") and op.supports_autograd

    def on_cpu(number: int) -> Any:
        return _forward(op, _sample(op, "cpu", dtype, backward, number), False)

    def back_on_cpu(number: int) -> Any:
        other = _sample(op, "cpu", dtype, True, number)
        out = _forward(op, other, True)
        _backward(_differentiable(out), _differentiable([other.input, other.args, other.kwargs]))

    where = "cuda"
    report("begin", "making samples")
    for number in range(most or 10_000):
        torch.manual_seed(0)
        try:
            sample = _sample(op, where, dtype, backward, number)
        except Exception:  # noqa: BLE001 - the outcome of a sample
            attempts.refused()
            where = "cpu"
            try:
                sample = _sample(op, where, dtype, backward, number)
            except Exception as error:  # noqa: BLE001 - the outcome of a sample
                report("cpu", f"making samples: {error}".partition("\n")[0])
                return
        if sample is None:
            return
        if where == "cpu":
            sample = moved(sample)
        out = attempts.attempt(
            "forward", number, partial(_forward, op, sample, backward), partial(on_cpu, number)
        )
        if out is None or not backward:
            continue
        outputs = _differentiable(out)
        inputs = _differentiable([sample.input, sample.args, sample.kwargs])
        if outputs and inputs:
            call = partial(_backward, outputs, inputs)
            attempts.attempt("backward", number, call, partial(back_on_cpu, number))


_generators: dict[tuple[str, str], Iterator[Any]] = {}


def _sample(op: Any, device: str, dtype: Any, backward: bool, number: int) -> Any:
    """A sample, by its number; None after the last one."""
    key = device, f"{op.full_name} {dtype}"
    kept = _generators.setdefault(
        key, enumerate(op.sample_inputs(device, dtype, requires_grad=backward))
    )
    for found, sample in kept:
        if found == number:
            return sample
    return None


def moved(sample: Any) -> Any:
    """A sample on the GPU."""
    import torch

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to("cuda").requires_grad_(value.requires_grad)
        return torch.device("cuda") if isinstance(value, torch.device) else value

    return sample.transform(move)


def tensors(value: Any) -> Iterator[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - the outcome of a sample
        return True
    return False


def _table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    entries = list(results.values())
    totals = {name: sum(sum(entry[name].values()) for entry in entries) for name in OUTCOMES}
    crashed = [entry for entry in entries if entry["crashed"]]
    hung = [entry for entry in entries if entry["hung"]]
    yield f"operators x dtypes: {len(entries)}   calls: {sum(totals.values())}"
    yield f"  ran                          {totals['ran'] + totals['around']}"
    yield f"    of them around a refusal   {totals['around']}"
    yield f"  refused by name              {totals['refused']}"
    yield f"  raised, a value decides      {totals['value']}"
    yield f"  raised, as on the CPU        {totals['cpu']}"
    yield f"  raised something else        {totals['error']}"
    yield f"  operators that crashed       {len(crashed)}"
    yield f"  operators that hung          {len(hung)}"
    for entry in crashed + hung:
        end = entry["crashed"] or f"hung in {entry['hung']}"
        yield f"    {entry['operator']} {entry['dtype']}: {end}"
    for outcome in ("refused", "around", "error", "value"):
        lines: dict[str, list[str]] = {}
        for entry in entries:
            for detail in entry[outcome]:
                lines.setdefault(detail, []).append(f"{entry['operator']} {entry['dtype']}")
        if lines:
            yield f"{outcome}:"
        for detail, names in sorted(lines.items()):
            more = " …" if len(names) > 4 else ""
            yield f"  {detail}: {', '.join(names[:4])}{more} ({len(names)})"


if __name__ == "__main__":
    sys.exit(main())
