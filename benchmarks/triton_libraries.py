"""Libraries of Triton kernels on a virtual GPU without values: a forward and a backward pass each.

torch's ``flex_attention``, compiled; and layers of flash-linear-attention, whose kernels are
autotuned (on a GPU by timing them, which changes nothing about what is allocated).

    python benchmarks/triton_libraries.py [--gpu h100-80gb]

Prints what stays allocated for the backward pass and the peak, without what was there before.
Exits with 1 if a pass fails. Needs Triton; ``flash-linear-attention``, ``fla-core``, ``einops`` and
transformers 5 for its layers, which are left out without them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

_BATCH, _HEADS, _LENGTH, _SIZE = 4, 16, 4096, 64
_LAYERS = ("GatedLinearAttention", "DeltaNet", "MultiScaleRetention", "GatedDeltaNet")


def flex_attention() -> Callable[[], Any]:
    import torch
    from torch.nn.attention import flex_attention as flex

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    mask = flex.create_block_mask(causal, None, None, _LENGTH, _LENGTH, device="cuda")
    code = torch.compile(flex.flex_attention)
    given = [
        torch.randn(_BATCH, _HEADS, _LENGTH, _SIZE, device="cuda", dtype=torch.bfloat16)
        for _ in range(3)
    ]
    for tensor in given:
        tensor.requires_grad_()
    return lambda: code(*given, block_mask=mask)


def layer(name: str) -> Callable[[], Any]:
    import torch
    from fla import layers

    width = _HEADS * _SIZE
    module = getattr(layers, name)(mode="chunk", hidden_size=width, num_heads=4)
    module.to("cuda", torch.bfloat16)
    x = torch.randn(_BATCH, _LENGTH, width, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    return lambda: module(x)[0]


def run(make: Callable[[], Callable[[], Any]], gpu: str) -> tuple[float, float, list[str]]:
    """MiB after the forward pass and at the peak, and the assumptions."""
    import torch

    import gpuprobe

    with gpuprobe.virtual_gpu(gpu, compute="shapes") as session:
        forward = make()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = forward()
        saved = torch.cuda.memory_allocated() - before
        result.sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        assumed = list(session.machine.assumed)
    torch._dynamo.reset()
    return saved / 2**20, peak / 2**20, assumed


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--gpu", default="h100-80gb")
    args = parser.parse_args()
    programs: dict[str, Callable[[], Callable[[], Any]]] = {"flex_attention": flex_attention}
    if importlib.util.find_spec("fla") is not None:
        programs |= {f"fla: {name}": lambda name=name: layer(name) for name in _LAYERS}  # type: ignore[misc]
    print(f"{'MiB':28} {'forward':>9} {'peak':>9}")
    failed = False
    for name, make in programs.items():
        try:
            saved, peak, assumed = run(make, args.gpu)
        except Exception as error:  # noqa: BLE001 - reported, and the others run
            failed = True
            print(f"{name:28} {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        print(f"{name:28} {saved:9.1f} {peak:9.1f}", flush=True)
        for text in assumed:
            print(f"    assumed: {text}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
