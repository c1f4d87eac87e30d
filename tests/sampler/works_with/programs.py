"""Training programs as users write them: each returns its losses, and says nothing of gpuprobe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 4


class Net(nn.Module):
    """Two layers; ``around`` runs the first of them (a checkpoint, say)."""

    def __init__(self, around: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 4)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x) if self.around is None else self.around(self.body, x)
        return self.head(x)


def batches(count: int = STEPS, size: int = 8) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(size, 16, generator=generator)


def seeded_net(around: Callable[..., torch.Tensor] | None = None) -> Net:
    torch.manual_seed(3)
    return Net(around)


def plain(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def autocast() -> list[float]:
    net = seeded_net()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for x in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def overflow() -> list[float]:
    """A scaler that has to skip its first steps: the optimizer is not called in them."""
    net = seeded_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=100)
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x * 100).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(2.0**8)
        losses.append(loss.item())
    return losses


def accumulation() -> list[float]:
    net = seeded_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses = []
    for number, x in enumerate(batches(3 * STEPS), 1):
        loss = net(x).square().mean() / 3
        loss.backward()
        losses.append(loss.item())
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def checkpointed() -> list[float]:
    net = seeded_net(lambda body, x: checkpoint(body, x, use_reentrant=False))
    return plain(net, torch.optim.SGD(net.parameters(), 0.1))


def checkpointed_reentrant() -> list[float]:
    def around(body: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(body, x.requires_grad_(), use_reentrant=True)

    net = seeded_net(around)
    return plain(net, torch.optim.SGD(net.parameters(), 0.1))


def several_optimizers() -> list[float]:
    net = seeded_net()
    one = torch.optim.AdamW(net.body.parameters())
    two = torch.optim.SGD(net.head.parameters(), 0.1)
    losses = []
    for x in batches():
        one.zero_grad()
        two.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        one.step()
        two.step()
        losses.append(loss.item())
    return losses


def gan() -> list[float]:
    torch.manual_seed(3)
    maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    make = torch.optim.Adam(maker.parameters(), 1e-3)
    judge = torch.optim.Adam(critic.parameters(), 1e-3)
    says = nn.BCEWithLogitsLoss()
    losses = []
    for real in batches():
        noise = torch.randn(len(real), 8)
        fake = maker(noise)
        judge.zero_grad()
        loss = says(critic(real), torch.ones(len(real), 1))
        loss = loss + says(critic(fake.detach()), torch.zeros(len(real), 1))
        loss.backward()
        judge.step()
        make.zero_grad()
        fooled = says(critic(fake), torch.ones(len(real), 1))
        fooled.backward()
        make.step()
        losses += [loss.item(), fooled.item()]
    return losses


def closure() -> list[float]:
    net = seeded_net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    losses: list[float] = []
    for x in batches():

        def evaluate(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(evaluate)
    return losses


def fused() -> list[float]:
    net = seeded_net()
    return plain(net, torch.optim.AdamW(net.parameters(), fused=True))


def foreach() -> list[float]:
    net = seeded_net()
    return plain(net, torch.optim.Adam(net.parameters(), foreach=True))


def steps_in_backward() -> list[float]:
    """An optimizer per parameter, stepped by a hook as soon as the gradient is there."""
    net = seeded_net()
    for parameter in net.parameters():
        own = torch.optim.SGD([parameter], 0.1)

        def step(parameter: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for x in batches():
        loss = net(x).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def scheduled_average() -> list[float]:
    """A learning-rate schedule, clipping, and averaged weights."""
    net = seeded_net()
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        averaged.update_parameters(net)
        losses.append(loss.item())
    return losses


def data_parallel() -> list[float]:
    """Without GPUs DataParallel calls the module it wraps."""
    net = nn.DataParallel(seeded_net())
    return plain(net, torch.optim.SGD(net.parameters(), 0.1))


def functional() -> list[float]:
    """torch.func: gradients without ``backward()``, updates without an optimizer."""
    net = seeded_net()
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (x,)).square().mean()

    losses = []
    for x in batches():
        gradients, loss = torch.func.grad_and_value(loss_of)(weights, x)
        weights = {name: w - 0.1 * gradients[name] for name, w in weights.items()}
        losses.append(loss.item())
    return losses


def double_backward() -> list[float]:
    """A gradient penalty: the backward pass builds a graph of its own."""
    net = seeded_net()
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for x in batches():
        optimizer.zero_grad()
        x.requires_grad_()
        out = net(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + slope.square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_tensor_hooks() -> list[float]:
    """Activations packed away and brought back."""
    net = seeded_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        return plain(net, optimizer)


def traced_by_jit() -> list[float]:
    """The first call of the model is torch.jit's, and what it makes is called as well."""
    net = seeded_net()
    frozen = torch.jit.trace(net, torch.ones(2, 16))
    losses = plain(net, torch.optim.SGD(net.parameters(), 0.1))
    return [*losses, frozen(torch.ones(2, 16)).sum().item()]


def two_threads() -> list[float]:
    """Two trainings at once. The first thread to step is the one that is watched."""
    losses: list[list[float]] = [[], []]

    def work(which: int) -> None:
        net = nn.Linear(16, 4)
        with torch.no_grad():
            net.weight.fill_(0.1 * (which + 1))
            net.bias.zero_()
        losses[which] = plain(net, torch.optim.SGD(net.parameters(), 0.1))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return losses[0] + losses[1]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index / 10)


def loader_workers() -> list[float]:
    net = seeded_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2)
    losses = []
    for x in loader:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


ORDINARY: dict[str, Callable[[], list[float]]] = {
    made.__name__: made
    for made in (
        autocast,
        overflow,
        accumulation,
        checkpointed,
        checkpointed_reentrant,
        several_optimizers,
        gan,
        closure,
        fused,
        foreach,
        steps_in_backward,
        scheduled_average,
        data_parallel,
        functional,
        double_backward,
        saved_tensor_hooks,
        loader_workers,
        traced_by_jit,
        two_threads,
    )
}


@contextmanager
def no_hooks_left() -> Iterator[None]:
    """Fail if a hook of the recorder is still in torch afterwards."""
    before = hooks_of_torch()
    yield
    assert hooks_of_torch() == before


def hooks_of_torch() -> list[Any]:
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return [
        [vars(owner).get(name) for owner, name in _patched()],
        torch.autograd._engine_run_backward,
        torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        torch.compile,
        torch.nn.Module.compile,
        dict(module._global_forward_hooks),
        dict(module._global_forward_pre_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
        list(_get_current_dispatch_mode_stack()),
    ]


def _patched() -> list[tuple[Any, str]]:
    """Places where the recorder puts functions of its own."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.utils import checkpoint as checkpoints

    names = [name for name in dir(distributed_c10d) if callable(getattr(distributed_c10d, name))]
    return [
        (torch.UntypedStorage, "resize_"),
        (torch._C._distributed_c10d.Work, "wait"),
        (checkpoints._recomputation_hook, "__enter__"),
        (checkpoints._recomputation_hook, "__exit__"),
        (checkpoints.CheckpointFunction, "backward"),
        *((owner, name) for owner in (dist, distributed_c10d) for name in names),
    ]
