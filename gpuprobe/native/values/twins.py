"""CPU functions for operators that only CUDA has, or whose CPU kernels have other results."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from gpuprobe.native.values.draws import seed_of

_aten: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)
_Results: TypeAlias = tuple[Tensor | None, ...]
_INCLUDED: Final = torch._C._dispatch_tls_local_include_set()
_EXCLUDED: Final = torch._C._dispatch_tls_local_exclude_set()
"""Of a thread that is in no operator and no mode, as the import is."""


@contextmanager
def differentiable() -> Iterator[None]:
    """Autograd works, whatever is disabled around: for backward operators that the CPU computes
    with the backward pass of their forward.
    """
    with (
        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def leaf(tensor: Tensor | None) -> Tensor | None:
    """A copy that gradients are computed of."""
    return None if tensor is None else tensor.detach().clone().requires_grad_()


# --- products in half precision


def _slow_on_this_processor() -> frozenset[torch.dtype]:
    """Of half precision, what oneDNN has no kernels for on this machine's processor."""
    dnn = torch.ops.mkldnn
    supported = {
        torch.float16: dnn._is_mkldnn_fp16_supported,
        torch.bfloat16: dnn._is_mkldnn_bf16_supported,
    }
    return frozenset(dtype for dtype, there in supported.items() if not there())


_PRODUCTS: Final = (
    "convolution", "convolution_backward", "mm", "bmm", "addmm", "baddbmm", "_addmm_activation",
    "mv", "addmv", "dot",
)  # fmt: skip
_SLOW: Final = _slow_on_this_processor()


def _in_float32(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Compute in fp32, to which CUDA's kernels add up too: without kernels of oneDNN, the CPU takes
    up to 60 times as long in half precision. The result is rounded where it is put.
    """

    def twin(*args: Any, **kwargs: Any) -> Any:
        return plain(*(_widened(item) for item in args), **kwargs)

    return twin


def _widened(item: Any) -> Any:
    narrow = isinstance(item, Tensor) and item.dtype in _SLOW and item.layout is torch.strided
    return item.float() if narrow else item


# --- convolution and normalisation of cuDNN


def _convolution(
    x: Tensor, weight: Tensor, padding: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], groups: int, *_: object,
) -> Tensor:  # fmt: skip
    return _aten.convolution(
        x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups
    )


def _convolution_transpose(
    x: Tensor, weight: Tensor, padding: Sequence[int], output_padding: Sequence[int],
    stride: Sequence[int], dilation: Sequence[int], groups: int, *_: object,
) -> Tensor:  # fmt: skip
    return _aten.convolution(
        x, weight, None, stride, padding, dilation, True, output_padding, groups
    )


def _convolution_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    none = [0] * len(padding)
    return _aten.convolution(
        x, weight, bias, stride, padding, dilation, False, none, groups
    ).relu_()


def _convolution_add_relu(
    x: Tensor, weight: Tensor, z: Tensor, alpha: float | None, bias: Tensor | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    none = [0] * len(padding)
    made = _aten.convolution(x, weight, bias, stride, padding, dilation, False, none, groups)
    return made.add_(z, alpha=1 if alpha is None else alpha).relu_()


def _depthwise(
    x: Tensor, weight: Tensor, kernel: Sequence[int], bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    none = [0] * len(padding)
    return _aten.convolution(x, weight, bias, stride, padding, dilation, False, none, x.size(1))


def _cudnn_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor,
    training: bool, factor: float, eps: float,
) -> _Results:  # fmt: skip
    return (*_batch_norm(x, weight, bias, mean, var, training, factor, eps), None)


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor,
    training: bool, momentum: float, eps: float,
) -> _Results:  # fmt: skip
    """Statistics are written in training alone."""
    out, *saved = _aten.native_batch_norm.default(
        x, weight, bias, mean, var, training, momentum, eps
    )
    return (out, *saved) if training else (out, None, None)


def _cudnn_batch_norm_backward(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, save_mean: Tensor,
    save_var: Tensor, eps: float, reserve: Tensor | None,
) -> _Results:  # fmt: skip
    return _batch_norm_backward(
        grad, x, weight, mean, var, save_mean, save_var, True, eps, [True, True, True]
    )


def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, save_mean: Tensor,
    save_var: Tensor, train: bool, eps: float, mask: Sequence[bool], *_: object,
) -> _Results:  # fmt: skip
    given = [grad, x, weight, mean, var, save_mean, save_var]
    if x.dtype in _HALF:  # statistics are in float32 on CUDA
        given = [None if item is None else item.float() for item in given]
    return _aten.native_batch_norm_backward.default(*given, train, eps, mask)


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims = [i for i in range(x.dim()) if i != 1]
    wide = x.float() if x.dtype in _HALF else x
    return wide.mean(dims), torch.rsqrt(wide.var(dims, correction=0) + eps)


def _channels(x: Tensor, item: Tensor) -> Tensor:
    return item.view(1, -1, *[1] * (x.dim() - 2))


def _batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    made = (x - _channels(x, mean)) * _channels(x, invstd)
    if weight is not None:
        made = made * _channels(x, weight)
    return (made if bias is None else made + _channels(x, bias)).to(x.dtype)


def _batch_norm_gather(
    x: Tensor, mean: Tensor, invstd: Tensor, running_mean: Tensor | None,
    running_var: Tensor | None, momentum: float, eps: float, counts: Tensor | float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not isinstance(counts, torch.Tensor):
        counts = torch.full((mean.size(0),), float(counts), dtype=mean.dtype)
    share = counts.to(mean.dtype).view(-1, 1)
    total = share.sum()
    whole = (mean * share).sum(0) / total
    var = ((1 / (invstd * invstd) - eps + (mean - whole) ** 2) * share).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole, alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(var * total / (total - 1), alpha=momentum)
    return whole, torch.rsqrt(var + eps)


def _batch_norm_backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, g_input: bool,
    g_weight: bool, g_bias: bool,
) -> _Results:  # fmt: skip
    dims = [i for i in range(x.dim()) if i != 1]
    g = grad.to(mean.dtype)
    sums = g.sum(dims)
    products = (g * (x - _channels(x, mean))).sum(dims)
    return sums, products, products * invstd if g_weight else None, sums if g_bias else None


def _batch_norm_backward_elemt(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, sums: Tensor,
    products: Tensor, count: Tensor,
) -> Tensor:  # fmt: skip
    total = count.sum().to(mean.dtype)
    factor = invstd if weight is None else invstd * weight
    part = grad - _channels(x, sums / total)
    part = part - (x - _channels(x, mean)) * _channels(x, products / total * invstd * invstd)
    return (part * _channels(x, factor)).to(x.dtype)


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    wide = x.float() if x.dtype in _HALF else x
    dims = tuple(range(-len(shape), 0))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    made = wide * rstd
    return (made if weight is None else made * weight).to(x.dtype), rstd


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None,
    mask: Sequence[bool],
) -> _Results:  # fmt: skip
    wide, g = x.to(rstd.dtype), grad.to(rstd.dtype)
    dims = tuple(range(-len(shape), 0))
    normal = wide * rstd
    gx = g if weight is None else g * weight.to(g.dtype)
    dx = (gx - normal * (gx * normal).mean(dims, keepdim=True)) * rstd
    outer = tuple(range(x.dim() - len(shape)))
    dw = (g * normal).sum(outer) if outer else g * normal
    return (
        dx.to(x.dtype) if mask[0] else None,
        dw.to(weight.dtype) if mask[1] and weight is not None else None,
    )


def _backward_of_norm(at: int, func: OpOverload) -> Callable[..., _Results]:
    """Statistics, at ``at`` and the next argument, in the input's dtype on the CPU, in float32 on
    CUDA for half precision: all in float32.
    """

    def twin(*args: Any, **kwargs: Any) -> _Results:
        given = [
            item.float() if isinstance(item, torch.Tensor) and item.dtype in _HALF else item
            for item in args
        ]
        return func(*(given if args[1].dtype in _HALF else args), **kwargs)

    return twin


# --- recurrent networks


def _lstm_cell(
    gates: Tensor, hidden: Tensor, cx: Tensor, b1: Tensor | None = None, b2: Tensor | None = None
) -> _Results:
    total = gates + hidden
    if b1 is not None:
        total = total + b1 + b2
    i, f, g, o = total.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor,
    has_bias: bool,
) -> _Results:  # fmt: skip
    i, f, g, o = workspace.chunk(4, 1)
    gh = torch.zeros_like(cy) if grad_hy is None else grad_hy
    gc = torch.zeros_like(cy) if grad_cy is None else grad_cy
    t = cy.tanh()
    gc = gc + gh * o * (1 - t * t)
    gates = torch.cat(
        (gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)),
        1,
    )
    return gates, gc * f, gates.sum(0) if has_bias else None


def _gru_cell(
    gates: Tensor, hidden: Tensor, hx: Tensor, b1: Tensor | None = None, b2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    ri, zi, ni = gates.chunk(3, 1)
    rh, zh, nh = hidden.chunk(3, 1)
    if b1 is not None and b2 is not None:
        b_ri, b_zi, b_ni = b1.chunk(3)
        b_rh, b_zh, b_nh = b2.chunk(3)
        ri, zi, ni = ri + b_ri, zi + b_zi, ni + b_ni
        rh, zh, nh = rh + b_rh, zh + b_zh, nh + b_nh
    r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
    n = (ni + r * nh).tanh()
    # Layout of the workspace: reset, input, new, hidden, new's hidden part.
    return n + z * (hx - n), torch.cat((r, z, n, hx, nh), 1)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> _Results:
    r, z, n, hx, nh = workspace.chunk(5, 1)
    gz = grad * (hx - n) * z * (1 - z)
    gn = grad * (1 - z) * (1 - n * n)
    gr = gn * nh * r * (1 - r)
    gi = torch.cat((gr, gz, gn), 1)
    gh = torch.cat((gr, gz, gn * r), 1)
    bias = (gi.sum(0), gh.sum(0)) if has_bias else (None, None)
    return gi, gh, grad * z, *bias


_MODES: Final = {0: "rnn_relu", 1: "rnn_tanh", 2: "lstm", 3: "gru"}


_GATES: Final = {0: 1, 1: 1, 2: 4, 3: 3}


def _shaped(
    x: Tensor, weights: Sequence[Tensor], stride: int, mode: int, hidden: int, proj: int,
    bidirectional: bool,
) -> list[Tensor]:  # fmt: skip
    """The weights in the shapes of the module's parameters. Autocasting passes parts of one buffer,
    which have only the numbers of elements (``_cudnn_rnn_cast_reflatten``).
    """
    rows, outs = _GATES[mode] * hidden, proj or hidden
    directions = 2 if bidirectional else 1
    made = []
    for i, weight in enumerate(weights):
        layer, part = i // stride // directions, i % stride
        features = x.size(-1) if layer == 0 else outs * directions
        if part == 0:
            shape: tuple[int, ...] = (rows, features)
        elif part == 1:
            shape = (rows, outs)
        elif proj and part == stride - 1:
            shape = (proj, hidden)
        else:
            shape = (rows,)
        made.append(weight.reshape(shape))
    return made


def _rnn(
    x: Tensor, weights: Sequence[Tensor], stride: int, hx: Tensor, cx: Tensor | None, mode: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
    sizes: Sequence[int],
) -> _Results:  # fmt: skip
    run, dtype = getattr(torch, _MODES[mode]), x.dtype
    x, hx, cx, *weights = (_widened(item) for item in (x, hx, cx, *weights))
    state = (hx, cx) if mode == 2 else hx
    biased = stride == 4 or stride == 5
    if len(sizes):
        found = run(
            x, torch.tensor(list(sizes)), state, list(weights), biased, layers, dropout, train,
            bidirectional,
        )  # fmt: skip
    else:
        found = run(
            x, state, list(weights), biased, layers, dropout, train, bidirectional, batch_first
        )
    rounded = [item.to(dtype) for item in found]
    return (*rounded, None)[:3] if mode != 2 else tuple(rounded)


_MOST_SEEDS: Final = 4096
_seeds: OrderedDict[tuple[int, ...], int] = OrderedDict()
"""The seeds of the dropout between layers of recurrent networks, by what came out: the backward
pass gets that, and not what cuDNN keeps of it in its reserve space."""
_calls: Final = itertools.count(1)


def _contents(out: Tensor) -> tuple[int, ...]:
    """A key that differs between two outputs of a recurrent network."""
    parts = out.contiguous().view(torch.int16).flatten().to(torch.int64)
    place = torch.arange(1, parts.numel() + 1)
    return (*out.shape, int(parts.sum()), int((parts * place).sum()))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def _cudnn_rnn(
    x: Tensor, weights: Sequence[Tensor], stride: int, buffer: Tensor | None, hx: Tensor,
    cx: Tensor | None, mode: int, hidden: int, proj: int, layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> _Results:  # fmt: skip
    given = _shaped(x, weights, stride, mode, hidden, proj, bidirectional)
    drops = bool(dropout and train and layers > 1)
    # As cuDNN's state, which torch seeds once: another seed in each call.
    seed = seed_of((torch.cuda.initial_seed(), next(_calls))) if drops else 0
    with differentiable(), torch.no_grad(), _seeded(seed) if drops else nullcontext():
        out, hy, cy = _rnn(
            *(x, given, stride, hx, cx, mode, layers, batch_first, dropout, train),
            *(bidirectional, sizes),
        )
    if drops:
        _seeds[_contents(out)] = seed
        if len(_seeds) > _MOST_SEEDS:
            _seeds.popitem(last=False)
    return out, hy, cy, None, None


def _cudnn_rnn_backward(
    x: Tensor, weights: Sequence[Tensor], stride: int, buffer: Tensor | None, hx: Tensor,
    cx: Tensor | None, output: Tensor, g_out: Tensor | None, g_hy: Tensor | None,
    g_cy: Tensor | None, mode: int, hidden: int, proj: int, layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, sizes: Sequence[int],
    dropout_state: Tensor | None, reserve: Tensor | None, mask: Sequence[bool],
) -> _Results:  # fmt: skip
    drops = bool(dropout and train and layers > 1)
    seed = _seeds.get(_contents(output)) if drops else 0
    if seed is None:
        raise NotImplementedError("dropout between layers of a network that ran long ago")
    with differentiable(), _seeded(seed) if drops else nullcontext():
        leaves = [leaf(x), leaf(hx), leaf(cx), *(leaf(w) for w in weights)]
        found = _rnn(
            leaves[0], _shaped(x, leaves[3:], stride, mode, hidden, proj, bidirectional), stride,
            leaves[1], leaves[2], mode, layers, batch_first, dropout,
            train, bidirectional, sizes,
        )  # fmt: skip
        pairs = [
            (made, grad)
            for made, grad in zip(found, (g_out, g_hy, g_cy), strict=False)
            if made is not None and grad is not None
        ]
        inputs = [item for item in leaves if item is not None]
        grads = iter(
            torch.autograd.grad(
                [made for made, _ in pairs], inputs, [grad for _, grad in pairs], allow_unused=True
            )
        )
        given = [None if item is None else next(grads) for item in leaves]
    zeroed = [
        torch.zeros_like(item) if grad is None and item is not None else grad
        for item, grad in zip(leaves, given, strict=True)
    ]
    return (
        zeroed[0] if mask[0] else None,
        zeroed[1] if mask[1] else None,
        zeroed[2] if mask[2] else None,
        zeroed[3:] if mask[3] else [],
    )


# --- products


def _product(plain: OpOverload) -> Callable[..., Tensor]:
    """A matrix product whose result has another dtype than its factors."""

    def twin(*args: Any, **kwargs: Any) -> Tensor:
        *tensors, dtype = args
        return plain(*(item.to(dtype) for item in tensors), **kwargs)

    return twin


def _groups(
    a: Tensor, b: Tensor, offsets: Tensor, product: Callable[[Tensor, Tensor, int], Tensor]
) -> Tensor:
    """The four shapes of ``_grouped_mm``: ``offsets`` are the ends of the groups."""
    if a.dim() == 3 and b.dim() == 3:
        return torch.stack([product(a[i], b[i], i) for i in range(a.size(0))])
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
    if a.dim() == 2 and b.dim() == 3:
        made = torch.zeros((a.size(0), b.size(2)))
        for i, span in enumerate(spans):
            made[span] = product(a[span], b[i], i)
        return made
    if a.dim() == 3:
        made = torch.zeros((a.size(1), b.size(1)))
        for i, span in enumerate(spans):
            made[:, span] = product(a[i], b[:, span], i)
        return made
    return torch.stack([product(a[:, span], b[span], i) for i, span in enumerate(spans)])


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    made = _groups(a, b, offs, lambda x, y, _: torch.mm(x.float(), y.float()))
    return made if bias is None else made + bias


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    for scale, name in ((scale_a, "first"), (scale_b, "second")):
        if scale.dtype is not torch.float32 or (scale.numel() > 1 and scale.dim() != 2):
            raise NotImplementedError(f"block scales of the {name} factor")
    rows = scale_a.reshape(-1, 1) if scale_a.numel() in (1, a.size(0)) else None
    columns = scale_b.reshape(1, -1) if scale_b.numel() in (1, b.size(1)) else None
    if rows is None or columns is None:
        raise NotImplementedError("block scales")
    made = torch.mm(a.float(), b.float()) * rows * columns
    if bias is not None:
        made = made + bias.float()
    if scale_result is not None and out_dtype is not None and out_dtype.itemsize == 1:
        made = made * scale_result
    return made


# --- the rest


def _masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return x * mask.to(x.dtype) * scale


def _fused_dropout(
    x: Tensor, p: float, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The kept elements, divided by the share of them. ``p`` is that share."""
    kept = torch.rand(x.shape, generator=generator) < p
    return torch.where(kept, x / p if p else x * 0, torch.zeros((), dtype=x.dtype)), kept


def _log_sigmoid(x: Tensor) -> _Results:
    """Without the buffer that the CPU keeps for the backward pass."""
    return _aten.log_sigmoid_forward.default(x)[0], None


def _log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    return _aten.log_sigmoid_backward.default(grad, x, x.abs().neg_().exp_())


def _svd(
    a: Tensor, full: bool = False, vectors: bool = True, *, driver: str | None = None
) -> _Results:
    return _aten._linalg_svd.default(a, full, vectors)


def _least_squares(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> _Results:
    return _aten.linalg_lstsq.default(a, b, rcond, driver="gels")


def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, by_frequency: bool = False, mode: int = 0,
    sparse: bool = False, factors: Tensor | None = None, include_last: bool = False,
    padding: int = -1,
) -> _Results:  # fmt: skip
    """The bag of each index always, a size for each offset, the largest indices only of maxima."""
    out, bags, sizes, largest = _aten._embedding_bag.default(
        weight, indices, offsets, by_frequency, mode, sparse, factors, include_last, padding
    )
    if bags.numel() != indices.numel():
        starts = offsets[:-1] if include_last else offsets
        bags = torch.bucketize(torch.arange(indices.numel()), starts, right=True) - 1
    if sizes.numel() != offsets.numel():
        sizes = torch.nn.functional.pad(sizes, (0, offsets.numel() - sizes.numel()))
    return out, bags, sizes, largest if mode == 2 else None  # EmbeddingBagMode::MAX


def _embedding_bag_dense_backward(
    grad: Tensor, indices: Tensor, bags: Tensor, sizes: Sequence[int], largest: Tensor, count: int,
    by_frequency: bool, mode: int, factors: Tensor | None, padding: int = -1,
) -> Tensor:  # fmt: skip
    return _aten._embedding_bag_dense_backward.default(
        grad, indices, bags, sizes[: grad.size(0)], largest, count, by_frequency, mode, factors,
        padding,
    )  # fmt: skip


def _grid_sampler(x: Tensor, grid: Tensor) -> Tensor:
    return _aten.grid_sampler_2d.default(x, grid, 0, 0, True)


def _grid_sampler_backward(x: Tensor, grid: Tensor, grad: Tensor) -> _Results:
    return _aten.grid_sampler_2d_backward.default(grad, x, grid, 0, 0, True, [True, True])


def _affine_grid(theta: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    return _aten.affine_grid_generator.default(theta, [n, c, h, w], True)


def _affine_grid_backward(grad: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    with differentiable():
        theta = torch.zeros((n, 2, 3), dtype=grad.dtype, requires_grad=True)
        made = _aten.affine_grid_generator.default(theta, [n, c, h, w], True)
        return torch.autograd.grad(made, theta, grad)[0]


def _ctc(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int = 0,
    deterministic: bool = False, zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """cuDNN's returns the gradient as well."""
    with differentiable():
        given = leaf(log_probs)
        loss = _aten._ctc_loss(given, targets, inputs, lengths, blank, zero_infinity)[0]
        grad = torch.autograd.grad(loss.sum(), given)[0]
    return loss.detach(), grad


def _histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Whole numbers are counted on CUDA alone."""
    if x.is_floating_point():
        return _aten.histc.default(x, bins, low, high)
    return _aten.histc.default(x.double(), bins, low, high).to(x.dtype)


def _nansum(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    if not x.is_complex():
        return _aten.nansum.default(x, dims, keepdim, dtype=dtype)
    return torch.where(x.isnan(), 0, x).sum(dims or tuple(range(x.dim())), keepdim, dtype=dtype)


TWINS: Final[dict[str, Callable[..., Tensor | _Results]]] = {
    "cudnn_convolution.default": _in_float32(_convolution),
    "cudnn_convolution_transpose.default": _in_float32(_convolution_transpose),
    "cudnn_convolution_relu.default": _in_float32(_convolution_relu),
    "cudnn_convolution_add_relu.default": _in_float32(_convolution_add_relu),
    "_conv_depthwise2d.default": _in_float32(_depthwise),
    "conv_depthwise3d.default": _in_float32(_depthwise),
    "cudnn_batch_norm.default": _cudnn_batch_norm,
    "cudnn_batch_norm_backward.default": _cudnn_batch_norm_backward,
    "native_batch_norm.default": _batch_norm,
    "_native_batch_norm_legit.default": _batch_norm,
    "native_batch_norm_backward.default": _batch_norm_backward,
    "batch_norm_stats.default": _stats,
    "batch_norm_elemt.default": _batch_norm_elemt,
    "batch_norm_gather_stats.default": _batch_norm_gather,
    "batch_norm_gather_stats_with_counts.default": _batch_norm_gather,
    "batch_norm_backward_reduce.default": _batch_norm_backward_reduce,
    "batch_norm_backward_elemt.default": _batch_norm_backward_elemt,
    "native_layer_norm_backward.default": _backward_of_norm(
        3, _aten.native_layer_norm_backward.default
    ),
    "native_group_norm_backward.default": _backward_of_norm(
        2, _aten.native_group_norm_backward.default
    ),
    "_fused_rms_norm.default": _rms_norm,
    "_fused_rms_norm_backward.default": _rms_norm_backward,
    "_thnn_fused_lstm_cell.default": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl.default": _lstm_cell_backward,
    "_thnn_fused_gru_cell.default": _gru_cell,
    "_thnn_fused_gru_cell_backward.default": _gru_cell_backward,
    "_cudnn_rnn.default": _cudnn_rnn,
    "_cudnn_rnn_backward.default": _cudnn_rnn_backward,
    **{f"{name}.default": _in_float32(getattr(_aten, name).default) for name in _PRODUCTS},
    "mm.dtype": _product(_aten.mm.default),
    "bmm.dtype": _product(_aten.bmm.default),
    "addmm.dtype": _product(_aten.addmm.default),
    "baddbmm.dtype": _product(_aten.baddbmm.default),
    "mm.dtype_out": _product(_aten.mm.out),
    "bmm.dtype_out": _product(_aten.bmm.out),
    "addmm.dtype_out": _product(_aten.addmm.out),
    "baddbmm.dtype_out": _product(_aten.baddbmm.out),
    "_grouped_mm.default": _grouped_mm,
    "_scaled_mm.default": _scaled_mm,
    "_masked_scale.default": _masked_scale,
    "_fused_dropout.default": _fused_dropout,
    "log_sigmoid_forward.default": _log_sigmoid,
    "log_sigmoid_backward.default": _log_sigmoid_backward,
    "_linalg_svd.default": _svd,
    "linalg_lstsq.default": _least_squares,
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_forward_only.default": _embedding_bag,
    "_embedding_bag_dense_backward.default": _embedding_bag_dense_backward,
    "cudnn_grid_sampler.default": _grid_sampler,
    "cudnn_grid_sampler_backward.default": _grid_sampler_backward,
    "cudnn_affine_grid_generator.default": _affine_grid,
    "cudnn_affine_grid_generator_backward.default": _affine_grid_backward,
    "_cudnn_ctc_loss.default": _ctc,
    "_cudnn_ctc_loss.Tensor": _ctc,
    "nansum.default": _nansum,
    "histc.default": _histc,
}
"""By operator and overload, called with the operator's arguments. None for a result leaves what
the memory holds: it is used by no other operator, or by those of this table only in shape.
"""
