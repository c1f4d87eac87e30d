"""Each row of the lowering table: the allocations of one call, in their order.

Sizes are bytes as asked for; a negative one was given back. Where a size was recorded on a GPU,
the test says so; the others follow from the source that the row names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocation_events import events
from gpuprobe.virtual.lowering import table
from gpuprobe.virtual.lowering.reduce_config import Reduction, buffers, launches
from gpuprobe.virtual.lowering.sorting import radix_sort_bytes, segmented_sort_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")

A100 = (108, 2048)  # multiprocessors, threads that each holds
H100 = (132, 2048)
MIB = 1 << 20


@pytest.fixture(scope="module", params=["real", "shapes"])
def mode(request: pytest.FixtureRequest) -> Any:
    with gpuprobe.virtual_gpu("a100-80gb", request.param):
        yield request.param


def around(results: list[int], *scratch: int) -> list[int]:
    """Results, then scratch memory that goes in reverse order."""
    return [*results, *scratch, *(-size for size in reversed(scratch))]


ROWS = 4 * 256
REDUCTIONS: dict[str, tuple[Callable[[torch.Tensor], Any], list[int]]] = {
    # 1,024 sums of 1,024 numbers: 8 MiB and 32 bytes, as recorded 49 times on an A100.
    "sum": (lambda x: x.sum((0, 1)), around([4096], 8 * MIB, 32)),
    "nansum": (lambda x: x.nansum((0, 1)), around([4096], 8 * MIB, 32)),
    "mean": (lambda x: x.mean((0, 1)), around([4096], 8 * MIB, 32)),
    "prod": (lambda x: x.flatten(0, 1).prod(0), around([4096], 8 * MIB, 32)),
    "linalg_vector_norm": (
        lambda x: torch.linalg.vector_norm(x, dim=(0, 1)),
        around([4096], 8 * MIB, 32),
    ),
    "amax": (lambda x: x.amax((0, 1)), around([4096], 8 * MIB, 32)),
    "amin": (lambda x: x.amin((0, 1)), around([4096], 8 * MIB, 32)),
    "aminmax": (lambda x: torch.aminmax(x), around([4, 4], 8 * 128, 4)),
    "any": (lambda x: x.any(), around([1], 4 * 128, 4)),
    "all": (lambda x: x.all(), around([1], 4 * 128, 4)),
    "max.default": (lambda x: x.max(), around([4], 4 * 128, 4)),
    "min.default": (lambda x: x.min(), around([4], 4 * 128, 4)),
    "argmax": (lambda x: x.flatten(0, 1).argmax(0), around([8192], 32 * MIB, 32)),
    "argmin": (lambda x: x.flatten(0, 1).argmin(0), around([8192], 32 * MIB, 32)),
    "max.dim": (lambda x: x.flatten(0, 1).max(0), around([4096, 8192], 32 * MIB, 32)),
    "min.dim": (lambda x: x.flatten(0, 1).min(0), around([4096, 8192], 32 * MIB, 32)),
    "var.correction": (lambda x: x.var((0, 1)), around([4096], 32 * MIB, 32)),
    "std.correction": (lambda x: x.std((0, 1)), around([4096], 32 * MIB, 32)),
    "var_mean.correction": (
        lambda x: torch.var_mean(x, (0, 1)),
        around([4096, 4096], 32 * MIB, 32),
    ),
    "std_mean.correction": (
        lambda x: torch.std_mean(x, (0, 1)),
        around([4096, 4096], 32 * MIB, 32),
    ),
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(mode: str, op: str) -> None:
    x = torch.empty(4, 256, 1024, device="cuda")
    call, expected = REDUCTIONS[op]
    assert events(lambda: call(x)) == expected


def test_what_is_summed_in_another_type_is_copied_first(mode: str) -> None:
    flags = torch.ones(MIB, dtype=torch.bool, device="cuda")
    copy = 8 * MIB
    assert events(lambda: flags.sum()) == around([8], copy, 8 * 128, 4)
    low = torch.ones(MIB, dtype=torch.bfloat16, device="cuda")
    assert events(lambda: low.sum(dtype=torch.float32)) == around([4], 4 * 128, 4)


def test_small_reductions_take_nothing(mode: str) -> None:
    x = torch.empty(64, 64, device="cuda")
    assert events(lambda: x.sum(0)) == [256]
    assert events(lambda: x.sum()) == [4]


@pytest.mark.parametrize(
    ("shape", "strides", "dims", "accumulator", "gpu", "expected"),
    [
        # As recorded: an A100 (a gradient of 1,024 gains), and an H100: sums over rows of 2,560
        # that lie 512 numbers apart, and the largest of 10,000 with its index.
        ((4, 256, 1024), (262144, 1024, 1), (0, 1), 4, A100, (8_388_608, 32)),
        ((4, 128, 2560), (128, 1, 512), (2,), 4, H100, (10_485_760, 16)),
        ((4, 128, 10000), (128, 1, 512), (2,), 16, H100, (164_626_432, 16)),
        # Sums along rows: one block does each.
        ((4, 128, 2560), (327680, 2560, 1), (2,), 4, H100, (0, 0)),
        ((), (), (), 4, A100, (0, 0)),
        ((0, 4), (4, 1), (0,), 4, A100, (0, 0)),
    ],
)
def test_buffers_of_reductions(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dims: tuple[int, ...],
    accumulator: int,
    gpu: tuple[int, int],
    expected: tuple[int, int],
) -> None:
    assert buffers(Reduction(shape, strides, dims, 4, accumulator), *gpu) == expected


def test_a_reduction_of_more_than_2_gib_is_done_in_parts() -> None:
    """Published peaks of a sum of 4 GiB on an H100 have room for the buffer of half of it."""
    rows = (8192, 131072)
    whole = Reduction(rows, (131072, 1), (0, 1), 4, 4)
    assert buffers(whole, *H100) == (32768, 4)
    assert launches(whole, *H100) == [(16384, 4)] * 2
    assert launches(whole._replace(shape=(2048, 131072)), *H100) == [(8192, 4)]
    uneven = Reduction((3, 2**29), (2**29, 1), (0,), 4, 4)
    assert len(launches(uneven, *H100)) == 3  # a row of 2 GiB can be indexed, two cannot
    assert launches(uneven._replace(shape=(0, 5)), *H100) == [(0, 0)]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_buffers_do_not_depend_on_how_dimensions_are_written(data: st.DataObject) -> None:
    """Splitting a dimension, or one of size 1 more, is the same reduction."""
    rows = data.draw(st.sampled_from([1, 3, 64, 1000, 4096, 100_000]))
    columns = data.draw(st.sampled_from([1, 2, 7, 64, 768, 4096]))
    dim = data.draw(st.sampled_from([0, 1]))
    plain = Reduction((rows, columns), (columns, 1), (dim,), 4, 4)
    expected = buffers(plain, *A100)
    padded = Reduction((rows, 1, columns), (columns, columns, 1), (2 * dim,), 4, 4)
    assert buffers(padded, *A100) == expected
    for part in (2, 4, 8):
        if rows % part == 0:
            split = Reduction(
                (part, rows // part, columns),
                (rows // part * columns, columns, 1),
                (0, 1) if dim == 0 else (2,),
                4,
                4,
            )
            assert buffers(split, *A100) == expected
    assert all(size >= 0 for size in expected)
    assert (expected[0] == 0) == (expected[1] == 0)


def test_norms_of_many_tensors(mode: str) -> None:
    tensors = [torch.empty(65536 * 4 + 1, device="cuda"), torch.empty(5, device="cuda")]
    assert events(lambda: torch._foreach_norm(tensors)) == [2 * 5 * 4, 4, 4, -2 * 5 * 4]


# -- indexing


def test_an_index_on_the_host_is_copied(mode: str) -> None:
    x = torch.empty(8, 1024, device="cuda")
    index = torch.arange(2)
    assert events(lambda: x[index]) == [16, 8192, -16]
    index = index.cuda()
    assert events(lambda: x[index]) == [8192]


def test_masks_become_positions(mode: str) -> None:
    x = torch.arange(10.0, device="cuda").reshape(2, 5)
    mask = x > 5
    assert events(lambda: x[mask]) == around([16], 4 * 2 * 8)
    assert events(lambda: torch.masked_select(x, mask)) == around([16], 4 * 2 * 8)


def accumulated(count: int) -> list[int]:
    size = count * 8
    head = [size, size, -size, size, size, size]
    return [*head, 1, -1, -size, -size, -size, -size]


@pytest.mark.parametrize("op", ["index_put_", "_index_put_impl_"])
def test_accumulating_into_places_sorts_them(mode: str, op: str) -> None:
    """The sequence that an A100's trace shows for the gradient of an embedding."""
    target = torch.zeros(4000, 16, device="cuda")
    index = torch.zeros(1024, dtype=torch.long, device="cuda")
    values = torch.ones(1024, 16, device="cuda")
    call = getattr(torch.ops.aten, op)
    assert events(lambda: call(target, [index], values, True)) == accumulated(1024)
    assert events(lambda: call(target, [index], values, False)) == []


@pytest.mark.parametrize("op", ["index_put", "_unsafe_index_put"])
def test_outside_the_backward_pass_it_is_a_new_tensor(mode: str, op: str) -> None:
    target = torch.zeros(4000, 16, device="cuda")
    index = torch.zeros(1024, dtype=torch.long, device="cuda")
    values = torch.ones(1024, 16, device="cuda")
    call = getattr(torch.ops.aten, op)
    seen = events(lambda: call(target, [index], values, True))
    assert sum(seen) == 4000 * 16 * 4
    assert [size for size in seen if abs(size) != 4000 * 16 * 4] == accumulated(1024)


def test_the_gradient_of_an_index_is_written_into_its_zeros(mode: str) -> None:
    """Also with an index on the host, which is computed there and copied (recorded on an H100)."""
    weight = torch.zeros(4000, 16, device="cuda", requires_grad=True)
    rows = torch.arange(512)
    columns = torch.zeros(512, dtype=torch.long, device="cuda")
    gradient = torch.ones(512, device="cuda")
    picked = weight[rows, columns]
    seen = events(lambda: picked.backward(gradient))
    assert seen.count(4000 * 16 * 4) == 1  # the zeros, which become the gradient
    start = seen.index(4000 * 16 * 4) + 1
    size = 512 * 8
    assert seen[start : start + 14] == [
        *(size, size, size, -size, -size),
        *(size, size, size),
        *(1, -1, -size, -size, -size, -size),
    ]


def test_values_that_are_not_contiguous_are_copied(mode: str) -> None:
    target = torch.zeros(4000, 16, device="cuda")
    index = torch.zeros(1024, dtype=torch.long, device="cuda")
    values = torch.ones(16, 1024, device="cuda").t()
    seen = events(lambda: target.index_put_((index,), values, accumulate=True))
    assert seen[:4] == [8192, 8192, -8192, 1024 * 16 * 4]
    assert sum(seen) == 0


def test_gradients_of_embeddings(mode: str) -> None:
    weight = torch.zeros(5000, 64, device="cuda", requires_grad=True)
    few = torch.zeros(3072, dtype=torch.long, device="cuda")
    made = torch.nn.functional.embedding(few, weight)
    gradient = torch.ones_like(made)
    assert events(lambda: made.backward(gradient)) == [5000 * 64 * 4]
    weight.grad = None
    count = 4000
    many = torch.zeros(count, dtype=torch.long, device="cuda")
    made = torch.nn.functional.embedding(many, weight)
    gradient = torch.ones_like(made)
    size = count * 8
    sort = radix_sort_bytes(count, (5000).bit_length(), 8, 8)
    partial = count // 10 + count
    after = [size, 8, size, size, 8, partial * 8, partial * 64 * 4]
    assert events(lambda: made.backward(gradient)) == [
        *(size, size, size, sort, -sort, -size),
        5000 * 64 * 4,
        *after,
        *(-part for part in reversed(after)),
        *(-size, -size),
    ]


@given(st.integers(1, 1 << 22), st.integers(1, 64), st.sampled_from([4, 8]))
def test_sorts_take_copies_of_keys_and_values(count: int, bits: int, size: int) -> None:
    taken = radix_sort_bytes(count, bits, size, size)
    if count <= 256 * 19 * 4 // size:
        assert taken == 1
    elif bits > 8:
        assert count * 2 * size <= taken <= count * 2 * size * 1.4 + 64 * 1024
    else:
        assert taken < count * size


def test_sorts(mode: str) -> None:
    short = torch.empty(64, 4096, device="cuda")
    assert events(lambda: short.sort()) == [4096 * 64 * 4, 4096 * 64 * 8]
    row = torch.empty(5000, device="cuda")
    taken = radix_sort_bytes(5000, 32, 4, 8)
    assert events(lambda: row.sort()) == [20_000, 40_000, 40_000, taken, -taken, -40_000]
    few = torch.empty(4, 5000, device="cuda")
    pairs, keys = radix_sort_bytes(20_000, 32, 4, 8), radix_sort_bytes(20_000, 2, 8, 0)
    assert events(lambda: few.sort()) == [
        *(80_000, 160_000, 160_000, 160_000, 80_000, pairs, -pairs, -80_000),
        *(keys, -keys, -160_000, -160_000),
    ]
    many = torch.empty(200, 5000, device="cuda")
    seen = events(lambda: many.sort(stable=True))
    copies = segmented_sort_bytes(1_000_000, 4, 8)
    assert copies == 4_000_000 + 8_000_000 + 255  # AliasTemporaries: a copy of each, aligned
    assert seen == [4_000_000, 8_000_000, 8_000_000, copies, -copies, -8_000_000]
    # Not along the last dimension: sorted in copies that have it there.
    tall = torch.empty(5000, 200, device="cuda")
    assert events(lambda: tall.sort(0))[:5] == [
        *(4_000_000, 8_000_000, 4_000_000, 4_000_000, 8_000_000)
    ]


def test_draws(mode: str) -> None:
    weights = torch.ones(8, 1000, device="cuda")
    assert events(lambda: weights.multinomial(1)) == [32_000, 64, -32_000]
    with_replacement = events(lambda: weights.multinomial(5, replacement=True))
    assert with_replacement == [32_000, 32_000, 32_000, 320, -32_000, -32_000, -32_000]


def test_a_number_to_choose_from_is_moved(mode: str) -> None:
    """As recorded on an A100: four bytes for the minus infinity of masked scores."""
    scores = torch.zeros(16, 16, device="cuda")
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda")
    assert events(lambda: torch.where(mask, scores, -math.inf)) == [4, 1024, -4]
    assert events(lambda: torch.where(mask, scores, scores)) == [1024]


def test_the_gradient_of_a_softmax_needs_a_product(mode: str) -> None:
    """As an RTX 3090 needs it: six blocks, of which five are seen from outside."""
    scores = torch.zeros(16, 16, device="cuda").softmax(-1)
    grad = torch.ones_like(scores)
    half = scores.bfloat16()
    backward = torch.ops.aten._softmax_backward_data.default
    assert events(lambda: backward(grad, scores, -1, torch.float32)) == [1024, 1024, -1024]
    grad = grad.bfloat16()
    assert events(lambda: backward(grad, half, -1, torch.bfloat16)) == [512, 512, -512]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norms(mode: str, dtype: torch.dtype) -> None:
    """As a B200 needs it, in 32 bits: ``N * C`` twice, then ``N * G`` twice and ``N * C``."""
    item = dtype.itemsize
    x, dy = torch.ones(2, 3, 64, 16, dtype=dtype, device="cuda")
    weight = torch.ones(64, dtype=dtype, device="cuda")
    forward = torch.ops.aten.native_group_norm.default
    results = [3 * 64 * 16 * item, 3 * 8 * item, 3 * 8 * item]
    channels, groups = 3 * 64 * 4, 3 * 8 * 4
    sizes = (3, 64, 16, 8)
    assert events(lambda: forward(x, weight, weight, *sizes, 1e-5)) == [
        *results, channels, channels, -channels, -channels,
    ]  # fmt: skip
    assert events(lambda: forward(x, None, None, *sizes, 1e-5)) == results
    _, mean, rstd = forward(x, weight, weight, *sizes, 1e-5)
    backward = torch.ops.aten.native_group_norm_backward.default
    found = events(lambda: backward(dy, x, mean, rstd, weight, *sizes, [True] * 3))
    assert [size for size in found if size > 0][3:] == [
        channels, channels, groups, groups, channels,
    ]  # fmt: skip
    found = events(lambda: backward(dy, x, mean, rstd, None, *sizes, [True, False, False]))
    assert [size for size in found if size > 0][1:] == [channels, channels, groups, groups]


LOSSES: dict[str, tuple[Any, int]] = {  # and what is needed beside each loss
    "mse_loss": (torch.nn.functional.mse_loss, 4),
    "smooth_l1_loss": (torch.nn.functional.smooth_l1_loss, 4),
    "binary_cross_entropy": (torch.nn.functional.binary_cross_entropy, 0),
}


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_keep_the_memory_of_all_of_them(op: str, reduction: str, mode: str) -> None:
    run, beside = LOSSES[op]
    for count in (1024, 1 << 20):  # of the latter, the sum is split over blocks
        x, y = (torch.rand(count, device="cuda") for _ in range(2))
        assert run(x, y, reduction=reduction).shape == ()
        summing = events(lambda x=x: x.sum())[1:]  # type: ignore[misc]
        buffers_ = summing[: len(summing) // 2]
        found = events(lambda x=x, y=y: run(x, y, reduction=reduction))  # type: ignore[misc]
        assert found == around([4 * count], beside * count or 4, *buffers_)
        assert events(lambda x=x, y=y: run(x, y, reduction="none")) == [4 * count]  # type: ignore[misc]


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scatter_add": lambda x, index: x.gather(0, index[:, None].expand(4, 1000)),
    "index_add": lambda x, index: x.index_select(0, index),
    "scatter.src": lambda x, index: x.sort(0)[0],
    "put": lambda x, index: x.take(index),
    "masked_scatter": lambda x, index: x.masked_select(torch.ones_like(x, dtype=torch.bool)),
    "index_put": lambda x, index: x[index],
}


class _Names(TorchDispatchMode):
    """The operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update((func._schema.name.removeprefix("aten::"), str(func)[5:]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("op", IN_PLACE)
def test_gradients_are_written_into_the_zeros_made_for_them(mode: str, op: str) -> None:
    x = torch.zeros(4, 1000, device="cuda", requires_grad=True)

    def made() -> torch.Tensor:
        return IN_PLACE[op](x, torch.arange(4, device="cuda"))

    names = _Names()
    with names:
        made().sum().backward()
    assert op in names.seen
    x.grad = None
    out = made()
    gradient = torch.ones_like(out)
    seen = events(lambda: out.backward(gradient))
    assert seen.count(x.numel() * 4) == 1  # the gradient, and nothing else of its size


@pytest.mark.parametrize("op", ["scatter", "select_scatter", "slice_scatter", "index_put"])
def test_gradients_that_are_changed_are_copied(mode: str, op: str) -> None:
    """Formulas that change the gradient they were given do so in a new tensor."""
    x = torch.zeros(4, 1000, device="cuda", requires_grad=True)
    index = torch.arange(2, device="cuda")
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "scatter": lambda x: x.scatter(0, index[:, None].expand(2, 1000), 0.0),
        "select_scatter": lambda x: x.select_scatter(torch.ones(1000, device="cuda"), 0, 1),
        "slice_scatter": lambda x: x.slice_scatter(torch.ones(2, 1000, device="cuda"), 0, 1, 3),
        "index_put": lambda x: x.index_put((index,), torch.ones(1000, device="cuda")),
    }
    # The gradient of a product is a new tensor, held by the engine alone.
    out = calls[op](x) * 2.0
    gradient = torch.ones_like(out)
    seen = events(lambda: out.backward(gradient))
    assert seen.count(x.numel() * 4) == 2


ELSEWHERE = {
    *("convolution", "convolution_backward"),  # test_convolution_workspaces.py
    # test_norms_and_layouts.py
    *("native_layer_norm", "native_layer_norm_backward", "_softmax", "_log_softmax"),
    *("_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax_backward_data"),
    # test_autocast_and_lowering.py, and the programs of test_virtual_programs.py
    *("mm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "addr", "_scaled_mm"),
    *("_int_mm", "addmm", "_addmm_activation", "add.Tensor"),
    # test_attention_memory.py
    *(
        f"_scaled_dot_product_{kernel}_attention{direction}"
        for kernel in ("flash", "efficient", "cudnn")
        for direction in ("", "_backward")
    ),
    *("_efficient_attention_forward", "_efficient_attention_backward"),
}
HERE = {
    *REDUCTIONS,
    *IN_PLACE,
    *LOSSES,
    *("_foreach_norm", "index.Tensor", "masked_select", "where.self"),
    *("masked_scatter_", "masked_scatter", "huber_loss", "roll"),  # test_hidden_parts.py
    *("index_put_", "_index_put_impl_", "index_put", "_unsafe_index_put"),
    "embedding_dense_backward",
    *("_embedding_bag_backward", "_embedding_bag_dense_backward"),  # test_hidden_parts.py
    *("sort", "sort.stable", "multinomial"),
    *("_softmax_backward_data", "native_group_norm", "native_group_norm_backward"),
    *("zeros", "new_zeros", "zeros_like"),  # test_gradients_…
}


def test_every_row_has_a_test() -> None:
    assert {row.op for row in table()} == HERE | ELSEWHERE
