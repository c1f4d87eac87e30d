"""Attention's operators of CUDA on the CPU: flash, memory-efficient and cuDNN's.

Without dropout and biases the CPU's own flash attention computes them, so that results equal the
CPU's. Otherwise the formula is computed in float32: P = softmax(scale QKᵀ + bias), O = (P∘M)V, with
a mask M of dropout that is drawn from the seed and offset that the operator returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gpuprobe.native.values.draws import Key, generator_of

_aten: Final = torch.ops.aten
_FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_Window: TypeAlias = tuple[int | None, int | None]
"""How many keys before and after a query's own it attends to; None or below 0: all."""
_Results: TypeAlias = tuple[Tensor | None, ...]
_FLASH: Final = _aten._scaled_dot_product_flash_attention.default
_ONE_STATE: Final = _FLASH._schema.returns[6].name == "rng_state"
"""Flash attention returns seed and offset as one tensor (torch 2.7), or as two."""


class _Formula(NamedTuple):
    """``causal``: "", "top" (aligned at the first element) or "bottom" (at the last). ``scale``: of
    the scores; None for one over the square root of the size. ``dropout``: the share that is left
    out, drawn from ``key``.
    """

    causal: str = ""
    scale: float | None = None
    dropout: float = 0.0
    key: Key = (0, 0)
    window: _Window | None = None
    bias: Tensor | None = None

    def is_plain(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the CPU's own flash attention computes it."""
        bias = self.bias
        return bool(
            not self.dropout
            and self.window is None
            and (bias is None or bias.dtype in (q.dtype, torch.bool))
            and (not self.causal or (q.size(2) == k.size(2) and bias is None))
            and q.dtype in _FLOATS
            and q.numel()
            and k.numel()
            and q.size(-1) == v.size(-1)
        )

    def mask(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The bias in a shape that the CPU's flash attention takes."""
        bias = self.bias
        if bias is None or bias.dim() in (2, 4):
            return bias
        return bias.expand(q.size(0), q.size(1), q.size(2), k.size(2))

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """scale QKᵀ + bias, -inf where a query does not attend."""
        s = torch.matmul(q, k.transpose(-1, -2)) * scale
        if self.bias is not None:
            s = s + self.bias.float()
        if not self.causal and self.window is None:
            return s
        rows, columns = s.shape[-2:]
        i, j = torch.arange(rows)[:, None], torch.arange(columns)
        shift = columns - rows if self.causal != "top" else 0
        allowed = torch.ones((rows, columns), dtype=torch.bool)
        if self.causal:
            allowed &= j <= i + shift
        if self.window is not None:
            left, right = self.window
            if left is not None and left >= 0:
                allowed &= j >= i + shift - left
            if right is not None and right >= 0:
                allowed &= j <= i + shift + right
        return s.masked_fill(~allowed, -math.inf)

    def scale_of(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.size(-1)) if self.scale is None else self.scale


def _state(seed: Tensor, offset: Tensor) -> Tensor:
    return torch.stack((seed, offset)) if _ONE_STATE else seed


def _seeds(seed: Tensor, offset: Tensor) -> Key:
    """The key that a forward operator wrote into its results: two tensors, or one of both."""
    if seed.numel() >= 2:
        numbers = seed.flatten()
        return int(numbers[0]), int(numbers[1])
    return int(seed), int(offset) if offset.numel() else 0


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _dropout(shape: torch.Size, p: float, key: Key) -> Tensor:
    """1/(1-p) where an element is kept."""
    kept = torch.rand(shape, generator=generator_of(key)) >= p
    return kept.float() / (1 - p)


def _probabilities(s: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.unsqueeze(-1)).nan_to_num(0.0)
    return p, lse


def _like_heads(q: Tensor, k: Tensor) -> Tensor:
    """Key or value heads that several query heads share, repeated."""
    times = q.size(1) // k.size(1)
    return k if times == 1 else k.repeat_interleave(times, 1)


def _fold_heads(grad: Tensor, k: Tensor) -> Tensor:
    times = grad.size(1) // k.size(1)
    if times == 1:
        return grad
    return grad.unflatten(1, (k.size(1), times)).sum(2)


def _forward(q: Tensor, k: Tensor, v: Tensor, formula: _Formula) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sums of ``(batch, heads, length, size)`` tensors."""
    scale = formula.scale_of(q)
    k, v = _like_heads(q, k), _like_heads(q, v)
    if formula.is_plain(q, k, v):
        mask = formula.mask(q, k)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bool(formula.causal), attn_mask=mask, scale=scale
        )
        return out, lse.float()
    p, lse = _probabilities(formula.scores(q.float(), k.float(), scale))
    if formula.dropout:
        p = p * _dropout(p.shape, formula.dropout, formula.key)
    return torch.matmul(p, v.float()).to(q.dtype), lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, formula: _Formula, *,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of query, key, value and bias (None unless ``bias_grad``)."""
    scale = formula.scale_of(q)
    keys, values = _like_heads(q, k), _like_heads(q, v)
    if not bias_grad and formula.is_plain(q, keys, v):
        mask = formula.mask(q, keys)
        sums = lse.reshape(q.size(0), q.size(1), -1)[..., : q.size(2)].contiguous()
        if q.dtype is torch.float64:
            sums = sums.double()
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, keys, values, out, sums, 0.0, bool(formula.causal), attn_mask=mask, scale=scale
        )
        return dq, _fold_heads(dk, k), _fold_heads(dv, v), None
    p, _ = _probabilities(formula.scores(q.float(), keys.float(), scale))
    kept = _dropout(p.shape, formula.dropout, formula.key) if formula.dropout else None
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


def _key_parts(key: Key) -> tuple[Tensor, Tensor]:
    return torch.tensor(_signed(key[0])), torch.tensor(_signed(key[1]))


def _sdpa_flash(
    key: Key, q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> _Results:  # fmt: skip
    out, lse = _forward(q, k, v, _Formula("top" if causal else "", scale, p, key))
    seed, offset = _key_parts(key)
    return out, lse, None, None, None, None, _state(seed, offset), offset, None


def _sdpa_flash_backward(
    key: Key, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cq: Tensor | None, ck: Tensor | None, mq: int, mk: int, p: float, causal: bool, seed: Tensor,
    offset: Tensor, *, scale: float | None = None,
) -> _Results:  # fmt: skip
    used = _seeds(seed, offset) if p else key
    formula = _Formula("top" if causal else "", scale, p, used)
    return _backward(grad, q, k, v, out, lse, formula)[:3]


def _padded(lse: Tensor, compute_log_sumexp: bool) -> Tensor:
    """Rows padded to a multiple of 32, as ``_efficient_attention_forward`` has them."""
    if not compute_log_sumexp:
        return lse[..., :0]
    room = -lse.size(-1) % 32
    return torch.nn.functional.pad(lse, (0, room), value=math.inf)


def _sdpa_efficient(
    key: Key, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool,
    p: float = 0.0, causal: bool = False, *, scale: float | None = None,
) -> _Results:  # fmt: skip
    out, lse = _forward(q, k, v, _Formula("top" if causal else "", scale, p, key, bias=bias))
    return out, _padded(lse, compute_log_sumexp), *_key_parts(key)


def _sdpa_efficient_backward(
    key: Key, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
    lse: Tensor, seed: Tensor, offset: Tensor, p: float, mask: Sequence[bool], causal: bool = False,
    *, scale: float | None = None,
) -> _Results:  # fmt: skip
    used = _seeds(seed, offset) if p else key
    bias = bias if bias is not None and bias.numel() else None
    formula = _Formula("top" if causal else "", scale, p, used, bias=bias)
    return _backward(grad, q, k, v, out, lse, formula, bias_grad=mask[3])


def _sdpa_cudnn(
    key: Key, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool,
    p: float = 0.0, causal: bool = False, debug: bool = False, *, scale: float | None = None,
) -> _Results:  # fmt: skip
    out, lse = _forward(q, k, v, _Formula("top" if causal else "", scale, p, key, bias=bias))
    sums = lse.unsqueeze(-1) if compute_log_sumexp else None
    return out, sums, None, None, None, None, *_key_parts(key), None


def _sdpa_cudnn_backward(
    key: Key, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, bias: Tensor | None, cq: Tensor | None, ck: Tensor | None, mq: int, mk: int,
    p: float, causal: bool, *, scale: float | None = None,
) -> _Results:  # fmt: skip
    used = _seeds(seed, offset) if p else key
    bias = bias if bias is not None and bias.numel() else None
    formula = _Formula("top" if causal else "", scale, p, used, bias=bias)
    return _backward(grad, q, k, v, out, lse, formula)[:3]


def _sequences(cq: Tensor, ck: Tensor, used: Tensor | None = None) -> list[tuple[slice, slice]]:
    """Where the rows of each packed sequence are, in the query and in the key."""
    a, b = cq.tolist(), ck.tolist()
    ends = [
        start + int(used[i]) if used is not None else b[i + 1] for i, start in enumerate(b[:-1])
    ]
    return [(slice(a[i], a[i + 1]), slice(b[i], ends[i])) for i in range(len(a) - 1)]


def _heads_first(x: Tensor) -> Tensor:
    """``(batch, length, heads, size)`` as ``(batch, heads, length, size)``; without a batch with
    one.
    """
    return (x.unsqueeze(0) if x.dim() == 3 else x).transpose(1, 2)


def _packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cq: Tensor, ck: Tensor, formula: _Formula,
    used: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Of packed sequences, ``(rows, heads, size)``: output, and the sums of each sequence."""
    batched = q.dim() == 4
    q3, k3, v3 = (x.squeeze(0) if batched else x for x in (q, k, v))
    out = torch.zeros((*q3.shape[:-1], v3.size(-1)), dtype=q3.dtype)
    sums = []
    for rows, others in _sequences(cq, ck, used):
        if rows.stop == rows.start:
            sums.append(torch.zeros((1, q3.size(1), 0)))
            continue
        part, lse = _forward(
            _heads_first(q3[rows]), _heads_first(k3[others]), _heads_first(v3[others]), formula
        )
        out[rows] = part.transpose(1, 2)[0]
        sums.append(lse)
    return out.unsqueeze(0) if batched else out, sums


def _packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cq: Tensor, ck: Tensor,
    formula: _Formula,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batched = q.dim() == 4
    g3, q3, k3, v3, o3 = (x.squeeze(0) if batched else x for x in (grad, q, k, v, out))
    made = [torch.zeros(x.shape, dtype=x.dtype) for x in (q3, k3, v3)]
    plain = formula._replace(bias=None)
    for rows, others in _sequences(cq, ck):
        if rows.stop == rows.start:
            continue
        q1, k1, v1 = (_heads_first(x) for x in (q3[rows], k3[others], v3[others]))
        _, lse = _forward(q1, k1, v1, plain)
        found = _backward(_heads_first(g3[rows]), q1, k1, v1, _heads_first(o3[rows]), lse, plain)
        for target, place, value in zip(made, (rows, others, others), found, strict=False):
            target[place] += value.transpose(1, 2)[0]
    dq, dk, dv = (x.unsqueeze(0) if batched else x for x in made)
    return dq, dk, dv


def _flash_window(left: int | None, right: int | None) -> _Window | None:
    if (left is None or left < 0) and (right is None or right < 0):
        return None
    return left, right


def _flash(
    key: Key, q: Tensor, k: Tensor, v: Tensor, cq: Tensor | None, ck: Tensor, mq: int, mk: int,
    p: float, causal: bool, debug: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> _Results:  # fmt: skip
    if alibi_slopes is not None or block_table is not None:
        raise NotImplementedError("alibi slopes and block tables")
    window = _flash_window(window_size_left, window_size_right)
    formula = _Formula("bottom" if causal else "", scale, p, key, window)
    seed, offset = _key_parts(key)
    if cq is None:
        out, lse = _forward(_heads_first(q), _heads_first(k), _heads_first(v), formula)
        out = out.transpose(1, 2)
    else:
        out, sums = _packed_forward(q, k, v, cq, ck, formula, seqused_k)
        lse = torch.cat([item[0] for item in sums], -1)  # (heads, rows)
    return out, lse, _state(seed, offset), offset, None


def _flash_backward(
    key: Key, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cq: Tensor | None, ck: Tensor, mq: int, mk: int, p: float, causal: bool, seed: Tensor,
    offset: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> _Results:  # fmt: skip
    window = _flash_window(window_size_left, window_size_right)
    used = _seeds(seed, offset) if p else key
    formula = _Formula("bottom" if causal else "", scale, p, used, window)
    if cq is not None:
        return _packed_backward(grad, q, k, v, out, cq, ck, formula)
    g1, q1, k1, v1, o1 = (_heads_first(x) for x in (grad, q, k, v, out))
    found = _backward(g1, q1, k1, v1, o1, lse, formula)
    return tuple(x.transpose(1, 2) for x in found[:3])


_CUSTOM_MASKS: Final = {0: "", 1: "top", 2: "bottom"}


def _efficient(
    key: Key, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cq: Tensor | None, ck: Tensor,
    mq: int | None, mk: int | None, p: float, mask: int, compute_log_sumexp: bool = False, *,
    scale: float | None = None, seqlen_k: Tensor | None = None, window_size: int | None = None,
) -> _Results:  # fmt: skip
    window = None if not window_size else (window_size - 1, None)
    formula = _Formula(_CUSTOM_MASKS[mask], scale, p, key, window, bias)
    if cq is not None:
        out, sums = _packed_forward(q, k, v, cq, ck, formula, seqlen_k)
        longest = -(-max((item.size(-1) for item in sums), default=0) // 32) * 32
        lse = torch.cat(
            [torch.nn.functional.pad(x, (0, longest - x.size(-1)), value=math.inf) for x in sums]
        )
        lse = lse if compute_log_sumexp else lse[..., :0]
    else:
        out, lse = _forward(_heads_first(q), _heads_first(k), _heads_first(v), formula)
        out, lse = out.transpose(1, 2), _padded(lse, compute_log_sumexp)
    return out, lse, *_key_parts(key), None, None


def _efficient_backward(
    key: Key, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
    cq: Tensor | None, ck: Tensor, mq: int, mk: int, lse: Tensor, p: float, seed: Tensor,
    offset: Tensor, mask: int, bias_grad: bool, *, scale: float | None = None,
    num_splits_key: int | None = None, window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> _Results:  # fmt: skip
    window = None if not window_size else (window_size - 1, None)
    used = _seeds(seed, offset) if p else key
    formula = _Formula(_CUSTOM_MASKS[mask], scale, p, used, window, bias)
    if cq is not None:
        return (*_packed_backward(grad, q, k, v, out, cq, ck, formula), None)
    g1, q1, k1, v1, o1 = (_heads_first(x) for x in (grad, q, k, v, out))
    dq, dk, dv, db = _backward(g1, q1, k1, v1, o1, lse, formula, bias_grad=bias_grad)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), db


KEYED: Final[dict[str, Callable[..., _Results]]] = {
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
