"""Measure how fast this machine's GPU is, for the predictions of step times on it.

    python benchmarks/gpu/calibrate.py                    writes GPU.times.json, in five minutes
    python benchmarks/gpu/calibrate.py --out my-card.json

Then ``GPUPROBE_STEP_TIMES=my-card.json gpuprobe estimate --gpu GPU train.py`` predicts by these
times, where their classes have any: `gpuprobe.step_time.calibration`. Measured are matrix products
in three layouts, attention, pointwise kernels, normalisations, reductions, copies, the host's time
for an operator, and with several GPUs all-reduces. Values are random, and the GPU is kept busy
before, so that its clock is the one under load. Not measured: float8, convolutions, compiled
kernels, several nodes. Exit code: 0, 1 if it was not done in five minutes, 3 without a GPU, or with
one that is simulated, whose kernels take no time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from gpuprobe.catalogue.gpus import find
from gpuprobe.errors import ConfigError
from gpuprobe.model.io.codec import to_plain
from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.step_time.calibration import SCHEMA_VERSION, Calibration, MeasuredCall
from gpuprobe.step_time.speeds import all_speeds
from gpuprobe.torch_support.operator_work import OperatorWork
from gpuprobe.torch_support.process_gpus import takes_time

TIME_LIMIT = 300.0  # seconds
BUSY = 15.0  # seconds before the first call is measured, until the clock has settled
EACH = 0.04  # seconds of one call's repetitions
MOST = 200
REPEATS = 3
WIDTH = 1024
ROWS = (128, 512, 2048, 8192, 32768)
SIZES = (512, 1024, 4096, 16384)
BYTES = (1 << 22, 1 << 24, 1 << 26, 1 << 28)
MESSAGES = (1 << 20, 1 << 23, 1 << 26, 1 << 29)

Call = Callable[[], object]
Timer = Callable[[Call, Work], float]
"""The seconds on the GPU of a call, whose work is given."""


class Watch(TorchDispatchMode):
    """The work of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self._known = OperatorWork()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        work = self._known.of(func, args, kwargs or {}, result)
        if work is not None:
            self.works.append(work)
        return result


def work_of(call: Call) -> Work | None:
    """What a call computes: its only operator that does, None if there are more, or none."""
    with Watch() as watch:
        call()
    return watch.works[0] if len(watch.works) == 1 else None


def by_events(call: Call, work: Work) -> float:
    """Seconds of one call: the median of several runs of repetitions, which are issued while the
    GPU still does something else, so that it does not wait for the host.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count, seconds = 3, []
    for repeat in range(REPEATS + 1):
        torch.cuda._sleep(int(count * 5e-5 * 2e9))  # 50 µs for each call, at 2 GHz
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        each = begin.elapsed_time(end) * 1e-3 / count
        if repeat:
            seconds.append(each)
        count = max(3, min(MOST, int(EACH / each)))
    return statistics.median(seconds)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def has(*capability: int) -> bool:
    """Whether this GPU has that compute capability, or a higher one."""
    return torch.cuda.get_device_capability() >= capability


def half() -> torch.dtype:
    """The type that this GPU's tensor cores have: bfloat16 from Ampere on."""
    return torch.bfloat16 if has(8, 0) else torch.float16


def calls() -> Iterator[Call]:
    """The calls to be measured, of which each is one operator."""
    yield from products()
    yield from attentions()
    yield from traffic()
    yield from copies()


def products() -> Iterator[Call]:
    """Matrix products in three layouts; smaller ones without tensor cores, which are slower, and
    where memory is short.
    """
    small = torch.cuda.get_device_properties(0).total_memory < 20 << 30
    for name in ("half", "float32", "tf32"):
        if name == "tf32" and not has(8, 0):
            continue
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        dtype = half() if name == "half" else torch.float32
        rows = ROWS[:-1] if small or name != "half" else ROWS
        for k in SIZES if name == "half" else SIZES[:-1]:
            for m in rows:
                left, left_t = random(m, k, dtype=dtype), random(k, m, dtype=dtype).t()
                for n in SIZES if name == "half" else SIZES[:-1]:
                    right, right_t = random(k, n, dtype=dtype), random(n, k, dtype=dtype).t()
                    for a, b in ((left, right_t), (left, right), (left_t, right)):
                        yield partial(torch.mm, a, b)
    torch.backends.cuda.matmul.allow_tf32 = False
    for length in (256, 512, 1024, 2048):
        batched = random(64, length, 64, dtype=half())
        yield partial(torch.bmm, batched, batched.transpose(1, 2))


def attentions() -> Iterator[Call]:
    backends = [SDPBackend.EFFICIENT_ATTENTION]
    backends += [SDPBackend.FLASH_ATTENTION] * has(8, 0) + [SDPBackend.CUDNN_ATTENTION] * has(9, 0)
    for backend, size, length in product(backends, (64, 128), (512, 2048, 8192)):
        shape = 32768 // length, 16, length, size
        inputs = [random(*shape, dtype=half()).requires_grad_() for _ in range(3)]
        for causal in (True, False):
            forward = partial(attention, backend, inputs, causal)
            try:
                out = forward()
            except RuntimeError as error:  # torch has no such kernel for this GPU
                print(f"not measured: {backend.name}, {shape}: {error}", file=sys.stderr)
                continue
            yield forward
            yield partial(torch.autograd.grad, out, inputs, torch.randn_like(out), True)


def attention(backend: SDPBackend, inputs: list[torch.Tensor], causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*inputs, is_causal=causal)


def traffic() -> Iterator[Call]:
    """Calls that are bound by bytes: of pointwise ones several."""
    aten = torch.ops.aten
    for dtype, size in product((half(), torch.float32), BYTES):
        x, y = (random(size // WIDTH // dtype.itemsize, WIDTH, dtype=dtype) for _ in range(2))
        w, b = (random(WIDTH, dtype=dtype) for _ in range(2))
        yield partial(aten.add, x, y)
        yield partial(aten.mul, x, y)
        yield partial(aten.gelu_backward, x, y)
        yield partial(aten.add, x, w)  # single elements, as the next one
        yield partial(aten._to_copy, x, dtype=half() if dtype is torch.float32 else torch.float32)
        yield partial(aten._softmax, x, -1, False)
        yield partial(aten._log_softmax, x.view(-1, 8 * WIDTH), -1, False)
        yield partial(aten.native_dropout, x, 0.1, True)
        yield partial(aten.native_layer_norm, x, (WIDTH,), w, b, 1e-5)
        _, mean, scale = aten.native_layer_norm(x, (WIDTH,), w, b, 1e-5)
        yield partial(
            aten.native_layer_norm_backward, x, y, (WIDTH,), mean, scale, w, b, [True] * 3
        )
        rows = torch.randint(x.shape[0], (x.shape[0],), device="cuda")
        yield partial(aten.embedding, x, rows)


def copies() -> Iterator[Call]:
    for size in BYTES:
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        for pinned in (True, False):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            word = "" if pinned else "pageable "
            yield Copy(device, host, f"{word}h2d", size)
            yield Copy(host, device, f"{word}d2h", size)


class Copy:
    """A copy to or from the host, which is no work of an operator."""

    def __init__(self, to: torch.Tensor, of: torch.Tensor, variant: str, size: int) -> None:
        self.to, self.of = to, of
        self.work = Work("copy", WorkKind.COPY, "uint8", (), variant, 0, size, size)

    def __call__(self) -> None:
        self.to.copy_(self.of, non_blocking=True)


def host_call() -> tuple[float, float, float]:
    """The host's seconds for an operator: from autograd's thread, on average, from Python."""
    weight = torch.ones(8, device="cuda", requires_grad=True)
    forward, backward = [], []
    for _ in range(12):
        torch.cuda.synchronize()
        started, x = time.perf_counter(), weight
        for _ in range(400):
            x = x * 1.0001
        middle = time.perf_counter()
        torch.cuda.synchronize()
        again = time.perf_counter()
        x.backward(torch.ones_like(x))
        forward.append((middle - started) / 400)
        backward.append((time.perf_counter() - again) / 400)
    one, other = statistics.median(forward[2:]), statistics.median(backward[2:])
    return min(one, other), (one + other) / 2, max(one, other)


def all_reduces(rank: int, ranks: int, port: int, results: Any) -> None:
    """In a process of each rank: the seconds of each of `MESSAGES`."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    for size in MESSAGES:
        message = torch.ones(size // 2, device="cuda", dtype=half())
        work = Work("collective", WorkKind.COLLECTIVE, "", (ranks, 1), "AllReduce", 0, size, 0)
        for _ in range(3):
            dist.all_reduce(message)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):  # the same count in all ranks
            dist.all_reduce(message)
        end.record()
        end.synchronize()
        if not rank:
            results.put((work, begin.elapsed_time(end) * 1e-4))
    dist.destroy_process_group()


def of_several_gpus() -> Iterator[MeasuredCall]:
    import socket

    ranks = torch.cuda.device_count()
    if ranks < 2:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").Queue()
    torch.multiprocessing.spawn(all_reduces, (ranks, port, results), nprocs=ranks)
    for _ in MESSAGES:
        work, seconds = results.get(timeout=60)
        yield MeasuredCall(work, seconds)


def keep_busy(seconds: float) -> None:
    factor = random(8192, 8192, dtype=half())
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(20):
            torch.mm(factor, factor)
        torch.cuda.synchronize()


def measured(timer: Timer, out_of_time: Callable[[], bool]) -> Iterator[MeasuredCall]:
    """All calls. Raises TimeoutError when there is no more time: half a grid is of no use."""
    for call in calls():
        if out_of_time():
            raise TimeoutError(f"not done in {TIME_LIMIT:.0f} s: is something else on the GPU?")
        work = call.work if isinstance(call, Copy) else work_of(call)
        if work is not None and work.kind is not WorkKind.OTHER:
            yield MeasuredCall(work, timer(call, work))


def name_of_gpu() -> str:
    """The catalogue's name. Raises ConfigError for a GPU of which no speeds are known."""
    title = torch.cuda.get_device_name()
    name = find(title).name
    if name not in all_speeds():
        raise ConfigError(f"no speeds are known of {title}, which measured ones would correct")
    return name


def calibration(
    timer: Timer,
    host: Callable[[], tuple[float, float, float]],
    more: Callable[[], Iterator[MeasuredCall]],
) -> Calibration:
    """``host``: see `host_call`; ``more``: calls that need processes of their own."""
    ends = time.monotonic() + TIME_LIMIT
    return Calibration(
        schema_version=SCHEMA_VERSION,
        gpu=name_of_gpu(),
        title=torch.cuda.get_device_name(),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        torch=str(torch.__version__),
        calls=(*measured(timer, lambda: time.monotonic() > ends), *more()),
        host_call=host(),
    )


def write(of: Calibration, path: Path) -> None:
    rows = ",\n  ".join(json.dumps(to_plain(call)) for call in of.calls)
    head = {name: value for name, value in to_plain(of).items() if name != "calls"}
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "calls": [\n  {rows}\n ]\n}}\n')


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="by default GPU.times.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("calibrate: there is no CUDA device", file=sys.stderr)
        return 3
    if not takes_time():
        print(
            "calibrate: this GPU is simulated: its kernels take no time, so there is nothing to "
            "measure, and no file was written",
            file=sys.stderr,
        )
        return 3
    try:
        name = name_of_gpu()
        keep_busy(BUSY)
        result = calibration(by_events, host_call, of_several_gpus)
    except (ConfigError, TimeoutError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 1
    path = options.out or Path(f"{name}.times.json")
    write(result, path)
    print(f"{len(result.calls)} calls of {name} in {path}: export GPUPROBE_STEP_TIMES={path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
