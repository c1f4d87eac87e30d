"""Random calls for `oracle.py`, larger than torch's own samples: what their workspaces, temporary
buffers and splits depend on shows at the sizes that programs have.

`calls` names them; the same names and numbers each time, on every engine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, Final

Make = Callable[[], Callable[[], Any]]
"""Makes the inputs of a call on the device, and returns the call."""

COUNTS: Final = {
    "conv": 700,
    "rnn": 360,
    "norm": 40,
    "reduce": 200,
    "matmul": 90,
    "sdpa": 90,
    "fft": 80,
}
MIB: Final = 1 << 20


@functools.cache
def calls() -> dict[str, Make]:
    """All calls by name."""
    found: dict[str, Make] = {}
    makers = {
        "conv": convolution,
        "rnn": recurrent,
        "norm": normalisation,
        "reduce": reduction,
        "matmul": product,
        "sdpa": attention,
        "fft": transform,
    }
    for kind, count in COUNTS.items():
        draw = random.Random(f"oracle {kind}")
        for number in range(count):
            text, make = makers[kind](draw)
            found[f"{kind} {number}: {text}"] = make
    for text, make in factorisations():
        found[f"linalg: {text}"] = make
    return found


def _differentiated(call: Callable[[], Any], *inputs: Any) -> Any:
    """The result and the gradients of the inputs."""
    import torch

    result = call()
    differentiable = [each for each in inputs if each is not None and each.requires_grad]
    if not differentiable:
        return [result]
    return [result, *torch.autograd.grad(result, differentiable, torch.ones_like(result))]


def _tensor(
    shape: tuple[int, ...], dtype: str, *, grad: bool = True, layout: str = "contiguous"
) -> Any:
    import torch

    made = torch.randn(shape, device="cuda").to(getattr(torch, dtype))
    if layout == "channels-last":
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        made = made.to(memory_format=formats[len(shape)])
    return made.requires_grad_(grad)


def convolution(draw: random.Random) -> tuple[str, Make]:
    """Forward and backward of a convolution, transposed or not, of one to three dimensions."""
    dimensions = draw.choices((1, 2, 3), (1, 8, 1))[0]
    dtype = draw.choice(("float32", "tf32", "float16", "bfloat16"))
    last = dimensions > 1 and draw.random() < 0.5
    transposed = draw.random() < 0.15
    searched = draw.random() < 0.12
    channels = draw.choice((3, 4, 16, 32, 48, 64, 96, 128, 192, 256, 320, 512, 1024))
    width = draw.choice((16, 32, 64, 96, 128, 192, 256, 320, 512, 1024))
    groups = draw.choices((1, 0, 4), (10, 2, 1))[0]
    if groups == 0:  # depthwise
        groups, width = channels, channels
    elif channels % groups:
        groups = 1
    kernel = draw.choices((1, 2, 3, 4, 5, 7), (5, 1, 9, 2, 1, 2))[0]
    stride = draw.choices((1, 2, 4), (7, 3, 1))[0]
    dilation = draw.choices((1, 2), (9, 1))[0]
    padding = draw.choice((0, kernel // 2))
    grad = draw.random() < 0.8
    bias = draw.random() < 0.4
    batch = draw.choice((1, 2, 3, 4, 8, 16, 32, 64))
    least = dilation * (kernel - 1) + 1
    most = {1: 16384, 2: 256, 3: 48}[dimensions]
    while True:
        size = draw.randint(1, most)
        cells = size**dimensions * batch * max(channels, width)
        if size >= least and cells <= 64 * MIB:
            break
        most = max(most // 2, least)
        if most == least:
            size = least
            break
    spatial = (size,) * dimensions
    name = f"conv{'_transpose' if transposed else ''}{dimensions}d"
    text = (
        f"{name} {dtype} {'channels-last ' if last else ''}{'benchmark ' if searched else ''}"
        f"n{batch} c{channels} k{width} {'x'.join(map(str, spatial))} r{kernel} s{stride} "
        f"p{padding} d{dilation} g{groups}{' bias' if bias else ''}{'' if grad else ' no-grad'}"
    )

    def make() -> Callable[[], Any]:
        import torch

        real = "float32" if dtype == "tf32" else dtype
        layout = "channels-last" if last else "contiguous"
        x = _tensor((batch, channels, *spatial), real, grad=grad, layout=layout)
        shape = (channels, width // groups) if transposed else (width, channels // groups)
        weight = _tensor((*shape, *(kernel,) * dimensions), real, grad=grad, layout=layout)
        offset = _tensor((width,), real, grad=grad) if bias else None
        function = getattr(torch.nn.functional, name)

        def call() -> Any:
            torch.backends.cudnn.allow_tf32 = dtype == "tf32"
            torch.backends.cudnn.benchmark = searched
            return _differentiated(
                lambda: function(
                    x, weight, offset, stride, padding, dilation=dilation, groups=groups
                ),
                x,
                weight,
                offset,
            )

        return call

    return text, make


def recurrent(draw: random.Random) -> tuple[str, Make]:
    """Forward and backward of LSTM, GRU and RNN."""
    kind = draw.choice(("LSTM", "GRU", "RNN"))
    dtype = draw.choice(("float32", "float16", "bfloat16"))
    layers, both = draw.choice((1, 2, 3)), draw.random() < 0.4
    length, batch = draw.choice((1, 8, 50, 128, 400)), draw.choice((1, 4, 32, 128))
    width, hidden = draw.choice((32, 100, 256, 512)), draw.choice((32, 128, 256, 512, 1024))
    dropout = draw.choice((0.0, 0.3)) if layers > 1 else 0.0
    training = draw.random() < 0.8
    text = (
        f"{kind} {dtype} t{length} n{batch} i{width} h{hidden} l{layers} {'both ' if both else ''}"
        f"dropout {dropout}{'' if training else ' no-grad'}"
    )

    def make() -> Callable[[], Any]:
        import torch

        network = getattr(torch.nn, kind)(
            width, hidden, layers, dropout=dropout, bidirectional=both
        ).to("cuda", getattr(torch, dtype))
        x = _tensor((length, batch, width), dtype, grad=training)

        def call() -> Any:
            with torch.set_grad_enabled(training):
                return _differentiated(lambda: network(x)[0], x, *network.parameters())

        return call

    return text, make


def normalisation(draw: random.Random) -> tuple[str, Make]:
    """Batch, layer and group normalisation."""
    kind = draw.choice(("batch", "layer", "group"))
    dtype = draw.choice(("float32", "float16", "bfloat16"))
    last = draw.random() < 0.5
    batch, channels = draw.choice((2, 8, 32)), draw.choice((16, 64, 256))
    size = draw.choice((7, 14, 28, 56))
    text = f"{kind}_norm {dtype} {'channels-last ' if last else ''}n{batch} c{channels} {size}"

    def make() -> Callable[[], Any]:
        import torch
        import torch.nn.functional as F

        layout = "channels-last" if last else "contiguous"
        x = _tensor((batch, channels, size, size), dtype, layout=layout)
        shape = (size, size) if kind == "layer" else (channels,)
        weight, bias = _tensor(shape, "float32"), _tensor(shape, "float32")
        if kind != "batch":
            weight, bias = (each.detach().to(x.dtype).requires_grad_() for each in (weight, bias))
        mean, variance = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        work = {
            "batch": lambda: F.batch_norm(x, mean, variance, weight, bias, training=True),
            "layer": lambda: F.layer_norm(x, shape, weight, bias),
            "group": lambda: F.group_norm(x, 8, weight, bias),
        }[kind]
        return lambda: _differentiated(work, x, weight, bias)

    return text, make


REDUCTIONS: Final[dict[str, Callable[[Any, Any, Any], Any]]] = {
    "sort": lambda torch, x, n: torch.sort(x, dim=-1),
    "stable sort": lambda torch, x, n: torch.sort(x, dim=0, stable=True),
    "topk": lambda torch, x, n: torch.topk(x, min(50, x.shape[-1])),
    "kthvalue": lambda torch, x, n: torch.kthvalue(x, 1),
    "median": lambda torch, x, n: torch.median(x, dim=-1),
    "mode": lambda torch, x, n: torch.mode(n, dim=-1),
    "unique": lambda torch, x, n: torch.unique(n),
    "unique with counts": lambda torch, x, n: torch.unique(
        n, return_inverse=True, return_counts=True
    ),
    "unique_consecutive": lambda torch, x, n: torch.unique_consecutive(n.flatten()),
    "nonzero": lambda torch, x, n: torch.nonzero(n > 3),
    "masked_select": lambda torch, x, n: x[n > 3],
    "index": lambda torch, x, n: x.flatten()[n.flatten()],
    "index_put": lambda torch, x, n: (
        x.detach().flatten().index_put((n.flatten(),), x.detach().flatten(), accumulate=True)
    ),
    "scatter_add": lambda torch, x, n: torch.zeros_like(x).scatter_add(
        -1, n % x.shape[-1], x.detach()
    ),
    "embedding backward": lambda torch, x, n: torch.autograd.grad(
        torch.nn.functional.embedding(
            n, weight := torch.zeros(1000, 64, device="cuda", requires_grad=True)
        ).sum(),
        weight,
    ),
    "cumsum": lambda torch, x, n: torch.cumsum(x, -1),
    "cumsum flat": lambda torch, x, n: torch.cumsum(x.flatten(), 0),
    "cumprod": lambda torch, x, n: torch.cumprod(x, 0),
    "logcumsumexp": lambda torch, x, n: torch.logcumsumexp(x, -1),
    "cummax": lambda torch, x, n: torch.cummax(x, -1),
    "sum": lambda torch, x, n: torch.sum(x),
    "sum of rows": lambda torch, x, n: torch.sum(x, -1),
    "sum of columns": lambda torch, x, n: torch.sum(x, 0),
    "argmax": lambda torch, x, n: torch.argmax(x),
    "var_mean": lambda torch, x, n: torch.var_mean(x, 0),
    "norm": lambda torch, x, n: torch.linalg.vector_norm(x),
    "logsumexp": lambda torch, x, n: torch.logsumexp(x, -1),
    "softmax": lambda torch, x, n: torch.softmax(x, -1),
    "log_softmax of columns": lambda torch, x, n: torch.log_softmax(x, 0),
    "cross_entropy": lambda torch, x, n: torch.nn.functional.cross_entropy(
        x, n[:, 0] % x.shape[-1], label_smoothing=0.1
    ),
    "bincount": lambda torch, x, n: torch.bincount(n.flatten()),
    "histc": lambda torch, x, n: torch.histc(x.float(), 100),
    "searchsorted": lambda torch, x, n: torch.searchsorted(
        torch.arange(100.0, device="cuda").to(x.dtype), x.detach()
    ),
    "multinomial": lambda torch, x, n: torch.multinomial(torch.softmax(x.detach().float(), -1), 2),
    "randperm": lambda torch, x, n: torch.randperm(x.numel() // 4 + 1, device="cuda"),
    "randint": lambda torch, x, n: torch.randint(0, 9, (x.numel(),), device="cuda"),
    "bucketize": lambda torch, x, n: torch.bucketize(
        x.detach(), torch.arange(100.0, device="cuda").to(x.dtype)
    ),
    "repeat_interleave": lambda torch, x, n: torch.repeat_interleave(n[:, 0] % 5),
    "dropout": lambda torch, x, n: torch.nn.functional.dropout(x, 0.1),
    "clip_grad_norm": lambda torch, x, n: torch.nn.utils.get_total_norm([x.detach()] * 5),
    "cat": lambda torch, x, n: torch.cat([x] * 3),
    "ctc_loss": lambda torch, x, n: torch.nn.functional.ctc_loss(
        torch.log_softmax(x.float(), -1).unsqueeze(1).expand(-1, 2, -1),
        torch.ones(2, 5, dtype=torch.long, device="cuda"),
        torch.full((2,), x.shape[0]),
        torch.full((2,), 5),
    ),
    "interpolate": lambda torch, x, n: torch.nn.functional.interpolate(
        x[None, None], scale_factor=2, mode="bilinear"
    ),
    "max_pool": lambda torch, x, n: torch.nn.functional.max_pool2d(x[None, None], 2),
    "cdist": lambda torch, x, n: torch.cdist(x.float()[:512], x.float()[:512]),
    "complex": lambda torch, x, n: torch.fft.rfft2(x.float()),
    "fft": lambda torch, x, n: torch.fft.fft(x.float()),
    "grid_sample": lambda torch, x, n: torch.nn.functional.grid_sample(
        x[None, None], torch.zeros(1, 64, 64, 2, device="cuda", dtype=x.dtype), align_corners=False
    ),
}
"""Operators on a matrix of numbers and one of whole numbers below 1,000, by name."""


def reduction(draw: random.Random) -> tuple[str, Make]:
    """Operators that need temporary memory, on a matrix of random size."""
    name = draw.choice(sorted(REDUCTIONS))
    dtype = draw.choices(("float32", "float16", "bfloat16"), (3, 1, 1))[0]
    rows = draw.choice((6, 33, 128, 1000, 4096, 16384))
    most = min(8 * MIB // rows, 50304)
    columns = draw.choice([n for n in (6, 100, 1024, 3000, 8192, 50304) if n <= most] or [6])
    text = f"{name} {dtype} {rows}x{columns}"

    def make() -> Callable[[], Any]:
        import torch

        generator = torch.Generator().manual_seed(7)
        x = _tensor((rows, columns), dtype)
        whole = torch.randint(0, min(1000, rows * columns), (rows, columns), generator=generator)
        n = whole.cuda()

        def call() -> Any:
            found = REDUCTIONS[name](torch, x, n)
            first = found[0] if isinstance(found, tuple) else found
            if first.requires_grad:
                return [found, *torch.autograd.grad(first, [x], torch.ones_like(first))]
            return found

        return call

    return text, make


def product(draw: random.Random) -> tuple[str, Make]:
    """Matrix products, forward and backward."""
    kind = draw.choice(("mm", "linear", "linear bias", "bmm", "addmm", "baddbmm", "einsum", "mv"))
    dtype = draw.choice(("float32", "tf32", "float16", "bfloat16", "float64", "complex64"))
    m, n, k = (draw.choice((1, 7, 64, 128, 1000, 1024, 4096)) for _ in range(3))
    batch = draw.choice((2, 16))
    if batch * m * max(n, k) > 64 * MIB:
        batch = 2
    text = f"{kind} {dtype} {batch}x{m}x{n}x{k}"

    def make() -> Callable[[], Any]:
        import torch
        import torch.nn.functional as F

        real = "float32" if dtype == "tf32" else dtype
        a, b = _tensor((m, k), real), _tensor((k, n), real)
        a3, b3 = _tensor((batch, m, k), real), _tensor((batch, k, n), real)
        bias, out, out3 = (
            _tensor((n,), real),
            _tensor((m, n), real),
            _tensor((batch, m, n), real),
        )
        work = {
            "mm": (lambda: torch.mm(a, b), (a, b)),
            "linear": (lambda: F.linear(a3, b.t()), (a3, b)),
            "linear bias": (lambda: F.linear(a3, b.t(), bias), (a3, b, bias)),
            "bmm": (lambda: torch.bmm(a3, b3), (a3, b3)),
            "addmm": (lambda: torch.addmm(out, a, b), (out, a, b)),
            "baddbmm": (lambda: torch.baddbmm(out3, a3, b3), (out3, a3, b3)),
            "einsum": (lambda: torch.einsum("bmk,kn->bmn", a3, b), (a3, b)),
            "mv": (lambda: torch.mv(a, b[:, 0]), (a, b)),
        }[kind]

        def call() -> Any:
            torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
            return _differentiated(work[0], *work[1])

        return call

    return text, make


def attention(draw: random.Random) -> tuple[str, Make]:
    """Scaled dot product attention, by the implementation that torch chooses and by each."""
    backend = draw.choice(
        ("", "", "MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    )
    dtype = draw.choice(("float16", "bfloat16", "float32"))
    if dtype == "float32" and backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        dtype = "bfloat16"
    batch, heads = draw.choice((1, 4, 16)), draw.choice((4, 12))
    length, keys = draw.choice((1, 77, 512, 1000, 2048)), draw.choice((0, 0, 77, 1024))
    width = draw.choice((32, 64, 80, 128, 256))
    mask = draw.choice(("", "", "causal", "mask"))
    if mask == "causal" or not keys:
        keys = length
    dropout = draw.choice((0.0, 0.0, 0.1))
    grad = draw.random() < 0.75
    text = (
        f"{backend or 'default'} {dtype} {batch}x{heads}x{length}x{keys}x{width} {mask} "
        f"dropout {dropout}{'' if grad else ' no-grad'}"
    )

    def make() -> Callable[[], Any]:
        import contextlib

        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = _tensor((batch, heads, length, width), dtype, grad=grad)
        k = _tensor((batch, heads, keys, width), dtype, grad=grad)
        v = _tensor((batch, heads, keys, width), dtype, grad=grad)
        added = _tensor((batch, 1, length, keys), dtype, grad=False) if mask == "mask" else None

        def call() -> Any:
            chosen = (
                sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext()
            )
            with chosen:
                return _differentiated(
                    lambda: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, added, dropout, is_causal=mask == "causal"
                    ),
                    q,
                    k,
                    v,
                )

        return call

    return text, make


SHAPES: Final[tuple[tuple[int, ...], ...]] = (
    (33, 33),
    (300, 300),
    (4, 64, 64),
    *((n, n) for n in (4, 16, 32, 64, 100, 128, 256, 512, 768, 1024)),
    *((m, n) for m, n in ((64, 16), (300, 33), (1024, 64), (16, 64), (128, 300))),
    *((b, n, n) for b in (2, 16, 100) for n in (8, 32, 100)),
)
"""Of factorised matrices: the first three were measured first. Square ones are for all calls."""

TRANSFORMS: Final = ("fft", "rfft", "ifft", "irfft", "fft2", "rfft2", "fftn", "stft")


def transform(draw: random.Random) -> tuple[str, Make]:
    """Fourier transforms of lengths with small and large prime factors."""
    name = draw.choice(TRANSFORMS)
    length = draw.choice((8, 60, 100, 127, 256, 1000, 1024, 1021, 3000, 4096, 10007, 65536))
    rows = draw.choice((1, 3, 64, 1000))
    if name in ("fft2", "rfft2", "fftn"):
        length, rows = min(length, 1024), draw.choice((8, 100, 128, 127))
    dtype = draw.choice(("float32", "float64"))
    text = f"{name} {dtype} {rows}x{length}"

    def make() -> Callable[[], Any]:
        import torch

        x = _tensor((rows, length), dtype, grad=False)
        if name == "stft":
            size = min(length, 400)
            window = torch.hann_window(size, device="cuda", dtype=x.dtype)
            return lambda: torch.stft(x, size, window=window, return_complex=True)
        if name in ("ifft", "irfft"):
            x = torch.complex(x, x)
        return lambda: getattr(torch.fft, name)(x)

    return text, make


def factorisations() -> list[tuple[str, Make]]:
    """Calls of cuSOLVER, by size."""
    work: dict[str, Callable[[Any, Any], Any]] = {
        "cholesky": lambda torch, a: torch.linalg.cholesky(
            a @ a.mT + torch.eye(a.shape[-1], device="cuda")
        ),
        "qr": lambda torch, a: torch.linalg.qr(a),
        "svd": lambda torch, a: torch.linalg.svd(a),
        "svdvals": lambda torch, a: torch.linalg.svdvals(a),
        "eigh": lambda torch, a: torch.linalg.eigh(a + a.mT),
        "eig": lambda torch, a: torch.linalg.eig(a),
        "inv": lambda torch, a: torch.linalg.inv(a),
        "solve": lambda torch, a: torch.linalg.solve(a, a),
        "lu": lambda torch, a: torch.linalg.lu_factor(a),
        "det": lambda torch, a: torch.linalg.det(a),
        "lstsq": lambda torch, a: torch.linalg.lstsq(a, a),
        "pinv": lambda torch, a: torch.linalg.pinv(a),
        "matrix_exp": lambda torch, a: torch.linalg.matrix_exp(a / 100),
    }
    found: list[tuple[str, Make]] = []
    for name, of in work.items():
        for shape in SHAPES:

            def make(
                of: Callable[[Any, Any], Any] = of, shape: tuple[int, ...] = shape
            ) -> Callable[[], Any]:
                import torch

                a = _tensor(shape, "float32", grad=False)
                return lambda: of(torch, a)

            found.append((f"{name} {'x'.join(map(str, shape))}", make))
    return found
