"""Memory of programs with and without ``torch.compile``, on a virtual GPU, without values.

Each run is a separate process. Of the compiled ones the allocator's events are checked against
an independent count: the text of the wrapper that Inductor wrote is read line by line, and every
``empty_strided_cuda`` and the ``del`` of its last name must be found among the events of that
call, in order and with its size.

    python benchmarks/compiled_memory.py [--gpu h100-80gb] [gpt resnet gpt2 gpt2-loss gpt2-xl]
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("gpt", "resnet", "gpt2", "gpt2-loss", "gpt2-xl")
_ALLOCATED = re.compile(r"^(\w+) = empty_strided_cuda\((\([^()]*\)), (\([^()]*\)), (torch\.\w+)\)")
_MOVED = re.compile(r"^(\w+) = (?:reinterpret_tensor\()?(\w+)\b")
_FREED = re.compile(r"\bdel (\w+)")


def expected(source: str) -> list[tuple[str, int]]:
    """What the wrapper's text allocates and frees: ("alloc" or "free", bytes), in order. What is
    returned is not freed, and of a line that moves a buffer to another name nothing is.
    """
    import torch

    found: list[tuple[str, int]] = []
    size: dict[str, int] = {}  # by the first name
    owner: dict[str, str] = {}  # first name, by any of its names
    for text in source.split("def call(", 1)[1].splitlines():
        line = text.strip()
        if line.startswith("return "):
            break
        if match := _ALLOCATED.match(line):
            shape, stride = ast.literal_eval(match[2]), ast.literal_eval(match[3])
            count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            dtype = getattr(torch, match[4].partition(".")[2])
            nbytes = (count if all(shape) else 0) * dtype.itemsize
            size[match[1]], owner[match[1]] = nbytes, match[1]
            found.append(("alloc", nbytes))
            continue
        if (match := _MOVED.match(line)) and match[2] in owner:
            owner[match[1]] = owner[match[2]]
        for name in _FREED.findall(line):
            first = owner.pop(name, None)
            if first is not None and first not in owner.values():
                found.append(("free", size[first]))
    return found


def found_in(searched: list[tuple[str, int]], events: list[tuple[str, int]]) -> int:
    """How many of the searched events come in this order among the events."""
    rest = iter(events)
    return sum(any(event == item for event in rest) for item in searched)


def model_of(name: str, torch: Any) -> tuple[Any, Any]:
    nn = torch.nn
    if name == "resnet":

        class Residual(nn.Module):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.parts = nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
                    nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                )  # fmt: skip

            def forward(self, x: Any) -> Any:
                return torch.relu(x + self.parts(x))

        layers = [nn.Conv2d(3, 64, 7, stride=2, padding=3), *(Residual(64) for _ in range(4))]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))
        return net.cuda(), torch.randn(32, 3, 224, 224, device="cuda")
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import train_gpt

    train_gpt.HEAD_SIZE = 64
    sizes = {"gpt": (4, 128, 64, 65, 16), "gpt2": (12, 768, 1024, 50304, 8),
             "gpt2-xl": (48, 1600, 1024, 50304, 2)}  # fmt: skip
    layers, embed, context, vocabulary, batch = sizes[name.removesuffix("-loss")]
    net = train_gpt.GPT(vocabulary, layers, embed, context).cuda()
    if name.endswith("-loss"):  # computed in the model's forward, as nanoGPT does
        net = _with_loss(net, torch)
    return net, torch.randint(vocabulary, (batch, context), device="cuda")


def _with_loss(net: Any, torch: Any) -> Any:
    class WithLoss(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, tokens: Any) -> Any:
            logits = self.net(tokens)
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return WithLoss()


def run(name: str, gpu: str, compiled: bool) -> dict[str, Any]:
    """One program's training, two steps, in this process."""
    import resource

    import torch

    import gpuprobe
    from gpuprobe.virtual import session

    begin = time.perf_counter()
    with gpuprobe.virtual_gpu(gpu, compute="shapes"):
        current = session.current()
        assert current is not None
        checks = [0, 0]
        net, given = model_of(name, torch)
        optimizer = torch.optim.AdamW(net.parameters())
        code = torch.compile(net) if compiled else net
        if compiled:
            _checked(current.machine, checks)
        forward = 0
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = code(given).float().pow(2).mean()
            forward = torch.cuda.memory_allocated()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {
            "program": name,
            "compiled": compiled,
            "after_forward": forward,
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "events": checks,
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "assumed": list(current.machine.assumed),
        }


def _checked(machine: Any, checks: list[int]) -> None:
    """Compare each run of a wrapper with its text."""
    from torch._inductor.graph import GraphLowering

    compile_to_module = GraphLowering._compile_to_module
    sim = machine.devices[0].sim

    def compile_and_check(graph: Any) -> Any:
        module = compile_to_module(graph)
        searched = [item for item in expected(Path(module.__file__).read_text()) if item[1]]
        original = module.call

        def call(args: Any) -> Any:
            events: list[tuple[str, int]] = []
            malloc, free = sim.malloc, sim.free

            def noted_malloc(requested: int, *rest: Any) -> Any:
                events.append(("alloc", requested))
                return malloc(requested, *rest)

            def noted_free(block: Any) -> Any:
                events.append(("free", block.requested))
                return free(block)

            sim.malloc, sim.free = noted_malloc, noted_free
            try:
                return original(args)
            finally:
                del sim.malloc, sim.free
                checks[0] += found_in(searched, events)
                checks[1] += len(searched)

        module.call = call
        return module

    GraphLowering._compile_to_module = compile_and_check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", default=["gpt", "resnet"], choices=PROGRAMS)
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--one", choices=("eager", "compiled"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.programs[0], args.gpu, args.one == "compiled")))
        return
    print(f"{'program':10} {'':9} {'forward':>9} {'allocated':>9} {'reserved':>9} "
          f"{'host':>7} {'CPU s':>6}  events found")  # fmt: skip
    failed = False
    for name in args.programs:
        for one in ("eager", "compiled"):
            command = [sys.executable, __file__, name, "--gpu", args.gpu, "--one", one]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            mib = [math.ceil(row[key] / 2**20) for key in
                   ("after_forward", "peak_allocated", "peak_reserved", "host_bytes")]  # fmt: skip
            right, searched = row["events"]
            failed |= right != searched
            events = f"{right} of {searched}" if searched else ""
            print(f"{name:10} {one:9} {mib[0]:9} {mib[1]:9} {mib[2]:9} {mib[3]:7} "
                  f"{row['cpu_seconds']:6.1f}  {events}", flush=True)  # fmt: skip
            for text in row["assumed"]:
                print(f"           assumed: {text}")
    print("sizes in MiB")
    sys.exit(failed)


if __name__ == "__main__":
    main()
