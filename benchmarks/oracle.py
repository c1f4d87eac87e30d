"""What operators allocate on a GPU and on the simulated one, allocation by allocation.

    python benchmarks/oracle.py collect FILE --engine cuda|native [--dtypes float32]
        [--samples 5] [--only PATTERN] [--shard I/N]
    python benchmarks/oracle.py compare FILE FILE [--show N]

``collect`` runs torch's own samples of its operators (`op_db`), forward and backward, with all
values, and appends to FILE what each allocated and freed (size, stream, line, in order), the shape,
stride, dtype and device of its results, and the type of its error. ``cuda`` is the machine's own
GPU, ``native`` a simulated one. They run in forked processes; a crash or an endless loop loses one
sample, and what FILE has is not run again. Needs expecttest.

``compare`` prints how many calls are equal, then the operators that differ with the
first difference of each. Each sample runs once before it is measured, so that what only the first
call allocates (workspaces of libraries) is left out. Frees of what was there before a call, and
those after its last allocation, are not compared, nor is the order of frees that follow one
another: autograd's threads for a GPU let go when they get to it. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from native_operators import in_child, moved, operators, tensors  # noqa: E402

GPU: Final = "h100-80gb"
SECONDS: Final = 120
"""A sample that takes longer is given up."""

TOGETHER: Final = 100
"""Operators and types of one process."""

_ACTIONS: Final = ("alloc", "free_completed")
_OURS: Final = (f"{ROOT / 'gpuprobe'}{os.sep}", f"{Path(__file__).resolve()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect")
    collecting.add_argument("file", type=Path)
    collecting.add_argument("--engine", choices=("cuda", "native"), required=True)
    collecting.add_argument("--dtypes", default="float32", help="names separated by commas")
    collecting.add_argument("--samples", type=int, default=5, help="of each operator; 0: all")
    collecting.add_argument("--only", default="", help="regular expression of names")
    collecting.add_argument("--gpu", default=GPU, help=f"without a GPU: which (default {GPU})")
    collecting.add_argument(
        "--limit", type=float, default=SECONDS, help=f"seconds for a sample (default {SECONDS})"
    )
    collecting.add_argument("--shard", default="0/1", help="part I of N: 0/4 to 3/4")
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs=2)
    comparing.add_argument("--show", type=int, default=1000, help="differences to print")
    given = parser.parse_args()
    if given.command == "compare":
        return compare(*map(read, given.files), given.show)
    collect(given)
    return 0


# --- running


def collect(given: argparse.Namespace) -> None:
    """Run what the file does not have yet."""
    warnings.simplefilter("ignore")
    # torch counts devices with NVML then, and not with CUDA, after which it refuses to fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    part, parts = map(int, given.shard.split("/"))
    given.shard = slice(part, None, parts)
    if given.engine == "native":
        from gpuprobe.catalogue.gpus import parse_spec
        from gpuprobe.native.process import load

        load(parse_spec(given.gpu))
    import torch

    torch.set_num_threads(1)
    done = set(read(given.file))
    with given.file.open("a", encoding="utf-8") as file:

        def add(key: str, entry: dict[str, Any]) -> None:
            done.add(key)
            file.write(json.dumps({"key": key, **entry}) + "\n")
            file.flush()

        _operators(given, done, add)
        add("engine", {"name": f"{given.engine} (torch {torch.__version__})"})


def _operators(
    given: argparse.Namespace, done: set[str], add: Callable[[str, dict[str, Any]], None]
) -> None:

    most = given.samples or 10_000
    finished = False
    while not finished:
        # Imported in the child: on a GPU, importing op_db initialises CUDA.
        title, begun = "", 0

        def run(report: Callable[[dict[str, Any]], None]) -> None:
            left = _left(given, done)
            for count, (title, op, dtype, first) in enumerate(left):
                if count == TOGETHER:
                    return
                report({"title": title, "begun": first})
                _samples(op, dtype, first, most, given, report)
                report({"end": title})
            report({"finished": True})

        for entry in in_child(run, given.limit):
            if "finished" in entry:
                finished = True
            elif "begun" in entry:
                title, begun = entry.get("title", title), entry["begun"]
            elif "end" in entry:
                add(f"{title} end", {})
            elif "lost" not in entry:
                add(f"{title} {entry.pop('sample')} {entry.pop('pass')}", entry)
            elif not title:
                raise SystemExit(f"no operator ran: {entry['lost']}")
            else:
                for which in ("forward", "backward"):
                    add(f"{title} {begun} {which}", {"lost": entry["lost"]})


def _left(given: argparse.Namespace, done: set[str]) -> Iterator[tuple[str, Any, Any, int]]:
    """Name, operator, type and first sample of what is not done yet."""
    import torch

    for op in operators(given.gpu)[given.shard]:
        for name in given.dtypes.split(",") if re.search(given.only, op.full_name) else ():
            dtype, title, first = getattr(torch, name), f"{op.full_name} {name}", 0
            if dtype not in op.supported_dtypes("cuda") or f"{title} end" in done:
                continue
            while f"{title} {first} forward" in done:
                first += 1
            yield title, op, dtype, first


@contextlib.contextmanager
def _device(given: argparse.Namespace) -> Iterator[None]:
    import torch

    import gpuprobe

    with (
        contextlib.nullcontext()
        if given.engine == "cuda"
        else gpuprobe.virtual_gpu(given.gpu, "real")
    ):
        torch.zeros(1, device="cuda")
        yield


def _samples(
    op: Any,
    dtype: Any,
    first: int,
    most: int,
    given: argparse.Namespace,
    report: Callable[[dict[str, Any]], None],
) -> None:
    import torch

    backward = dtype in op.supported_backward_dtypes("cuda") and op.supports_autograd
    torch.manual_seed(0)
    with _device(given):
        for number, made in enumerate(op.sample_inputs("cpu", dtype, requires_grad=backward)):
            if number >= most:
                break
            if number < first:
                continue
            report({"begun": number})
            sample = moved(made)

            def forward(sample: Any = sample) -> Any:
                return op(sample.input, *sample.args, **sample.kwargs)

            results, entry = _second(forward)
            report({"sample": number, "pass": "forward", **entry, "results": _described(results)})
            outputs = [t for t in tensors(results) if t.requires_grad]
            inputs = [
                t for t in tensors([sample.input, sample.args, sample.kwargs]) if t.requires_grad
            ]
            if not outputs or not inputs:
                continue
            gradients = [torch.ones_like(t) for t in outputs]
            differentiate = functools.partial(
                torch.autograd.grad,
                outputs,
                inputs,
                gradients,
                allow_unused=True,
                retain_graph=True,
            )
            results, entry = _second(differentiate)
            report({"sample": number, "pass": "backward", **entry, "results": _described(results)})


def _second(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The results of a call, and what the second one allocates."""
    import torch

    found: list[Any] = []
    for _ in range(2):
        found.clear()
        torch.manual_seed(1)
        entry = measured(lambda: found.append(call()))
    return found, entry


def _described(value: Any) -> list[str]:
    import torch

    return [
        f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} "
        f"{t.stride() if t.layout is torch.strided else t.layout} {t.device.type}"
        for t in tensors(value)
    ]


def measured(call: Callable[[], Any]) -> dict[str, Any]:
    """The allocations and frees of a call, as [size, frees negative; stream; line], and the type of
    its error, "" for none. Streams are numbered as they appear.
    """
    import torch

    error = ""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    try:
        call()
    except Exception as raised:  # noqa: BLE001 - the other engine is to raise the same
        error = type(raised).__name__
    torch.cuda.synchronize()
    traces = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    streams: dict[int, int] = {}
    own: set[int] = set()
    events: list[list[Any]] = []
    for event in (event for trace in traces for event in trace if event["action"] in _ACTIONS):
        stream = streams.setdefault(event["stream"], len(streams))
        if event["action"] == "alloc":
            own.add(event["addr"])
            events.append([event["size"], stream, _line(event.get("frames", ()))])
        elif event["addr"] in own:
            own.discard(event["addr"])
            events.append([-event["size"], stream, _line(event.get("frames", ()))])
    entry: dict[str, Any] = {"events": events, "error": error}
    return entry


def _line(frames: Sequence[dict[str, Any]]) -> str:
    for frame in frames:
        name = frame["filename"]
        torchs = f"{os.sep}torch{os.sep}" in name
        if name.endswith(".py") and not torchs and not name.startswith(_OURS):
            return f"{Path(name).name}:{frame['line']}"
    return ""


# --- comparing


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file by their keys."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return {entry.pop("key"): entry for entry in map(json.loads, file)}


def difference(first: dict[str, Any], second: dict[str, Any]) -> tuple[str, Any, Any]:
    """What differs ("lost", "error", "allocations", "results"; "" for nothing), and each side."""
    for which in ("lost", "error"):
        if first.get(which, "") != second.get(which, ""):
            return which, first.get(which) or "none", second.get(which) or "none"
    if first.get("lost"):
        return "", None, None
    pairs = itertools.zip_longest(settled(first["events"]), settled(second["events"]))
    for one, other in pairs:
        if one is None or other is None or one[:2] != other[:2]:
            return "allocations", _event(one), _event(other)
    if first["results"] != second["results"]:
        return "results", first["results"], second["results"]
    return "", None, None


def settled(events: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Without the frees after the last allocation; those that follow one another by size."""
    found: list[Sequence[Any]] = []
    for freed, run in itertools.groupby(events, lambda event: event[0] < 0):
        together = list(run)
        found += sorted(together) if freed else together
    while found and found[-1][0] < 0:
        found.pop()
    return found


def _event(event: Sequence[Any] | None) -> str:
    if event is None:
        return "nothing"
    size, stream, line = event
    where = f" on stream {stream}" if stream else ""
    return f"{size:+,}{where}" + (f" ({line})" if line else "")


def compare(first: dict[str, Any], second: dict[str, Any], show: int) -> int:
    names = [side.pop("engine", {}).get("name", "unfinished") for side in (first, second)]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    found: dict[str, list[str]] = {}
    for key in first:
        if key not in second or key.endswith(" end"):
            continue
        operator, dtype, _, kind = key.split()
        name = f"{operator} {dtype}"
        differing = found.setdefault(name, [])
        what, one, other = difference(first[key], second[key])
        counts[kind][what or "equal"] += 1
        if what:
            differing.append(f"{key}, {what}: {one} / {other}")
    print(" / ".join(names))
    for kind, of in counts.items():
        total = sum(of.values())
        rest = ", ".join(f"{count} {what}" for what, count in of.most_common() if what != "equal")
        print(
            f"{kind:9} {total:6} calls, {of['equal'] / total:6.1%} equal; {rest or 'none differ'}"
        )
    different = {name: lines for name, lines in sorted(found.items()) if lines}
    print(f"{len(found)} operators, {len(found) - len(different)} equal in all calls")
    for name, lines in list(different.items())[:show]:
        print(f"{name}: {len(lines)} differ; {lines[0][:300]}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
