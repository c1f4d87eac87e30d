"""What operators compute: floating-point operations, bytes and sizes, from their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy

from gpuprobe.model.run.work import Work, WorkKind
from gpuprobe.torch_support.kernels import OVERWRITES, runs_kernel, takes_shape
from gpuprobe.torch_support.tensors import is_without_gaps, size_of

_Tensor: Final = torch.Tensor
_Arguments = Mapping[str, Any]

_INDEXED: Final = frozenset(
    """index index_put index_put_ _index_put_impl_ index_select index_add index_add_ index_copy
    index_copy_ gather gather_backward scatter scatter_ scatter_add scatter_add_ scatter_reduce
    scatter_reduce_ take embedding embedding_dense_backward _embedding_bag
    _embedding_bag_forward_only _embedding_bag_dense_backward sort topk argsort kthvalue unique_dim
    _unique2 unique_consecutive nonzero masked_select masked_scatter masked_scatter_ searchsorted
    bucketize histc bincount grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward cumsum cumprod
    logcumsumexp median mode flip roll nll_loss_forward nll_loss2d_forward""".split()  # noqa: SIM905 - a list to be read
)
_PICKING: Final = frozenset(
    """index index_select gather take embedding nll_loss_forward nll_loss2d_forward
    _embedding_bag _embedding_bag_forward_only masked_select""".split()  # noqa: SIM905 - a list to be read
)
"""Of their first argument they read as many elements as they write, or as they have indices."""
_ADDING: Final = frozenset(
    """index_put_ _index_put_impl_ index_add_ index_copy_ scatter_ scatter_add_ scatter_reduce_
    masked_scatter_""".split()  # noqa: SIM905 - a list to be read
)
"""Of their first argument they change as many elements as their last tensor has."""
_SMALL: Final = 1 << 16  # bytes of an operator on the CPU that takes no time to speak of
_LIBRARIES: Final = (
    "_cudnn_rnn",
    "_thnn_fused_lstm",
    "_cudnn_ctc",
    "_ctc",
    "linalg_",
    "_linalg_",
    "cholesky",
    "_fft_",
    "_sparse_",
    "_cslt",
    "_histogramdd",
    "_trilinear",
    "_flex_attention",
    "_grouped_mm",
    "_scaled_grouped_mm",
)
"""Operators of libraries whose work depends on more than sizes, by the begin of their names."""
_OWN: Final = frozenset(("linalg_vector_norm", "linalg_vector_norm_out", "linalg_cross"))
"""Of those, operators with torch's own kernels: reductions, and a pointwise one."""


_MOST: Final = 50_000  # kinds of calls that are remembered: sizes may differ in every step


class OperatorWork:
    """The work of operators, each kind of call made once."""

    def __init__(self) -> None:
        self._known: dict[Any, Work | None] = {}
        self._keys: dict[int, tuple[OpOverload, _KeyOf | None]] = {}
        """By identity: operators have a hash in Python. Kept, so that none gets another's."""

    def of(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> Work | None:
        """The work of a call; None for one that has none, such as a view."""
        known = self._keys.get(id(op))
        if known is None:
            known = self._keys[id(op)] = op, _key_of(op)
        key_of = known[1]
        if key_of is None:
            return None
        key = (id(op), key_of(args), key_of(tuple(kwargs.values())) if kwargs else None)
        try:
            return self._known[key]
        except KeyError:
            if len(self._known) == _MOST:
                self._known.clear()
            made = self._known[key] = _work(op, args, kwargs, result)
            return made


_KeyOf = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def _key_of(op: OpOverload) -> _KeyOf | None:
    """What makes keys of an operator's arguments; None for an operator without work."""
    if not runs_kernel(op):
        return None
    name = op._schema.name.rpartition("::")[2]
    if name.startswith("_foreach_"):
        return _key_of_lists
    return _key_of_product if name in _PRODUCTS else _key


def _key_of_product(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*_key(values), _tf32())


def _key_of_lists(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of an operator over lists of tensors, whose work depends on the bytes of each list,
    and on the type of its largest tensor.
    """
    return tuple(
        part
        for value in values
        for part in (
            (_sum_of(value) or _key((value,)))
            if type(value) is list or type(value) is tuple
            else _key((value,))
        )
    )


_traits: Final = attrgetter("dtype", "layout", "is_cuda")
_nbytes: Final = attrgetter("nbytes")
_is_dense: Final = torch.Tensor.is_contiguous
_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}
_NUMBERS: Final = {int, bool, str, type(None)}


def _sum_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """The key of a list of dense tensors of one type on one kind of device; empty for another."""
    if not values or not _PLAIN.issuperset(map(type, values)):
        return ()
    kinds = set(map(_traits, values))
    kind = kinds.pop()
    if kinds or kind[1] is not torch.strided or not all(map(_is_dense, values)):
        return ()
    sizes = list(map(_nbytes, values))
    return kind, len(sizes), sum(sizes), max(sizes)


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    key: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _NUMBERS:
            key.append(value)
        elif kind not in _PLAIN and is_lazy(value):  # of a lazy module: it has no shape
            key.append(kind)
        elif isinstance(value, _Tensor):
            layout = value.layout
            key.append(
                (value.shape, value.stride(), value.dtype, value.is_cuda)
                if layout is torch.strided
                else (value.shape, layout, value.dtype)
            )
        elif isinstance(value, (list, tuple)):
            key.append(_key(value))
        elif isinstance(value, (int, bool, str)) or value is None:
            key.append(value)
    return tuple(key)


def _tf32() -> tuple[bool, bool]:
    """Whether products and convolutions of float32 are computed in TF32."""
    getter: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is not None:
        return getter("cuda", "matmul") == "tf32", getter("cuda", "conv") == "tf32"
    return (
        bool(torch.backends.cuda.matmul.allow_tf32),
        bool(torch.backends.cudnn.allow_tf32),
    )


def _work(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
) -> Work | None:
    if not runs_kernel(op):
        return None
    name = op._schema.name.rpartition("::")[2]
    given = _bound(op, args, kwargs)
    tensors = [t for value in given.values() for t in _tensors(value)]
    results = _tensors(result)
    operator = op._schema.name
    if any(is_lazy(t) for t in (*tensors, *results)):
        return None
    if not any(t.is_cuda for t in (*tensors, *results)):
        on_host = [t for t in (*tensors, *results) if t.layout is torch.strided and t.is_cpu]
        size = sum(map(size_of, on_host))
        return Work(operator, WorkKind.HOST, read=size) if size > _SMALL else None
    library = name.startswith(_LIBRARIES) and name not in _OWN
    if library or any(t.layout is not torch.strided for t in (*tensors, *results)):
        return _of_library(operator, given, tensors, results)
    read, written = _moved(op, name, given, results)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(operator, given, results, read, written)
    kind = WorkKind.INDEXED if name in _INDEXED else WorkKind.ELEMENTS
    sizes = (_row(given),) if "softmax" in name else ()
    variant = ""
    if kind is WorkKind.ELEMENTS and (torch.Tag.pointwise in op.tags or name in _COPIES):
        scattered = _is_scattered(name, given, [t for t in (*tensors, *results) if t.dim()])
        variant = "scattered" if scattered else "pointwise"
        sizes = (max(map(torch.numel, results)),) if scattered and results else ()
    return Work(
        operator, kind, _dtype(tensors, results), sizes, variant, read=read, written=written
    )


def _of_library(
    operator: str, given: _Arguments, tensors: list[torch.Tensor], results: list[torch.Tensor]
) -> Work:
    """Work without a price, and how much of a step it is at least: each tensor once, and the
    matrix products of a recurrent network.
    """
    read, written = (
        sum(size_of(t) for t in rows if t.layout is torch.strided) for rows in (tensors, results)
    )
    flops = 0
    if "_cudnn_rnn" in operator and "input" in given:
        x = given["input"]
        passes = 2 if "backward" in operator else 1
        products = sum(t.numel() for t in _tensors(given.get("weight")) if t.dim() > 1)
        flops = passes * 2 * products * (x.numel() // max(1, x.shape[-1]))
    kind, dtype = WorkKind.OTHER, _dtype(tensors, results)
    return Work(operator, kind, dtype, flops=flops, read=read, written=written)


_COPIES: Final = frozenset(("copy_", "_to_copy", "clone", "cat"))
"""Pointwise operators that torch does not tag as such."""


def _is_scattered(name: str, given: _Arguments, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a pointwise kernel accesses single elements: torch's vectorised one needs tensors of
    one type in one order of memory (TensorIterator: no broadcast, stride or conversion;
    aten/src/ATen/native/cuda/CUDALoops.cuh); `cat` computes where each element goes, unless whole
    tensors follow one another.
    """
    # A mask is read as it is, whatever the type of the values.
    types = {t.dtype for t in tensors if t.dtype is not torch.bool}
    if name == "cat":
        in_order = given["dim"] == 0
    else:
        in_order = len({(t.shape, t.stride()) for t in tensors}) <= 1
    return len(types) > 1 or not in_order or not all(map(is_without_gaps, tensors))


def _row(given: _Arguments) -> int:
    """The length of the rows that a softmax normalises, or its backward pass."""
    tensor = given.get("self", given.get("grad_output"))
    dim = given.get("dim")
    return int(tensor.shape[dim]) if isinstance(dim, int) and tensor.dim() else 1


def _bound(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names in the schema, with its defaults."""
    given: dict[str, Any] = {}
    for at, argument in enumerate(op._schema.arguments):
        if at < len(args):
            given[argument.name] = args[at]
        elif argument.name in kwargs:
            given[argument.name] = kwargs[argument.name]
        else:
            given[argument.name] = argument.default_value
    return given


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, _Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _dtype(*groups: list[torch.Tensor]) -> str:
    """The type of the largest tensor."""
    tensors = [t for group in groups for t in group]
    largest = max(tensors, key=lambda t: t.numel() * t.element_size())
    return str(largest.dtype).removeprefix("torch.")


def _moved(
    op: OpOverload, name: str, given: _Arguments, results: list[torch.Tensor]
) -> tuple[int, int]:
    """Bytes of the GPU's memory that are read and written."""
    if name == "all_gather_copy_in":  # of FSDP: to this rank's part of a buffer for all ranks
        size = sum(size_of(t) for t in _tensors(given["all_gather_inputs"]) if t.is_cuda)
        return size, size
    read = written = 0
    changed = False
    first = True
    for argument in op._schema.arguments:
        value = given[argument.name]
        size = sum(size_of(t) for t in _tensors(value) if t.is_cuda)
        if not size:
            continue
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if first and (takes_shape(name) or name in _OVERWRITING):
            written += size if writes else 0
        elif first and name in _PICKING:
            read += min(size, sum(map(size_of, results)))
        elif first and name in _ADDING:
            values = [t for item in given.values() for t in _tensors(item)]
            part = min(size, size_of(values[-1]))
            read, written = read + part, written + part
        elif writes and argument.is_out:
            written += size
        else:
            read += size
            written += size if writes and argument.name != "grads" else 0
        changed = changed or writes
        first = False
    if not changed:
        written += sum(size_of(t) for t in results if t.is_cuda)
    return read, written


_OVERWRITING: Final = OVERWRITES | {"_foreach_copy_"}


def _product_dtype(tensor: torch.Tensor, *, convolution: bool = False) -> str:
    if tensor.dtype is torch.float32 and _tf32()[convolution]:
        return "tf32"
    return str(tensor.dtype).removeprefix("torch.")


def _layout(matrix: torch.Tensor) -> str:
    """N if the last dimension is contiguous, else T."""
    return "N" if matrix.shape[-1] == 1 or matrix.stride(-1) == 1 else "T"


def _matmul(
    operator: str,
    left: torch.Tensor,
    right: torch.Tensor,
    read: int,
    written: int,
) -> Work:
    batch = left.shape[0] if left.dim() == 3 else 1
    m, k = left.shape[-2:]
    n = right.shape[-1]
    return Work(
        operator,
        WorkKind.MATMUL,
        _product_dtype(left),
        (batch, m, n, k),
        _layout(left) + _layout(right),
        2 * batch * m * n * k,
        read,
        written,
    )


_Made = Callable[[str, _Arguments, list[torch.Tensor], int, int], Work]


def _product_of(left: str, right: str) -> _Made:
    def make(
        operator: str, given: _Arguments, results: list[torch.Tensor], read: int, written: int
    ) -> Work:
        a, b = given[left], given[right]
        if a.dim() == 1:
            a = a[None]
        if b.dim() == 1:
            b = b[:, None]
        return _matmul(operator, a, b, read, written)

    return make


def _convolution(
    operator: str, given: _Arguments, results: list[torch.Tensor], read: int, written: int
) -> Work:
    given = {"input": given.get("self"), **given}
    x, weight = given["input"], given["weight"]
    forward = "grad_output" not in given
    out = results[0] if forward else given["grad_output"]
    transposed = bool(given.get("transposed"))
    groups = int(given["groups"])
    moved = x if transposed else out
    outputs = math.prod(moved.shape[2:])
    kernel = math.prod(weight.shape[2:])
    flops = 2 * x.shape[0] * weight.shape[0] * weight.shape[1] * kernel * outputs
    times = 1
    if not forward:
        times = sum(map(bool, given["output_mask"][:2]))
    channels = (out.shape[1], x.shape[1]) if transposed else (x.shape[1], out.shape[1])
    return Work(
        operator,
        WorkKind.CONVOLUTION if forward else WorkKind.CONVOLUTION_BACKWARD,
        _product_dtype(x, convolution=True),
        (x.shape[0], *channels, outputs, kernel, groups),
        _convolution_variant(x, given, forward=forward),
        flops * times,
        read,
        written,
    )


def _convolution_variant(x: torch.Tensor, given: _Arguments, *, forward: bool) -> str:
    words = []
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is not None and x.is_contiguous(memory_format=last):
        words.append("channels last")
    if given.get("bias") is not None if forward else given["output_mask"][2]:
        words.append("bias")
    return ", ".join(words)


def _attention_of(implementation: str, *, backward: bool, heads_first: bool) -> _Made:
    def make(
        operator: str, given: _Arguments, results: list[torch.Tensor], read: int, written: int
    ) -> Work:
        query, key, value = given["query"], given["key"], given["value"]
        causal = bool(given.get("is_causal")) or bool(given.get("causal"))
        causal = causal or bool(given.get("custom_mask_type"))
        dims = (1, 2) if heads_first else (2, 1)
        sequences = given.get("cum_seq_q", given.get("cu_seqlens_q"))
        if query.dim() == 4:
            batch = query.shape[0]
            heads, queries = query.shape[dims[0]], query.shape[dims[1]]
            key_heads, keys = key.shape[dims[0]], key.shape[dims[1]]
        else:  # sequences one after the other: (total, heads, size)
            batch = max(1, sequences.numel() - 1) if isinstance(sequences, _Tensor) else 1
            heads, key_heads = query.shape[1], key.shape[1]
            queries, keys = query.shape[0] // batch, key.shape[0] // batch
        pairs = queries * keys
        if causal:
            # Of a square the lower half with the diagonal; of more keys, all of the earlier ones.
            pairs -= min(queries, keys) * (min(queries, keys) - 1) // 2
        window = given.get("window_size_left")
        if isinstance(window, int) and 0 <= window < keys:
            pairs = min(pairs, queries * (window + 1 + max(0, given.get("window_size_right") or 0)))
        size, value_size = query.shape[-1], value.shape[-1]
        flops = 2 * batch * heads * pairs * (size + value_size)
        if backward:
            # Scores again, and the gradients of values, probabilities, queries and keys.
            flops = 2 * batch * heads * pairs * (3 * size + 2 * value_size)
        return Work(
            operator,
            WorkKind.ATTENTION_BACKWARD if backward else WorkKind.ATTENTION,
            str(query.dtype).removeprefix("torch."),
            (batch, heads, key_heads, queries, keys, size, value_size),
            implementation + (" causal" if causal else ""),
            flops,
            read,
            written,
        )

    return make


_SPECIAL: Final[dict[str, _Made]] = {
    "mm": _product_of("self", "mat2"),
    "bmm": _product_of("self", "mat2"),
    "addmm": _product_of("mat1", "mat2"),
    "addmm_": _product_of("mat1", "mat2"),
    "_addmm_activation": _product_of("mat1", "mat2"),
    "baddbmm": _product_of("batch1", "batch2"),
    "baddbmm_": _product_of("batch1", "batch2"),
    "mv": _product_of("self", "vec"),
    "addmv": _product_of("mat", "vec"),
    "addmv_": _product_of("mat", "vec"),
    "_int_mm": _product_of("self", "mat2"),
    "_scaled_mm": _product_of("self", "mat2"),
    "convolution": _convolution,
    "_convolution": _convolution,
    "cudnn_convolution": _convolution,
    "convolution_backward": _convolution,
    "_scaled_dot_product_flash_attention": _attention_of("flash", backward=False, heads_first=True),
    "_scaled_dot_product_flash_attention_backward": _attention_of(
        "flash", backward=True, heads_first=True
    ),
    "_scaled_dot_product_efficient_attention": _attention_of(
        "efficient", backward=False, heads_first=True
    ),
    "_scaled_dot_product_efficient_attention_backward": _attention_of(
        "efficient", backward=True, heads_first=True
    ),
    "_scaled_dot_product_cudnn_attention": _attention_of("cudnn", backward=False, heads_first=True),
    "_scaled_dot_product_cudnn_attention_backward": _attention_of(
        "cudnn", backward=True, heads_first=True
    ),
    "_flash_attention_forward": _attention_of("flash", backward=False, heads_first=False),
    "_flash_attention_backward": _attention_of("flash", backward=True, heads_first=False),
    "_efficient_attention_forward": _attention_of("efficient", backward=False, heads_first=False),
    "_efficient_attention_backward": _attention_of("efficient", backward=True, heads_first=False),
}
_PRODUCTS: Final = frozenset(name for name in _SPECIAL if "_attention" not in name)
"""Those whose type depends on whether float32 is multiplied in TF32."""
