"""CUDA's fused attention kernels, with values: what the host's own attention computes.

The operators behind ``scaled_dot_product_attention`` on CUDA have no kernel for the CPU. These
give them one, which calls what the same function calls for tensors of the host, so that results
and gradients are the host's. Everything above works as on CUDA: autograd, DTensor, jagged tensors
and transforms know these operators. Results are laid out in memory as torch's meta kernels say.

Sources: ``flash_attn/flash_api.cpp``, ``attention.cu`` and ``attention_backward.cu`` in
``aten/src/ATen/native/transformers/cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpuprobe.errors import NotModelled
from gpuprobe.virtual.frames import where
from gpuprobe.virtual.generators import STATES, Generator, drawing_from
from gpuprobe.virtual.machine import Machine
from gpuprobe.virtual.torch_patches.keys import Kernels
from gpuprobe.virtual.values import gradients_of_efficient, needs_sums

_aten = torch.ops.aten
_FLASH: Final = SDPBackend.FLASH_ATTENTION.value
_AUTOGRAD: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
_BOTTOM_RIGHT: Final = 2  # custom_mask_type: CausalFromBottomRight


class Problem(NamedTuple):
    """Attention of tensors of shape (batch, heads, sequence, head dim)."""

    query: Any
    key: Any
    value: Any
    mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None

    @property
    def grouped(self) -> bool:
        return bool(self.query.size(1) != self.key.size(1))


def install(machine: Machine, kernels: Kernels) -> None:
    """Register the kernels."""
    made = _Kernels(machine)
    for name, kernel in (
        ("_scaled_dot_product_flash_attention", made.flash),
        ("_scaled_dot_product_flash_attention_backward", made.flash_backward),
        ("_scaled_dot_product_efficient_attention", made.efficient),
        ("_scaled_dot_product_efficient_attention_backward", made.efficient_backward),
        ("_scaled_dot_product_cudnn_attention", made.cudnn),
        ("_scaled_dot_product_cudnn_attention_backward", made.cudnn_backward),
        ("_flash_attention_forward", made.flash_forward),
        ("_flash_attention_backward", made.flash_forward_backward),
        ("_efficient_attention_forward", made.efficient_forward),
        ("_efficient_attention_backward", made.efficient_forward_backward),
    ):
        kernels.add(name, kernel, "CPU")


# -- the host's attention


def _as_on_a_host() -> Any:
    """The host's attention runs within, whichever kernel of CUDA's the program has chosen."""
    backends = torch.backends.cuda
    if backends.flash_sdp_enabled() and backends.math_sdp_enabled():
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])


def _takes_flash(problem: Problem) -> bool:
    choice = _aten._fused_sdp_choice.default(
        *problem[:6], scale=problem.scale, enable_gqa=problem.grouped
    )
    return bool(choice == _FLASH)


def attend(problem: Problem) -> tuple[Any, Any]:
    """The result, and the logarithm of each row's sum of exponentials as float32: (batch, heads,
    sequence).
    """
    query, key, value, mask, dropout_p, is_causal, scale = problem
    with _as_on_a_host():
        if _takes_flash(problem):
            out, sums = _aten._scaled_dot_product_flash_attention_for_cpu.default(
                query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
            )
            return out, sums.float()
        out = _aten._scaled_dot_product_attention_math.default(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale,
            enable_gqa=problem.grouped,
        )[0]  # fmt: skip
        return out, _sums(problem)


def _sums(problem: Problem) -> Any:
    query, key = problem.query.float(), problem.key.float()
    if problem.grouped:
        key = key.repeat_interleave(query.size(1) // key.size(1), 1)
    scale = query.size(-1) ** -0.5 if problem.scale is None else problem.scale
    scores = (query * scale) @ key.mT
    if problem.mask is not None:
        scores += problem.mask
    if problem.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores.masked_fill_(later, float("-inf"))
    return scores.logsumexp(-1)


def attend_backward(problem: Problem, grad: Any, out: Any, sums: Any, numbers: Any) -> list[Any]:
    """Gradients of query, key, value and (None where it needs none) of the mask. ``numbers``: what
    the forward pass began to draw from, None where it drew nothing.
    """
    query, key, value, mask, dropout_p, is_causal, scale = problem
    wanted = mask is not None and mask.requires_grad
    drawn = nullcontext() if numbers is None else drawing_from(numbers)
    with _as_on_a_host(), drawn:
        if not wanted and _takes_flash(problem):
            return [
                *_aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                    grad, query, key, value, out, sums, dropout_p, is_causal,
                    attn_mask=mask, scale=scale,
                ),
                None,
            ]  # fmt: skip
        with _differentiable():
            inputs = [item.detach().requires_grad_() for item in (query, key, value)]
            if wanted:
                inputs.append(mask.detach().requires_grad_())
            again = _aten._scaled_dot_product_attention_math.default(
                *inputs[:3], inputs[3] if wanted else mask, dropout_p, is_causal, None,
                scale=scale, enable_gqa=problem.grouped,
            )[0]  # fmt: skip
            found = list(torch.autograd.grad(again, inputs, grad))
        return found if wanted else [*found, None]


@contextmanager
def _differentiable() -> Iterator[None]:
    """Autograd is at work, which it is not below the operator that calls a kernel."""
    tls: Any = torch._C
    excluded = tls._dispatch_tls_local_exclude_set() - _AUTOGRAD
    included = tls._dispatch_tls_local_include_set()
    with tls._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


# -- in the words of CUDA's operators


def _like(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Results of ``operator`` as its meta kernel makes them."""
    meta = torch.device("meta")

    def valueless(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=meta)

    return operator(
        *(valueless(value) for value in args),
        **{name: valueless(value) for name, value in kwargs.items()},
    )


def _as(like: Any, values: Any) -> Any:
    """The values in memory of the strides of ``like``."""
    made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    return made.copy_(values)


def _padded(sums: Any, like: Any) -> Any:
    """In memory for a multiple of 32 rows, or for none."""
    made = torch.zeros(like.size(), dtype=like.dtype)
    rows = min(sums.size(-1), made.size(-1))
    made[..., :rows] = sums[..., :rows]
    return made


def _mask_of_window(rows: int, columns: int, left: int, right: int) -> Any:
    """Which keys a query sees: aligned at the last of each, from ``left`` before it to ``right``
    after it; negative numbers are no limit.
    """
    offset = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - (columns - rows)
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    return seen


def _added(seen: Any, dtype: Any) -> Any:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(seen.logical_not(), float("-inf"))


class _Kernels:
    """One for each operator, under its name without ``scaled_dot_product`` and ``attention``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def _generator(self, tensor: Any) -> Generator:
        place = max(self._machine.place_of(tensor), 0)
        return self._machine.generators.default[place]

    def _drawing(self, query: Any, dropout_p: float) -> Callable[[Any], Any]:
        """Called with the tensor of the random state once that is made: its contents, for the
        backward pass to find what the forward pass drew from.
        """
        key = self._generator(query).key
        numbers = torch.default_generator.get_state() if dropout_p else None

        def keep(holder: Any) -> Any:
            if numbers is not None:
                STATES.keep(holder, key, numbers)
            return holder

        return keep

    def _state(self, query: Any, dropout_p: float, size: tuple[int, ...]) -> tuple[Any, Any]:
        """The seed (and, with ``size`` (2,), the offset in the same tensor), and the offset."""
        keep = self._drawing(query, dropout_p)
        seed, offset = self._generator(query).key
        if size:
            made = torch.tensor([seed & (1 << 63) - 1, offset]).view(torch.uint64)
            return keep(made), torch.zeros((), dtype=torch.uint64)
        made = torch.tensor(seed & (1 << 63) - 1)
        return keep(made), torch.tensor(offset)

    def _numbers(self, query: Any, dropout_p: float, state: Any) -> Any:
        """What the forward pass drew from."""
        if not dropout_p:
            return None
        found = STATES.held(state)
        if found is None:
            raise NotModelled(
                f"{where()}: a virtual GPU cannot do this: the backward pass of attention with "
                "dropout for a random state that no forward pass gave"
            )
        return found

    # -- scaled_dot_product_*: (batch, heads, sequence, head dim)

    def flash(
        self, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        state = self._state(query, dropout_p, (2,))
        out, sums = attend(Problem(query, key, value, None, dropout_p, is_causal, scale))
        like = _like(
            _aten._scaled_dot_product_flash_attention.default,
            query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale,
        )  # fmt: skip
        debug = torch.zeros(like[8].size(), dtype=like[8].dtype)
        return _as(like[0], out), sums.contiguous(), None, None, like[4], like[5], *state, debug

    def flash_backward(
        self, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, cum_q: Any,
        cum_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, state: Any,
        unused: Any, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        problem = Problem(query, key, value, None, dropout_p, is_causal, scale)
        numbers = self._numbers(query, dropout_p, state)
        found = attend_backward(problem, grad, out, sums, numbers)
        return tuple(
            torch.empty_like(like).copy_(one) for like, one in zip(problem[:3], found, strict=False)
        )

    def efficient(
        self, query: Any, key: Any, value: Any, bias: Any, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        state = self._state(query, dropout_p, ())
        out, sums = attend(Problem(query, key, value, bias, dropout_p, is_causal, scale))
        like = _like(
            _aten._scaled_dot_product_efficient_attention.default,
            query, key, value, bias, compute_log_sumexp, dropout_p, is_causal, scale=scale,
        )  # fmt: skip
        return _as(like[0], out), _padded(sums, like[1]), *state

    def efficient_backward(
        self, grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, sums: Any,
        seed: Any, offset: Any, dropout_p: float, mask: list[bool], is_causal: bool = False, *,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        like = _like(
            _aten._scaled_dot_product_efficient_attention_backward.default,
            grad, query, key, value, bias, out, sums, seed, offset, dropout_p, mask, is_causal,
            scale=scale,
        )  # fmt: skip
        if bias is not None and mask[3]:
            bias = bias.detach().requires_grad_()
        problem = Problem(query, key, value, bias, dropout_p, is_causal, scale)
        sums = sums[..., : query.size(2)].contiguous()
        numbers = self._numbers(query, dropout_p, seed)
        found = attend_backward(problem, grad, out, sums, numbers)
        return tuple(
            None if one is None else _as(other, one) for one, other in zip(found, like, strict=True)
        )

    def cudnn(
        self, query: Any, key: Any, value: Any, bias: Any, compute_log_sumexp: bool,
        dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        state = self._state(query, dropout_p, ())
        out, sums = attend(Problem(query, key, value, bias, dropout_p, is_causal, scale))
        like = _like(
            _aten._scaled_dot_product_cudnn_attention.default,
            query, key, value, bias, compute_log_sumexp, dropout_p, is_causal,
            return_debug_mask, scale=scale,
        )  # fmt: skip
        sums = _as(like[1], sums.view(like[1].shape)) if compute_log_sumexp else sums.new_empty(0)
        return _as(like[0], out), sums, None, None, like[4], like[5], *state, None

    def cudnn_backward(
        self, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, seed: Any,
        offset: Any, bias: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        problem = Problem(query, key, value, bias, dropout_p, is_causal, scale)
        sums = sums.reshape(query.shape[:3])
        numbers = self._numbers(query, dropout_p, seed)
        found = attend_backward(problem, grad, out, sums, numbers)
        return tuple(
            torch.empty_like(like).copy_(one) for like, one in zip(problem[:3], found, strict=False)
        )

    # -- *_attention_forward: (batch, sequence, heads, head dim), or sequences one after the other

    def flash_forward(
        self, query: Any, key: Any, value: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
        window_size_left: int | None = None, window_size_right: int | None = None,
        seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
        num_splits: int | None = None,
    ) -> Any:  # fmt: skip
        _only(seqused_k=seqused_k, alibi_slopes=alibi_slopes, block_table=block_table)
        state = self._state(query, dropout_p, (2,))
        window = _Window.of(is_causal, window_size_left, window_size_right)
        outs, sums = [], []
        for problem in _pieces(query, key, value, cum_q, cum_k, dropout_p, window, scale):
            out, one = attend(problem)
            outs.append(_blank_to_zero(problem, out).transpose(1, 2))
            sums.append(one)
        like = _like(
            _aten._flash_attention_forward.default,
            query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,
            return_debug_mask, scale=scale,
        )  # fmt: skip
        debug = torch.zeros(like[4].size(), dtype=like[4].dtype)
        if cum_q is None:
            return _as(like[0], outs[0]), sums[0].contiguous(), *state, debug
        joined = torch.cat([out[0] for out in outs])
        return _as(like[0], joined), torch.cat([one[0] for one in sums], -1), *state, debug

    def flash_forward_backward(
        self, grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, cum_q: Any,
        cum_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, state: Any,
        unused: Any, *, scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        window = _Window.of(is_causal, window_size_left, window_size_right)
        numbers = self._numbers(query, dropout_p, state)
        grads = _backward_of_pieces(
            grad, query, key, value, out, sums, cum_q, cum_k, dropout_p, window, scale, numbers
        )
        return tuple(
            torch.empty_like(like).copy_(one)
            for like, one in zip((query, key, value), grads, strict=True)
        )

    def efficient_forward(
        self, query: Any, key: Any, value: Any, bias: Any, cum_q: Any, cum_k: Any,
        max_q: int | None, max_k: int | None, dropout_p: float, custom_mask_type: int,
        compute_log_sumexp: bool = False, *, scale: float | None = None, seqlen_k: Any = None,
        window_size: int | None = None,
    ) -> Any:  # fmt: skip
        _only(seqlen_k=seqlen_k)
        state = self._state(query, dropout_p, ())
        window = _Window.of_type(custom_mask_type, window_size)
        outs, sums = [], []
        for problem in _pieces(query, key, value, cum_q, cum_k, dropout_p, window, scale, bias):
            out, one = attend(problem)
            outs.append(_blank_to_zero(problem, out).transpose(1, 2))
            sums.append(one)
        like = _like(
            _aten._efficient_attention_forward.default,
            query, key, value, bias, cum_q, cum_k, max_q, max_k, dropout_p, custom_mask_type,
            compute_log_sumexp, scale=scale,
        )  # fmt: skip
        made = torch.zeros(like[1].size(), dtype=like[1].dtype)
        if made.numel():
            for at, one in enumerate(sums):
                part = made if cum_q is None else made[at : at + 1]
                part[..., : one.size(-1)] = one
        joined = torch.cat(outs, 1)  # sequences of a batch, one after the other
        return _as(like[0], joined), made, *state, like[4], like[5]

    def efficient_forward_backward(
        self, grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, cum_q: Any,
        cum_k: Any, max_q: int, max_k: int, sums: Any, dropout_p: float, seed: Any, offset: Any,
        custom_mask_type: int, bias_requires_grad: bool, *, scale: float | None = None,
        num_splits_key: int | None = None, window_size: int | None = None,
        shared_storage_dqdkdv: bool = False,
    ) -> Any:  # fmt: skip
        needs_sums(query, sums)
        window = _Window.of_type(custom_mask_type, window_size)
        numbers = self._numbers(query, dropout_p, seed)
        if bias is not None and bias_requires_grad:
            if cum_q is not None:
                _only(bias_with_sequences=bias)
            bias = bias.detach().requires_grad_()
        *grads, of_bias = _backward_of_pieces(
            grad, query, key, value, out, sums, cum_q, cum_k, dropout_p, window, scale, numbers,
            bias, padded=True,
        )  # fmt: skip
        made: list[Any] = gradients_of_efficient(query, key, value, bias, shared_storage_dqdkdv)
        for target, one in zip(made, (*grads, of_bias), strict=True):
            if one is not None:
                target.copy_(one)
        return tuple(made)


def _only(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotModelled(
                f"{where()}: a virtual GPU cannot do this with values: attention with "
                f"{name.replace('_', ' ')}"
            )


class _Window(NamedTuple):
    """How far before and after its own place a query sees; negative: no limit."""

    left: int
    right: int
    top_left: bool = False
    """Places are counted from the first query and key, not from the last."""

    @classmethod
    def of(cls, is_causal: bool, left: int | None, right: int | None) -> _Window:
        left, right = -1 if left is None else left, -1 if right is None else right
        return cls(left, 0 if is_causal else right)

    @classmethod
    def of_type(cls, kind: int, window: int | None) -> _Window:
        left = -1 if not window else window - 1
        if not kind:
            return cls(left, -1)
        return cls(left, 0, top_left=kind != _BOTTOM_RIGHT)

    def applied(self, rows: int, columns: int) -> tuple[bool, Any]:
        """``is_causal``, and which keys are seen where that does not say it."""
        if self.left < 0 and self.right < 0:
            return False, None
        if self.left < 0 and self.right == 0 and (rows == columns or self.top_left):
            return True, None
        shift = columns - rows if self.top_left else 0
        return False, _mask_of_window(rows, columns + shift, self.left, self.right)[:, :columns]


def _pieces(
    query: Any, key: Any, value: Any, cum_q: Any, cum_k: Any, dropout_p: float, window: _Window,
    scale: float | None, bias: Any = None,
) -> Iterator[Problem]:  # fmt: skip
    """One problem, or one for each sequence."""
    for q, k, v in _split(cum_q, cum_k, query, key, value):
        is_causal, seen = window.applied(q.size(2), k.size(2))
        mask = None if seen is None else _added(seen, q.dtype)
        if bias is not None:
            part = bias[..., : q.size(2), : k.size(2)]
            mask = part if mask is None else part + mask
        yield Problem(q, k, v, mask, dropout_p, is_causal, scale)


def _split(cum_q: Any, cum_k: Any, *tensors: Any) -> Iterator[tuple[Any, ...]]:
    """As (batch, heads, sequence, head dim): the first as ``cum_q`` divides it, others ``cum_k``.
    Memory-efficient attention has a batch of one before sequences that lie one after the other.
    """
    if cum_q is None:
        yield tuple(tensor.transpose(1, 2) for tensor in tensors)
        return
    tolist = torch._C.TensorBase.tolist  # `Tensor.tolist` is replaced, and asks for the place
    ends = [tolist(cum_q)] + [tolist(cum_q if cum_k is None else cum_k)] * 2
    if len(tensors) > 3:
        ends += [ends[0]] * (len(tensors) - 3)
    flat = [tensor[0] if tensor.dim() == 4 else tensor for tensor in tensors]
    for at in range(len(ends[0]) - 1):
        yield tuple(
            tensor[end[at] : end[at + 1]].unsqueeze(0).transpose(1, 2)
            for tensor, end in zip(flat, ends, strict=True)
        )


def _blank_to_zero(problem: Problem, out: Any) -> Any:
    """A query that sees no key has zeros for a result, where the host has NaN."""
    if problem.mask is None or problem.query.size(2) <= problem.key.size(2):
        return out
    blind = (problem.mask == float("-inf")).all(-1, keepdim=True)
    return out.masked_fill(blind, 0)


def _backward_of_pieces(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, cum_q: Any, cum_k: Any,
    dropout_p: float, window: _Window, scale: float | None, numbers: Any, bias: Any = None,
    padded: bool = False,
) -> list[Any]:  # fmt: skip
    """Gradients of query, key and value in their own shapes (and of the bias where there may be
    one).
    """
    pieces = list(_split(cum_q, cum_k, query, key, value, out, grad))
    found: list[list[Any]] = []
    start = 0
    drawn = nullcontext() if numbers is None else drawing_from(numbers)
    with drawn:  # one sequence after the other, as the forward pass did
        problems = _pieces(query, key, value, cum_q, cum_k, dropout_p, window, scale, bias)
        for at, (problem, (q, _, _, o, g)) in enumerate(zip(problems, pieces, strict=True)):
            length = q.size(2)
            if cum_q is None:
                one = sums[..., :length]
            elif padded:
                one = sums[at : at + 1, :, :length]
            else:
                one = sums[None, :, start : start + length]
            start += length
            found.append(attend_backward(problem, g, o, one.contiguous(), None))
    grads = []
    for at, like in enumerate((query, key, value)):
        parts = [piece[at].transpose(1, 2) for piece in found]
        grads.append(torch.cat(parts, 1).reshape(like.shape))
    return [*grads, found[0][3]] if padded else grads
