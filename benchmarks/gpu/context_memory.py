"""Memory of a process on a GPU apart from torch's allocator, and what each library adds.

    python benchmarks/gpu/context_memory.py [--only PATTERN] [--out FILE]

Each step below runs in a forked process that has made a context (one small tensor), and is
measured by the driver: memory in use on the whole GPU less what the allocator reserves, before and
after. Nothing else may use the GPU. ``--out`` gets the figures, in bytes, as JSON. Exit code 3
without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
MIB: Final = 1 << 20


def _used() -> int:
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _nvml_used() -> int:
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def _random(*shape: int, dtype: str = "float32", grad: bool = False) -> Any:
    import torch

    made = torch.randn(shape, device="cuda").to(getattr(torch, dtype))
    return made.requires_grad_(grad)


# -- what is measured


def nothing() -> None:
    """The context alone."""


def products() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        _ = _random(512, 512, dtype=dtype) @ _random(512, 512, dtype=dtype)


def products_with_bias() -> None:
    import torch

    for dtype in ("float32", "bfloat16"):
        a, b = _random(512, 512, dtype=dtype), _random(512, dtype=dtype)
        torch.nn.functional.linear(a, a, b)


def convolutions() -> None:
    import torch

    for dtype in ("float32", "bfloat16"):
        x, w = _random(8, 64, 56, 56, dtype=dtype, grad=True), _random(64, 64, 3, 3, dtype=dtype)
        torch.nn.functional.conv2d(x, w.requires_grad_()).sum().backward()


def attention() -> None:
    import torch

    q = _random(2, 8, 512, 64, dtype="bfloat16", grad=True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def recurrent() -> None:
    import torch

    network = torch.nn.LSTM(128, 128).cuda()
    network(_random(16, 8, 128))[0].sum().backward()


def factorisation() -> None:
    import torch

    torch.linalg.qr(_random(128, 128))


def transform() -> None:
    import torch

    torch.fft.fft2(_random(256, 256))


def sparse() -> None:
    import torch

    torch.sparse.mm(torch.eye(64, device="cuda").to_sparse_csr(), _random(64, 64))


def training_step() -> None:
    """A transformer of four layers, with what most training uses."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(512, 8, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(_random(4, 256, 512)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def image_step() -> None:
    """A few blocks of a convolutional network in half precision."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(64, 128, 3, 2, 1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = model(_random(16, 3, 224, 224)).float().square().mean()
        loss.backward()
        optimizer.step()


UNARY: Final = (
    "abs acos asin atan ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac lgamma "
    "log log10 log1p log2 logit neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt "
    "square tan tanh trunc i0 isnan isinf sort argsort median mode nonzero unique triu tril "
    "trace sum mean prod std var norm amax amin argmax argmin all any count_nonzero diff"
)
OF_ROWS: Final = "softmax cumsum cumprod cummax logcumsumexp logsumexp"
BINARY: Final = "add sub mul div fmod remainder pow maximum minimum atan2 hypot eq ne lt le"


def many_operators() -> None:
    """A hundred unlike operators, each of which loads its kernels."""
    import torch

    x, n = _random(256, 256), torch.randint(0, 256, (256, 256), device="cuda")
    for name in UNARY.split():
        getattr(torch, name)(x)
    for name in OF_ROWS.split():
        getattr(torch, name)(x, -1)
    for name in BINARY.split():
        getattr(torch, name)(x, x)
    torch.gather(x, 1, n)
    torch.scatter_add(x, 1, n, x)
    torch.nn.functional.embedding(n, x)


def one_process_group() -> None:
    """NCCL with one rank: what a communicator takes before it has a peer."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))
    torch.cuda.synchronize()
    _SEEN["after"] = _used()
    dist.destroy_process_group()


def hundred_streams() -> None:
    import torch

    _KEPT.extend(torch.cuda.Stream() for _ in range(100))
    for stream in _KEPT:
        with torch.cuda.stream(stream):
            torch.zeros(1, device="cuda")


def thousand_events() -> None:
    import torch

    _KEPT.extend(torch.cuda.Event(enable_timing=True) for _ in range(1000))
    for event in _KEPT:
        event.record()


def graph_of_nodes(count: int) -> None:
    """A graph of ``count`` kernels."""
    import torch

    x = torch.zeros(16, device="cuda")
    x.add_(1)
    _SEEN["before"] = _used()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    graph.replay()
    _KEPT.append(graph)


_KEPT: list[Any] = []
_SEEN: dict[str, int] = {}

STEPS: Final[dict[str, Callable[[], None]]] = {
    "context": nothing,
    "cuBLAS": products,
    "cuBLASLt": products_with_bias,
    "cuDNN convolutions": convolutions,
    "attention": attention,
    "cuDNN LSTM": recurrent,
    "cuSOLVER": factorisation,
    "cuFFT": transform,
    "cuSPARSE": sparse,
    "transformer step": training_step,
    "convolutional step": image_step,
    "100 operators": many_operators,
    "NCCL, one rank": one_process_group,
    "100 streams": hundred_streams,
    "1000 events": thousand_events,
    "graph of 1 node": lambda: graph_of_nodes(1),
    "graph of 100 nodes": lambda: graph_of_nodes(100),
    "graph of 2000 nodes": lambda: graph_of_nodes(2000),
}
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "context, CUDA_MODULE_LOADING=EAGER": {"CUDA_MODULE_LOADING": "EAGER"},
    "transformer step, CUDA_MODULE_LOADING=EAGER": {"CUDA_MODULE_LOADING": "EAGER"},
    "transformer step, expandable segments": {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"
    },
}


def child(name: str) -> dict[str, Any]:
    """Bytes in use apart from the allocator's, before and after a step."""
    import torch

    os.environ.update(SETTINGS.get(name, {}))
    torch.zeros(1, device="cuda")
    before = _used()
    STEPS[re.sub(", (CUDA_|expandable).*", "", name)]()
    after = _SEEN.get("after") or _used()
    return {
        "before": _SEEN.get("before", before),
        "after": after,
        "reserved": torch.cuda.memory_reserved(),
        "used_by_nvml": _nvml_used(),
    }


def forked(name: str) -> dict[str, Any]:
    """`child` in a separate process; ``{"error": why}`` if it failed."""
    reading, writing = os.pipe()
    if not (process := os.fork()):
        try:
            found = child(name)
        except Exception as error:  # noqa: BLE001 - printed by the parent
            found = {"error": f"{type(error).__name__}: {error}"}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(process, 0)
    return json.loads(answer) if answer else {"error": f"exit status {status}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--out", type=Path, help="file to write")
    given = parser.parse_args()
    # torch counts devices with NVML then, and not with CUDA, after which it refuses to fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 3
    empty = _nvml_used()
    rows: dict[str, Any] = {}
    for name in [*STEPS, *SETTINGS]:
        if not re.search(given.only, name):
            continue
        rows[name] = row = forked(name)
        if "error" in row:
            print(f"{name:45} {row['error']}", flush=True)
            continue
        before, added = row["before"] / MIB, (row["after"] - row["before"]) / MIB
        print(f"{name:45} {before:8.1f} {added:+8.1f} MiB", flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "schema_version": 1,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(0),
            "cudnn": torch.backends.cudnn.version(),
            "used_before_any_process": empty,
            "bytes": rows,
        }
        given.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
