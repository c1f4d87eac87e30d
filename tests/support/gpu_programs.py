"""Small training programs, written as users write them; each takes what it needs from torch.

``values``: whether a program needs the values that it computes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

PROGRAMS: dict[str, Callable[[], Any]] = {}
NEED_VALUES: set[str] = set()


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def needs_values(function: Callable[[], Any]) -> Callable[[], Any]:
    NEED_VALUES.add(function.__name__)
    return program(function)


def _train(
    model: nn.Module, make: Callable[[], Any], optimizer: Any = None, steps: int = 2
) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(make()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def mlp_adamw() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
    _train(model, lambda: torch.randn(16, 8, device="cuda"))
    assert all(parameter.is_cuda for parameter in model.parameters())


@program
def transformer() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to("cuda")
    _train(model, lambda: torch.randn(2, 8, 16, device="cuda"))


@program
def convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    ).cuda()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    _train(model, lambda: torch.randn(4, 3, 8, 8, device="cuda"), sgd)


@program
def lstm() -> None:
    model = nn.LSTM(8, 16, 2, dropout=0.1, batch_first=True).cuda()
    output, (hidden, _) = model(torch.randn(4, 5, 8, device="cuda"))
    (output.sum() + hidden.sum()).backward()
    assert model.weight_ih_l0.grad.is_cuda


@program
def packed_gru() -> None:
    model = nn.GRU(8, 16, batch_first=True).cuda()
    batch = torch.randn(4, 5, 8, device="cuda")
    lengths = torch.tensor([5, 4, 3, 2])
    packed = nn.utils.rnn.pack_padded_sequence(batch, lengths, batch_first=True)
    output, _ = model(packed)
    padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
    assert tuple(padded.shape) == (4, 5, 16)
    padded.sum().backward()


@program
def attention() -> None:
    query = torch.randn(2, 4, 16, 8, device="cuda", requires_grad=True)
    F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    half = query.detach().half().requires_grad_()
    F.scaled_dot_product_attention(half, half, half, dropout_p=0.1).sum().backward()
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda").tril()
    F.scaled_dot_product_attention(query, query, query, attn_mask=mask).sum().backward()
    assert half.grad.dtype is torch.float16


@program
def checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()).cuda()
    batch = torch.randn(4, 8, device="cuda", requires_grad=True)
    checkpoint(model, batch, use_reentrant=False).sum().backward()
    checkpoint(model, batch, use_reentrant=True).sum().backward()


@program
def mixed_precision() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(torch.randn(4, 8, device="cuda"))
            assert output.dtype is torch.float16
            loss = F.mse_loss(output, torch.zeros(4, 8, device="cuda"))
            assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@program
def loader_with_pinned_memory() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(128.0).view(16, 8), torch.arange(16))
    model = nn.Linear(8, 2).cuda()
    for batch, _ in DataLoader(data, batch_size=4, pin_memory=True):
        assert batch.is_pinned()
        model(batch.cuda(non_blocking=True)).sum().backward()


@program
def side_stream() -> None:
    side = torch.cuda.Stream()
    model = nn.Linear(8, 8).cuda()
    batch = torch.randn(4, 8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        output = model(batch)
    torch.cuda.current_stream().wait_stream(side)
    output.record_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        output.sum().backward()
    torch.cuda.synchronize()


@program
def saved_tensors_on_the_host() -> None:
    model = nn.Linear(8, 8).cuda()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        output = model(torch.randn(4, 8, device="cuda")).relu()
    output.sum().backward()
    assert model.weight.grad.is_cuda


@program
def generators() -> None:
    generator = torch.Generator("cuda")
    generator.manual_seed(5)
    assert generator.device.type == "cuda"
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.randn(3, device="cuda", generator=generator).is_cuda
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    torch.cuda.manual_seed_all(3)
    assert torch.cuda.initial_seed() == 3


@program
def graphs() -> None:
    model = nn.Linear(4, 4).cuda()
    sample = torch.randn(2, 4, device="cuda")
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    graphed(torch.randn(2, 4, device="cuda")).sum().backward()
    assert model.weight.grad.is_cuda


@program
def two_devices() -> None:
    first, second = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 4).to("cuda:1")
    second(first(torch.randn(2, 4, device="cuda:0")).to("cuda:1")).sum().backward()
    assert first.weight.grad.get_device() == 0
    assert second.weight.grad.get_device() == 1


@program
def data_parallel() -> None:
    model = nn.DataParallel(nn.Linear(4, 4).cuda())
    output = model(torch.randn(6, 4, device="cuda"))
    output.sum().backward()
    assert output.get_device() == 0
    assert model.module.weight.grad.is_cuda


@program
def distributed() -> None:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{Path(folder, 'store')}"
        dist.init_process_group("nccl", init_method=where, rank=0, world_size=1)
        try:
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda(), device_ids=[0])
            model(torch.randn(2, 4, device="cuda")).sum().backward()
            assert model.module.weight.grad.is_cuda
        finally:
            dist.destroy_process_group()


@program
def custom_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (value,) = ctx.saved_tensors
            assert grad.is_cuda
            assert value.is_cuda
            return grad * torch.full(value.shape, 2.0, device=value.device)

    Twice.apply(torch.randn(3, device="cuda", requires_grad=True)).sum().backward()


@program
def optimizers() -> None:
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"capturable": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.NAdam, {}),
    ):
        model = nn.Linear(4, 4).cuda()
        optimizer = kind(model.parameters(), **options)  # type: ignore[operator]
        _train(model, lambda: torch.randn(2, 4, device="cuda"), optimizer)


@program
def closures() -> None:
    _minimize(4)


@needs_values
def closures_of_many_weights() -> None:
    _minimize(2**18 + 1)  # more floating point than is computed


def _minimize(size: int) -> None:
    model = nn.Linear(size, 1).cuda()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    batch = torch.randn(8, size, device="cuda")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@program
def embeddings() -> None:
    for sparse in (False, True):
        model = nn.Embedding(100, 8, sparse=sparse).cuda()
        model(torch.randint(0, 100, (4, 5)).cuda()).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()


@program
def indexing() -> None:
    table = torch.randn(10, 4, device="cuda", requires_grad=True)
    table[torch.tensor([1, 2])].sum().backward()
    table.gather(0, torch.zeros(1, 4, dtype=torch.int64, device="cuda")).sum().backward()
    with torch.no_grad():
        table[0] = 1.0
        table[:, 1] += 2
    torch.where(table > 0, table, 0.0).sum().backward()
    torch.cat([table, table]).topk(2)
    table.sort()
    table.cumsum(0)


@program
def fused_kernels_within_a_checkpoint() -> None:
    lstm = nn.LSTM(8, 8, batch_first=True).cuda()

    def block(x: torch.Tensor) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return lstm(F.dropout(mixed, 0.1).flatten(0, 1))[0]

    x = torch.randn(2, 2, 8, 8, device="cuda", requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


@program
def a_captured_graph_runs_at_replay_only() -> None:
    value = torch.ones(4, device="cuda")
    norm = nn.BatchNorm1d(4).cuda()
    batch = torch.randn(8, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.mul_(2)
        scratch = value + 1
        scratch.add_(1)
        norm(batch)
    assert values(value) in (None, [1.0] * 4)
    assert values(norm.num_batches_tracked) in (None, 0)
    assert values(norm.running_mean) in (None, [0.0] * 4)
    graph.replay()
    graph.replay()
    assert values(value) in (None, [4.0] * 4)
    assert values(scratch) in (None, [6.0] * 4)
    assert values(norm.num_batches_tracked) in (None, 2)


def values(tensor: torch.Tensor) -> Any:
    """None if nothing is computed."""
    return None if torch._C.TensorBase.is_meta.__get__(tensor) else tensor.tolist()


@program
def functional_transforms() -> None:
    from torch.func import grad, vmap

    result = vmap(grad(lambda v: (v**2).sum()))(torch.randn(3, 4, device="cuda"))
    assert result.is_cuda


@program
def default_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert nn.Linear(3, 3).weight.is_cuda
        assert torch.tensor([1.0]).is_cuda
    finally:
        torch.set_default_device(None)
    with torch.device("cuda:1"):
        assert torch.randn(3).get_device() == 1


@program
def state_dictionaries() -> None:
    import io

    model, other = nn.Linear(4, 4).cuda(), nn.Linear(4, 4)
    other.load_state_dict(model.state_dict())
    assert not other.weight.is_cuda
    model.load_state_dict(other.state_dict())
    assert model.weight.is_cuda
    buffer = io.BytesIO()
    torch.save({"weight": torch.arange(4).cuda()}, buffer)
    buffer.seek(0)
    assert torch.load(buffer)["weight"].is_cuda
    buffer.seek(0)
    assert not torch.load(buffer, map_location="cpu")["weight"].is_cuda


@program
def inference() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda().eval()
    with torch.inference_mode():
        assert model(torch.randn(2, 4, device="cuda")).is_cuda
    with torch.no_grad():
        assert model(torch.randn(2, 4, device="cuda")).is_cuda


@program
def legacy_names() -> None:
    assert torch.cuda.FloatTensor(3).is_cuda
    assert torch.zeros(3).type("torch.cuda.HalfTensor").dtype is torch.float16
    assert torch.zeros(3, device="cuda").type() == "torch.cuda.FloatTensor"
    assert isinstance(torch.zeros(3, device="cuda"), torch.cuda.FloatTensor)


@program
def compiled() -> None:
    @torch.compile
    def double(value: Any) -> Any:
        return value * 2

    assert double(torch.ones(3, device="cuda")).is_cuda
