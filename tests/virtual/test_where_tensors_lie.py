"""Where the results of everyday code lie: on the device that CUDA would have them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: betas, what it will drop


@pytest.fixture(params=["real", "shapes"])
def compute(request: pytest.FixtureRequest) -> Iterator[str]:
    with gpuprobe.virtual_gpu("a100-80gb", request.param):
        yield request.param


@pytest.fixture
def values() -> Iterator[None]:
    with gpuprobe.virtual_gpu("a100-80gb"):
        yield


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_to_another_tensor_goes_where_that_is(compute: str, mode: Callable[[], Any]) -> None:
    with mode():
        single, half = torch.zeros(2).cuda(), torch.zeros(2, dtype=torch.half).cuda()
        assert half.to(single).is_cuda
        assert half.to(single).dtype is torch.float32
        assert half.to(tensor=single).is_cuda
        assert single.clone().to(single).is_cuda
        assert torch.zeros(2).to(single).is_cuda
        assert not single.to(torch.arange(2)).is_cuda
        assert single.to(single) is single


def test_the_old_constructor_makes_tensors_of_the_same_kind(compute: str) -> None:
    tensor = torch.zeros(3, dtype=torch.half).cuda()
    for made, shape in (
        (tensor.new(2, 3), (2, 3)),
        (tensor.new(torch.Size([2])), (2,)),
        (tensor.new([1.0, 2.0]), (2,)),
        (tensor.new(tensor), (3,)),
        (tensor.new(), (0,)),
    ):
        assert made.is_cuda
        assert made.dtype is torch.half
        assert tuple(made.shape) == shape
    assert not torch.zeros(3).new(2).is_cuda


COMPOSITES: dict[str, Callable[[Any], Any]] = {
    "pad_sequence": lambda x: pad_sequence([x[0], x[1, :2]], batch_first=True),
    "pad_packed": lambda x: pad_packed_sequence(
        pack_padded_sequence(x, torch.tensor([4, 5, 3]), batch_first=True, enforce_sorted=False),
        batch_first=True,
    )[0],
    "block_diag": lambda x: torch.block_diag(x[0], x[1]),
    "vander": lambda x: torch.vander(x[0, 0]),
    "one_hot": lambda x: F.one_hot(torch.tensor([1]).cuda(), 3),
    "bicubic": lambda x: F.interpolate(x[None], scale_factor=2, mode="bicubic"),
    "repeat_interleave": lambda x: x.to(x.clone())[:, :3].repeat_interleave(2, 1),
    "quantile": lambda x: torch.quantile(x[0], 0.5, dim=0),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x[0]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COMPOSITES)
def test_what_torch_makes_like_a_tensor_lies_with_it(
    compute: str, name: str, mode: Callable[[], Any]
) -> None:
    with mode():
        assert COMPOSITES[name](torch.randn(3, 5, 4).cuda()).is_cuda


def test_within_a_transform_tensors_lie_where_they_did(values: None) -> None:
    seen = []

    def loss(x: Any) -> Any:
        made = torch.zeros(4, device=x.device)
        there = [x, made, (x > 0).sum().to(x), x.cuda(), x.to("cuda"), x.new_ones(2)]
        seen.append([item.is_cuda for item in there])
        assert x.get_device() == 0
        assert not x.cpu().is_cuda
        return (x + made).sum()

    batch = torch.randn(3, 4).cuda()
    vmap(loss)(batch)
    grad(loss)(batch[0])
    assert vmap(grad(loss))(batch).is_cuda
    assert seen == [[True] * 6] * 3


def test_derivatives_go_through_copies_within_a_transform(values: None) -> None:
    point = torch.tensor([1.0, 2.0, 3.0])

    def cubes(x: Any) -> Any:
        return (x.cuda() ** 3).cpu().sum()

    slope = grad(cubes)(point)
    assert not slope.is_cuda
    torch.testing.assert_close(slope, 3 * point**2)
    torch.testing.assert_close(jvp(cubes, (point,), (torch.ones(3),))[1], (3 * point**2).sum())
    torch.testing.assert_close(hessian(cubes)(point).cpu(), torch.diag(6 * point))


def test_gradients_per_sample(values: None) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    batch, target = torch.randn(3, 4, 8), torch.tensor([1, 2, 3])

    def gradients(place: str) -> Any:
        layer.to(place)
        weights = {name: value.detach() for name, value in layer.named_parameters()}

        def loss(weights: Any, x: Any, y: Any) -> Any:
            result = functional_call(layer, weights, (x[None],))[:, 0]
            return F.nll_loss(F.log_softmax(result, 1), y[None])

        return vmap(grad(loss), (None, 0, 0))(weights, batch.to(place), target.to(place))

    host = gradients("cpu")
    for name, found in gradients("cuda").items():
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), host[name])


def test_sparse_tensors_lie_where_their_values_lie(values: None) -> None:
    allocated = torch.cuda.memory_allocated()
    tensor = torch.eye(3).to_sparse().cuda()
    assert torch.cuda.memory_allocated() == allocated + 2 * 512  # values, indices
    assert tensor.is_cuda
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.get_device() == 0
    assert not tensor.cpu().is_cuda
    for made in (tensor.coalesce(), tensor.to_sparse_csr(), tensor + tensor, tensor.to_dense()):
        assert made.is_cuda
    assert torch.sparse.mm(tensor, torch.ones(3, 2).cuda()).is_cuda
    embedding = torch.nn.Embedding(10, 4, sparse=True).cuda()
    embedding(torch.tensor([1, 2]).cuda()).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_cuda


def test_torchscript_knows_the_functions_that_are_replaced(compute: str) -> None:
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor(2.0) + torch.zeros(1)

    torch.jit.script(shift)
    jvp(lambda x: x**2, (torch.ones(2),), (torch.ones(2),))  # torch scripts its formulas


def test_torchscript_forgets_them_again() -> None:
    from torch.jit._builtins import _find_builtin

    with gpuprobe.virtual_gpu("a100-80gb"):
        assert _find_builtin(torch.tensor) == "aten::tensor"
        replaced = torch.tensor
    assert _find_builtin(torch.tensor) == "aten::tensor"
    assert _find_builtin(replaced) is None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_causal_attention_without_a_fused_kernel(compute: str, mode: Callable[[], Any]) -> None:
    """In double precision, or with fewer heads of keys than of queries."""
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with mode():
        for q, k, options in (
            (query.double(), query.double(), {}),
            (query, key, {"enable_gqa": True}),
        ):
            on_host = F.scaled_dot_product_attention(q, k, k, is_causal=True, **options)
            q, k = q.cuda(), k.cuda()
            found = F.scaled_dot_product_attention(q, k, k, is_causal=True, **options)
            assert found.is_cuda
            if compute == "real":
                torch.testing.assert_close(found.cpu(), on_host)


def test_a_number_names_a_cuda_device(compute: str) -> None:
    host = torch.zeros(3)
    linear = torch.nn.Linear
    for made in (
        host.cuda(0),
        host.cuda(device=0, non_blocking=True),
        host.to(0),
        host.to(0, torch.half),
        host.to(device=0),
        host.new_zeros(2, device=0),
        linear(2, 2).to(0).weight,
        linear(2, 2).to(device=0).weight,
        linear(2, 2).cuda(0).weight,
        linear(2, 2, device=0).weight,
        torch.zeros(2, device=0),
        torch.tensor(2, device=0),
        torch.arange(3, device=0),
        torch.randn_like(host, device=0),
        host.to(torch.device(0)),
    ):
        assert made.device == torch.device("cuda", 0)
    with torch.device(0):
        assert torch.zeros(1).is_cuda
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        host.cuda(1)
    with pytest.raises(ValueError, match="must be cuda device"):
        host.cuda("cpu")


def test_a_device_stays_a_device(compute: str) -> None:
    import copy
    import io
    import pickle

    device = torch.device(0)
    assert isinstance(device, torch.device)
    assert type(device) == torch.device  # noqa: E721 - what programs do
    assert {torch.device: 1}[type(device)] == 1
    assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
    kept = io.BytesIO()
    torch.save(device, kept)
    kept.seek(0)
    assert torch.load(kept, weights_only=True) == device

    def place(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        return x.to(device)

    torch.jit.script(place)
    torch.jit.script(torch.nn.Transformer.generate_square_subsequent_mask)


def test_a_module_goes_where_a_tensor_is(compute: str) -> None:
    like = torch.zeros(1, dtype=torch.half).cuda()
    for model in (torch.nn.Linear(2, 2).to(like), torch.nn.Linear(2, 2).to(tensor=like)):
        assert model.weight.is_cuda
        assert model.weight.dtype is torch.half
    assert not torch.nn.Linear(2, 2).cuda().to(torch.zeros(1)).weight.is_cuda


class _Two(torch.autograd.Function):
    """Two results: the gradient of one that is not used is made of nothing."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first * 2 + second * 3


FROM_NOTHING: dict[str, Callable[[Any], Any]] = {
    "sgn": lambda x: x.sgn(),
    "sign": lambda x: x.sign(),
    "floor": lambda x: x.floor(),
    "repeat": lambda x: x.repeat(0, 2),
    "two results": lambda x: _Two.apply(x)[0],
    "of a copy": lambda x: x.cpu().cuda().sgn(),
    "deep": lambda x: ((x * 2).exp() + 1).repeat(0, 1),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x[:, :3] + x[:, :3].mT),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "cummax": lambda x: x.cummax(0).values,
    "pad": lambda x: F.pad(x, (1, -1)),
}


@pytest.mark.parametrize("run", FROM_NOTHING.values(), ids=list(FROM_NOTHING))
def test_gradients_lie_where_their_tensors_do(compute: str, run: Callable[[Any], Any]) -> None:
    x = torch.full((3, 4), 0.5, device="cuda", requires_grad=True)
    run(x).sum().backward()
    assert x.grad.is_cuda
    host = torch.ones(3, 4, requires_grad=True)
    copy = host.cuda()
    copy.retain_grad()
    copy.repeat(0, 1).sum().backward()
    assert copy.grad.is_cuda
    assert not host.grad.is_cuda


def test_a_gradient_of_known_zeros_takes_no_memory(values: None) -> None:
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    x.sgn().sum().backward()
    assert x.grad.is_cuda
    assert torch.cuda.memory_allocated() == x.nbytes


def test_jagged_tensors_move_with_their_offsets(compute: str) -> None:
    offsets, lengths = torch.tensor([0, 2, 6]), torch.tensor([1, 3])
    values = torch.arange(18.0).view(6, 3)
    make = torch.nested.nested_tensor_from_jagged
    for tensor in (make(values, offsets), make(values, offsets, lengths)):
        moved = tensor.cuda()
        back = moved.cpu()
        for part in ("_values", "_offsets", "_lengths"):
            if getattr(tensor, part) is not None:
                assert getattr(moved, part).is_cuda
                assert not getattr(back, part).is_cuda
        assert (moved.is_cuda, back.is_cuda) == (True, False)
        assert tensor.shape == moved.shape == back.shape  # one symbol for what is ragged
        assert [row.tolist() for row in back.unbind()] == [row.tolist() for row in tensor.unbind()]
    leaf = make(values, offsets).cuda().requires_grad_()
    leaf.cpu().values().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad._values.is_cuda


def test_no_matrices_have_their_ranks_on_the_device(compute: str) -> None:
    rank = torch.linalg.matrix_rank
    none = torch.ones(0, 3, 3, device="cuda")
    for made in (rank(none), rank(none, hermitian=True), rank(none, atol=0.1, rtol=0.1)):
        assert (made.is_cuda, made.shape, made.dtype) == (True, (0,), torch.long)
    assert rank(torch.eye(3, device="cuda")).item() == 3


def test_where_to_split_is_read_from_the_host(compute: str) -> None:
    tensor = torch.arange(6, device="cuda")
    where = torch.tensor([1, 2])
    assert [len(part) for part in tensor.tensor_split(where)] == [1, 1, 4]
    with pytest.raises(RuntimeError, match="to be on cpu, but it's on cuda:0"):
        tensor.tensor_split(where.cuda())
