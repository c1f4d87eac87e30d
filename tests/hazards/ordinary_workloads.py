"""Training programs as people write them, with nothing wrong in their order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORKLOADS: dict[str, Callable[[], Any]] = {}


def workload(function: Callable[[], Any]) -> Callable[[], Any]:
    WORKLOADS[function.__name__] = function
    return function


def _step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@workload
def mlp_with_scheduler_and_clipping() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(3):
        loss = F.cross_entropy(
            model(torch.randn(16, 8, device="cuda")), torch.zeros(16, dtype=torch.long).cuda()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


@workload
def transformer_under_autocast_with_a_scaler() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 50)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device="cuda")
            return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))

    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        tokens = torch.randint(0, 50, (2, 9)).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@workload
def cnn_channels_last_with_a_moving_average() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).to("cuda", memory_format=torch.channels_last)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    for _ in range(2):
        images = torch.randn(4, 3, 8, 8).cuda().to(memory_format=torch.channels_last)
        _step(F.cross_entropy(model(images), torch.zeros(4, dtype=torch.long).cuda()), optimizer)
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
    model.eval()
    with torch.inference_mode():
        model(torch.randn(2, 3, 8, 8, device="cuda")).argmax(1).cpu()


@workload
def lstm_over_packed_sequences() -> None:
    model = nn.LSTM(4, 8, num_layers=2, batch_first=True).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        batch = nn.utils.rnn.pack_padded_sequence(
            torch.randn(3, 5, 4).cuda(), torch.tensor([5, 3, 2]), batch_first=True
        )
        output, _ = nn.utils.rnn.pad_packed_sequence(model(batch)[0], batch_first=True)
        _step(output.square().mean(), optimizer)


@workload
def checkpointed_blocks_with_accumulation() -> None:
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(3)).cuda()
    optimizer = torch.optim.AdamW(blocks.parameters())
    for at in range(4):
        x = torch.randn(4, 8, device="cuda")
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        (x.square().mean() / 2).backward()
        if at % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@workload
def activations_kept_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(torch.randn(4, 8, device="cuda")).square().mean()
        _step(loss, optimizer)


def _loader(count: int = 8) -> Any:
    data = TensorDataset(torch.randn(count, 8), torch.zeros(count, dtype=torch.long))
    return DataLoader(data, batch_size=2, pin_memory=True, shuffle=True)


@workload
def loader_with_pinned_memory() -> None:
    model = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, targets in _loader():
        inputs = inputs.to("cuda", non_blocking=True)
        targets = targets.to("cuda", non_blocking=True)
        _step(F.cross_entropy(model(inputs), targets), optimizer)


class Prefetcher:
    """The next batch is copied on a stream of its own, and waited for when it is asked for."""

    def __init__(self, loader: Any) -> None:
        self._batches = iter(loader)
        self._stream = torch.cuda.Stream()
        self._following: Any = None
        self._fetch()

    def _fetch(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._following = None
            return
        with torch.cuda.stream(self._stream):
            inputs, targets = (item.cuda(non_blocking=True) for item in batch)
            self._following = (inputs.float().sub_(0.5), targets)

    def __iter__(self) -> Iterator[Any]:
        while self._following is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            batch = self._following
            for item in batch:
                item.record_stream(torch.cuda.current_stream())
            self._fetch()
            yield batch


@workload
def prefetching_loader() -> None:
    model = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for inputs, targets in Prefetcher(_loader()):
            _step(F.cross_entropy(model(inputs), targets), optimizer)


@workload
def two_towers_on_two_streams() -> None:
    towers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).cuda()
    optimizer = torch.optim.SGD(towers.parameters(), 0.1)
    side = torch.cuda.Stream()
    for _ in range(3):
        x = torch.randn(4, 8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = towers[1](x)
        first = towers[0](x)
        torch.cuda.current_stream().wait_stream(side)
        second.record_stream(torch.cuda.current_stream())
        x.record_stream(side)
        _step((first * second).mean(), optimizer)


@workload
def losses_read_one_step_late() -> None:
    model = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    slots = [torch.empty((), pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in range(2)]
    seen = []
    for step in range(5):
        loss = model(torch.randn(4, 8, device="cuda")).square().mean()
        _step(loss, optimizer)
        if step >= 2:
            events[step % 2].synchronize()
            seen.append(float(slots[step % 2]))
        slots[step % 2].copy_(loss.detach(), non_blocking=True)
        events[step % 2].record()
    assert len(seen) == 3


def _group(backend: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist


@workload
def data_parallel_over_gloo() -> None:
    dist = _group("gloo")
    try:
        model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)).cuda()
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=[0], bucket_cap_mb=1, gradient_as_bucket_view=True
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            inputs = torch.randn(4, 8, device="cuda")
            if step == 1:
                with model.no_sync():
                    model(inputs).square().mean().backward()
            _step(model(inputs).square().mean(), optimizer)
        total = torch.ones(1, device="cuda")
        dist.all_reduce(total)
        handle = dist.all_reduce(total, async_op=True)
        other = torch.zeros(4, device="cuda") + 1
        handle.wait()
        (total + other).sum()
        dist.barrier()
    finally:
        dist.destroy_process_group()


@workload
def captured_training_step() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    inputs, targets = torch.randn(4, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    for _ in range(3):
        inputs.copy_(torch.randn(4, 8, device="cuda"))
        targets.copy_(torch.randn(4, 8, device="cuda"))
        graph.replay()
    loss.item()


@workload
def two_devices_and_a_copy() -> None:
    first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 4).to("cuda:1")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    for _ in range(2):
        hidden = first(torch.randn(4, 8, device="cuda:0"))
        _step(second(hidden.to("cuda:1")).square().mean(), optimizer)


@workload
def compiled_model() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        _step(model(torch.randn(4, 8, device="cuda")).square().mean(), optimizer)
