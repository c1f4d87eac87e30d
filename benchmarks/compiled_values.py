"""Losses of the programs of ``tests/virtual``, with ``torch.compile`` and without it.

Every module that a program calls is compiled before its first call; of a program of which nothing
is compiled that way, the whole program is. What the program calls ``backward`` on, and what its
outermost modules return, is compared with the same of a run without ``torch.compile``, whose values
are those of torch's CPU kernels; both runs are on a virtual GPU with ``compute="real"``. What
modules return within a compiled program is not seen: of those the losses are compared. Random
numbers are the same in both with ``fallback_random``.

A program that the compiler refuses on CUDA, too, is expected to be refused in the same way: see
`REFUSED`.

    python benchmarks/compiled_values.py [mlp_adamw lstm ...]

Exits with 1 if values differ by more than a rounding of 1e-5 (1e-3 with 16-bit types), or if a
program could not be run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))


REFUSED = {
    "legacy_names": (
        "AssertionError",
        "in compiled code isinstance(x, torch.cuda.FloatTensor) is False for every tensor: "
        "_tensor_isinstance in torch/_dynamo/variables/builtin.py",
    )
}
"""What compiled programs raise on CUDA, too, and why."""

DOUBLE = {"closures_of_many_weights"}
"""Programs with float64: here L-BFGS makes of a rounding of 1e-7 in its first loss 1e-2 in its
last, and of 1e-16 no more than is tolerated.
"""


@dataclass
class Run:
    """What one run of a program computed, and what the compiler did. ``whole``: the whole program
    is compiled."""

    whole: bool = False
    losses: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    graphs: int = 0
    breaks: int = 0
    eagerly: list[str] = field(default_factory=list)
    peak: int = 0


@contextmanager
def observed(run: Run, compiled: bool) -> Iterator[None]:
    """Collect values of the program's losses and modules; ``compiled``: compile its modules."""
    import torch

    from gpuprobe.patching import Patches

    keep = torch.compiler.disable(_keep)
    in_thread = torch.compiler.disable(
        lambda: threading.current_thread() is not threading.main_thread()
    )
    module: Any = torch.nn.Module
    tensor: Any = torch.Tensor
    call, backward = module.__call__, tensor.backward
    depth = 0
    made: dict[Any, Any] = {}

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        # Within a module, in a whole program, or in a thread of DataParallel's.
        if depth or torch.compiler.is_compiling() or in_thread():
            return call(self, *args, **kwargs)
        code = self
        if compiled:
            if self not in made:
                made[self] = torch.compile(self)
            code = made[self]
        depth += 1
        try:
            found = call(code, *args, **kwargs)
        finally:
            depth -= 1
        keep(run.outputs, found)
        return found

    def backwards(self: Any, *args: Any, **kwargs: Any) -> Any:
        keep(run.losses, self)
        return backward(self, *args, **kwargs)

    patches = Patches()
    patches.set(module, "__call__", called)
    patches.set(tensor, "backward", backwards)
    try:
        yield
    finally:
        patches.undo()


def _keep(values: list[Any], found: Any) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if torch.cuda.is_current_stream_capturing():
        return  # nothing has been computed yet
    from gpuprobe.torch_support.tensors import tensors_in

    for item in tensors_in(found):
        data = getattr(item, "data", item)
        if not (data.is_sparse or data.is_meta or isinstance(data, FakeTensor)):
            values.append(data.detach().double().abs().sum().cpu())


def run(name: str, compiled: bool, whole: bool = False) -> Run:
    """Run a program. ``compiled``: compile its modules; ``whole``: compile all."""
    import torch
    import torch._inductor.config
    from gpu_programs import PROGRAMS

    import gpuprobe

    found = Run(whole)
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64 if name in DOUBLE else torch.float32)
    torch.manual_seed(0)
    with (
        gpuprobe.virtual_gpu("2xh100-80gb", "real") as session,
        torch._inductor.config.patch(fallback_random=True),
        observed(found, compiled),
    ):
        program = torch.compile(PROGRAMS[name]) if whole else PROGRAMS[name]
        program()
        found.losses = [float(value) for value in found.losses]
        found.outputs = [float(value) for value in found.outputs]
        notes = session.machine.compiler_notes
        found.graphs = sum(count for text, count in notes.items() if " graph: " in text)
        found.breaks = sum(count for text, count in notes.items() if text.startswith("graph break"))
        found.eagerly = [text for text in session.machine.assumed if "eagerly" in text]
        found.peak = torch.cuda.max_memory_allocated()
    gc.collect()
    return found


def difference(one: Run, other: Run, relative: float) -> float:
    """The largest difference, as a part of what is tolerated: 1e-5, and more for large values.
    Infinite if the runs cannot be compared.
    """
    pairs = [(one.losses, other.losses)]
    if not other.whole or len(one.outputs) == len(other.outputs):
        pairs.append((one.outputs, other.outputs))
    if any(len(left) != len(right) for left, right in pairs):
        return float("inf")
    both = [pair for left, right in pairs for pair in zip(left, right, strict=True)]
    return max((abs(a - b) / (1e-5 + relative * abs(a)) for a, b in both), default=0.0)


def tolerance(name: str) -> float:
    """Of float32, or of the 16-bit types that a program uses."""
    return 1e-3 if name in ("mixed_precision", "attention") else 1e-5


def main() -> None:
    warnings.simplefilter("ignore")
    from gpu_programs import PROGRAMS

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, []])
    args = parser.parse_args()
    print(f"{'program':40} {'values':>6} {'of allowed':>10} {'graphs':>6} {'breaks':>6}")
    failed = False
    for name in args.programs or PROGRAMS:
        eager = run(name, False)
        try:
            made = run(name, True)
            if not made.graphs:
                made = run(name, False, whole=True)
        except Exception as error:  # noqa: BLE001 - reported, and the others run
            kind, why = REFUSED.get(name, ("", ""))
            expected = type(error).__name__ == kind
            failed |= not expected
            text = why if expected else str(error).partition("\n")[0]
            print(f"{name:40} {type(error).__name__}: {text}", flush=True)
            continue
        failed |= name in REFUSED
        off = difference(eager, made, tolerance(name))
        failed |= off > 1
        values = len(made.losses) + (0 if made.whole else len(made.outputs))
        print(f"{name:40} {values:6} {off:10.1e} {made.graphs:6} {made.breaks:6}"
              f"{'  DIFFERS' if off > 1 else ''}", flush=True)  # fmt: skip
        for text in made.eagerly:
            print(f"    {text}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
