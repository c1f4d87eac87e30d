"""Attention's operators of CUDA on the CPU: flash, memory-efficient and cuDNN's.

Without dropout and biases the CPU's own flash attention computes them, so that results equal the
CPU's. Otherwise the formula is computed in float32: P = softmax(scale QKᵀ + bias), O = (P∘M)V, with
a mask M of dropout that is drawn from the seed and offset that the operator returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.native.values.draws import Key, generator_of

_aten: Final = torch.ops.aten
_FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


_FLASH: Final = _aten._scaled_dot_product_flash_attention.default
_ONE_STATE: Final = _FLASH._schema.returns[6].name == "rng_state"
"""Flash attention returns seed and offset as one tensor (torch 2.7), or as two."""


def _state(seed: Any, offset: Any) -> Any:
    return torch.stack((seed, offset)) if _ONE_STATE else seed


def _seeds(seed: Any, offset: Any) -> Key:
    """The key that a forward operator wrote into its results: two tensors, or one of both."""
    if seed.numel() >= 2:
        numbers = seed.flatten()
        return int(numbers[0]), int(numbers[1])
    return int(seed), int(offset) if offset.numel() else 0


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _dropout(shape: Any, p: float, key: Key) -> Any:
    """1/(1-p) where an element is kept."""
    kept = torch.rand(shape, generator=generator_of(key)) >= p
    return kept.float() / (1 - p)


def _scores(q: Any, k: Any, bias: Any, causal: str, scale: float, window: Any) -> Any:
    s = torch.matmul(q, k.transpose(-1, -2)) * scale
    if bias is not None:
        s = s + bias.float()
    rows, columns = s.shape[-2:]
    if causal or window is not None:
        i, j = torch.arange(rows)[:, None], torch.arange(columns)
        shift = columns - rows if causal != "top" else 0
        allowed = torch.ones((rows, columns), dtype=torch.bool)
        if causal:
            allowed &= j <= i + shift
        if window is not None:
            left, right = window
            if left is not None and left >= 0:
                allowed &= j >= i + shift - left
            if right is not None and right >= 0:
                allowed &= j <= i + shift + right
        s = s.masked_fill(~allowed, -math.inf)
    return s


def _probabilities(s: Any) -> tuple[Any, Any]:
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.unsqueeze(-1)).nan_to_num(0.0)
    return p, lse


def _like_heads(q: Any, k: Any) -> Any:
    """Key or value heads that several query heads share, repeated."""
    times = q.size(1) // k.size(1)
    return k if times == 1 else k.repeat_interleave(times, 1)


def _fold_heads(grad: Any, k: Any) -> Any:
    times = grad.size(1) // k.size(1)
    if times == 1:
        return grad
    return grad.unflatten(1, (k.size(1), times)).sum(2)


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    causal: str = "",
    scale: float | None = None,
    dropout: float = 0.0,
    key: Key = (0, 0),
    window: Any = None,
) -> tuple[Any, Any]:
    """Output and logarithm of the sums of ``(batch, heads, length, size)`` tensors. ``causal``:
    "", "top" (aligned at the first element) or "bottom" (at the last).
    """
    scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    k, v = _like_heads(q, k), _like_heads(q, v)
    square = q.size(2) == k.size(2)
    if (
        not dropout
        and window is None
        and (bias is None or bias.dtype in (q.dtype, torch.bool))
        and (not causal or (square and bias is None))
        and q.dtype in _FLOATS
        and q.numel()
        and k.numel()
        and q.size(-1) == v.size(-1)
    ):
        if bias is not None and bias.dim() not in (2, 4):
            bias = bias.expand(q.size(0), q.size(1), q.size(2), k.size(2))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bool(causal), attn_mask=bias, scale=scale
        )
        return out, lse.float()
    s = _scores(q.float(), k.float(), bias, causal, scale, window)
    p, lse = _probabilities(s)
    if dropout:
        p = p * _dropout(p.shape, dropout, key)
    return torch.matmul(p, v.float()).to(q.dtype), lse


def backward(
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    bias: Any = None,
    causal: str = "",
    scale: float | None = None,
    dropout: float = 0.0,
    key: Key = (0, 0),
    window: Any = None,
    bias_grad: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """Gradients of query, key, value and bias (None unless ``bias_grad``)."""
    scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    keys, values = _like_heads(q, k), _like_heads(q, v)
    square = q.size(2) == keys.size(2)
    if (
        not dropout
        and not bias_grad
        and window is None
        and (bias is None or bias.dtype in (q.dtype, torch.bool))
        and (not causal or (square and bias is None))
        and q.dtype in _FLOATS
        and q.numel()
        and k.numel()
        and q.size(-1) == v.size(-1)
    ):
        if bias is not None and bias.dim() not in (2, 4):
            bias = bias.expand(q.size(0), q.size(1), q.size(2), keys.size(2))
        sums = lse.reshape(q.size(0), q.size(1), -1)[..., : q.size(2)].contiguous()
        if q.dtype is torch.float64:
            sums = sums.double()
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, keys, values, out, sums, 0.0, bool(causal), attn_mask=bias, scale=scale
        )
        return dq, _fold_heads(dk, k), _fold_heads(dv, v), None
    s = _scores(q.float(), keys.float(), bias, causal, scale, window)
    p, _ = _probabilities(s)
    kept = _dropout(p.shape, dropout, key) if dropout else None
    g = grad.float()
    dv = torch.matmul((p if kept is None else p * kept).transpose(-1, -2), g)
    dp = torch.matmul(g, values.float().transpose(-1, -2))
    if kept is not None:
        dp = dp * kept
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    dq = torch.matmul(ds, keys.float()) * scale
    dk = torch.matmul(ds.transpose(-1, -2), q.float()) * scale
    return (
        dq.to(q.dtype),
        _fold_heads(dk, k).to(k.dtype),
        _fold_heads(dv, v).to(v.dtype),
        ds.to(q.dtype) if bias_grad else None,
    )


def _key_parts(key: Key) -> tuple[Any, Any]:
    return torch.tensor(_signed(key[0])), torch.tensor(_signed(key[1]))


def _sdpa_flash(
    key: Key, q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = forward(q, k, v, causal="top" if causal else "", scale=scale, dropout=p, key=key)
    seed, offset = _key_parts(key)
    return out, lse, None, None, None, None, _state(seed, offset), offset, None


def _sdpa_flash_backward(
    key: Key, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cq: Any, ck: Any, mq: int,
    mk: int, p: float, causal: bool, seed: Any, offset: Any, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    used = _seeds(seed, offset) if p else key
    return backward(
        grad, q, k, v, out, lse, causal="top" if causal else "", scale=scale, dropout=p, key=used
    )[:3]


def _padded(lse: Any, compute_log_sumexp: bool) -> Any:
    """Rows padded to a multiple of 32, as ``_efficient_attention_forward`` has them."""
    if not compute_log_sumexp:
        return lse[..., :0]
    room = -lse.size(-1) % 32
    return torch.nn.functional.pad(lse, (0, room), value=math.inf)


def _sdpa_efficient(
    key: Key, q: Any, k: Any, v: Any, bias: Any, compute_log_sumexp: bool, p: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = forward(
        q, k, v, bias=bias, causal="top" if causal else "", scale=scale, dropout=p, key=key
    )
    return out, _padded(lse, compute_log_sumexp), *_key_parts(key)


def _sdpa_efficient_backward(
    key: Key, grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, seed: Any,
    offset: Any, p: float, mask: Any, causal: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    used = _seeds(seed, offset) if p else key
    return backward(
        grad, q, k, v, out, lse, bias=bias if bias is not None and bias.numel() else None,
        causal="top" if causal else "", scale=scale, dropout=p, key=used, bias_grad=mask[3],
    )  # fmt: skip


def _sdpa_cudnn(
    key: Key, q: Any, k: Any, v: Any, bias: Any, compute_log_sumexp: bool, p: float = 0.0,
    causal: bool = False, debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = forward(
        q, k, v, bias=bias, causal="top" if causal else "", scale=scale, dropout=p, key=key
    )
    sums = lse.unsqueeze(-1) if compute_log_sumexp else None
    return out, sums, None, None, None, None, *_key_parts(key), None


def _sdpa_cudnn_backward(
    key: Key, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any,
    bias: Any, cq: Any, ck: Any, mq: int, mk: int, p: float, causal: bool, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    used = _seeds(seed, offset) if p else key
    return backward(
        grad, q, k, v, out, lse, bias=bias if bias is not None and bias.numel() else None,
        causal="top" if causal else "", scale=scale, dropout=p, key=used,
    )[:3]  # fmt: skip


def _sequences(
    q: Any, k: Any, v: Any, cq: Any, ck: Any, used: Any = None
) -> list[tuple[slice, slice]]:
    """Where the rows of each packed sequence are, in the query and in the key."""
    a, b = cq.tolist(), ck.tolist()
    ends = [
        start + int(used[i]) if used is not None else b[i + 1] for i, start in enumerate(b[:-1])
    ]
    return [(slice(a[i], a[i + 1]), slice(b[i], ends[i])) for i in range(len(a) - 1)]


def _heads_first(x: Any) -> Any:
    """``(batch, length, heads, size)`` as ``(batch, heads, length, size)``; without a batch with
    one.
    """
    return (x.unsqueeze(0) if x.dim() == 3 else x).transpose(1, 2)


def _packed_forward(
    q: Any, k: Any, v: Any, cq: Any, ck: Any, options: dict[str, Any], used: Any = None
) -> tuple[Any, list[Any]]:
    """Of packed sequences, ``(rows, heads, size)``: output, and the sums of each sequence."""
    batched = q.dim() == 4
    q3, k3, v3 = (x.squeeze(0) if batched else x for x in (q, k, v))
    out = torch.zeros((*q3.shape[:-1], v3.size(-1)), dtype=q3.dtype)
    sums = []
    for rows, others in _sequences(q3, k3, v3, cq, ck, used):
        if rows.stop == rows.start:
            sums.append(torch.zeros((1, q3.size(1), 0)))
            continue
        part, lse = forward(
            _heads_first(q3[rows]), _heads_first(k3[others]), _heads_first(v3[others]), **options
        )
        out[rows] = part.transpose(1, 2)[0]
        sums.append(lse)
    return out.unsqueeze(0) if batched else out, sums


def _packed_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, cq: Any, ck: Any, options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    batched = q.dim() == 4
    g3, q3, k3, v3, o3 = (x.squeeze(0) if batched else x for x in (grad, q, k, v, out))
    made = [torch.zeros(x.shape, dtype=x.dtype) for x in (q3, k3, v3)]
    for rows, others in _sequences(q3, k3, v3, cq, ck):
        if rows.stop == rows.start:
            continue
        q1, k1, v1 = (_heads_first(x) for x in (q3[rows], k3[others], v3[others]))
        plain = {name: value for name, value in options.items() if name != "bias"}
        _, lse = forward(q1, k1, v1, **plain)
        found = backward(_heads_first(g3[rows]), q1, k1, v1, _heads_first(o3[rows]), lse, **plain)
        for target, place, value in zip(made, (rows, others, others), found, strict=False):
            target[place] += value.transpose(1, 2)[0]
    dq, dk, dv = (x.unsqueeze(0) if batched else x for x in made)
    return dq, dk, dv


def _flash_window(left: int | None, right: int | None) -> Any:
    if (left is None or left < 0) and (right is None or right < 0):
        return None
    return left, right


def _flash(
    key: Key, q: Any, k: Any, v: Any, cq: Any, ck: Any, mq: int, mk: int, p: float, causal: bool,
    debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Any = None, alibi_slopes: Any = None,
    block_table: Any = None, num_splits: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    if alibi_slopes is not None or block_table is not None:
        raise NotImplementedError("alibi slopes and block tables")
    options = {
        "causal": "bottom" if causal else "", "scale": scale, "dropout": p, "key": key,
        "window": _flash_window(window_size_left, window_size_right),
    }  # fmt: skip
    seed, offset = _key_parts(key)
    if cq is None:
        out, lse = forward(_heads_first(q), _heads_first(k), _heads_first(v), **options)
        out = out.transpose(1, 2)
    else:
        out, sums = _packed_forward(q, k, v, cq, ck, options, seqused_k)
        lse = torch.cat([item[0] for item in sums], -1)  # (heads, rows)
    return out, lse, _state(seed, offset), offset, None


def _flash_backward(
    key: Key, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cq: Any, ck: Any, mq: int,
    mk: int, p: float, causal: bool, seed: Any, offset: Any, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    options = {
        "causal": "bottom" if causal else "", "scale": scale, "dropout": p,
        "key": _seeds(seed, offset) if p else key,
        "window": _flash_window(window_size_left, window_size_right),
    }  # fmt: skip
    if cq is not None:
        return _packed_backward(grad, q, k, v, out, cq, ck, options)
    g1, q1, k1, v1, o1 = (_heads_first(x) for x in (grad, q, k, v, out))
    found = backward(g1, q1, k1, v1, o1, lse, **options)
    return tuple(x.transpose(1, 2) for x in found[:3])


_CUSTOM_MASKS: Final = {0: "", 1: "top", 2: "bottom"}


def _efficient(
    key: Key, q: Any, k: Any, v: Any, bias: Any, cq: Any, ck: Any, mq: Any, mk: Any, p: float,
    mask: int, compute_log_sumexp: bool = False, *, scale: float | None = None,
    seqlen_k: Any = None, window_size: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    window = None if not window_size else (window_size - 1, None)
    options = {
        "causal": _CUSTOM_MASKS[mask], "scale": scale, "dropout": p, "key": key, "bias": bias,
        "window": window,
    }  # fmt: skip
    if cq is not None:
        out, sums = _packed_forward(q, k, v, cq, ck, options, seqlen_k)
        longest = -(-max((item.size(-1) for item in sums), default=0) // 32) * 32
        lse = torch.cat(
            [torch.nn.functional.pad(x, (0, longest - x.size(-1)), value=math.inf) for x in sums]
        )
        lse = lse if compute_log_sumexp else lse[..., :0]
    else:
        out, lse = forward(_heads_first(q), _heads_first(k), _heads_first(v), **options)
        out, lse = out.transpose(1, 2), _padded(lse, compute_log_sumexp)
    return out, lse, *_key_parts(key), None, None


def _efficient_backward(
    key: Key, grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, cq: Any, ck: Any, mq: int,
    mk: int, lse: Any, p: float, seed: Any, offset: Any, mask: int, bias_grad: bool, *,
    scale: float | None = None, num_splits_key: Any = None, window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    window = None if not window_size else (window_size - 1, None)
    options = {
        "causal": _CUSTOM_MASKS[mask], "scale": scale, "dropout": p, "bias": bias,
        "key": _seeds(seed, offset) if p else key, "window": window,
    }  # fmt: skip
    if cq is not None:
        return (*_packed_backward(grad, q, k, v, out, cq, ck, options), None)
    g1, q1, k1, v1, o1 = (_heads_first(x) for x in (grad, q, k, v, out))
    dq, dk, dv, db = backward(g1, q1, k1, v1, o1, lse, bias_grad=bias_grad, **options)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), db


KEYED: Final[dict[str, Callable[..., Any]]] = {
    "_scaled_dot_product_flash_attention": _sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
    "_scaled_dot_product_efficient_attention": _sdpa_efficient,
    "_scaled_dot_product_efficient_attention_backward": _sdpa_efficient_backward,
    "_scaled_dot_product_cudnn_attention": _sdpa_cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _sdpa_cudnn_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_efficient_attention_forward": _efficient,
    "_efficient_attention_backward": _efficient_backward,
}
"""By operator (``default``): called with the key of random numbers and the operator's arguments."""
