"""``compute="shapes"``: values are known where they depend on nothing that was not computed."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import warm_python
from gpuprobe.virtual.session import VirtualSession
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gpuprobe
from gpuprobe.errors import ValueNeeded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about the host it runs on

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def labels() -> torch.Tensor:
    return torch.randint(0, 10, (32,), device="cuda")


def mask() -> torch.Tensor:
    return torch.arange(20, device="cuda").reshape(4, 5) % 3 == 0


@program
def truth() -> Any:
    return bool(mask().all()), bool(mask().any()), bool(torch.tensor(True).to("cuda"))


@program
def numbers() -> Any:
    found = labels()
    return found.max().item(), found.tolist(), found.float().mean().item(), int(found[0])


@program
def what_a_mask_selects() -> Any:
    x = torch.randn(4, 5, device="cuda")
    return x[mask()].tolist(), x.masked_select(mask()).shape, torch.where(mask())[0].tolist()


@program
def a_mask_that_is_written_through() -> Any:
    x = torch.zeros(4, 5, device="cuda")
    x[mask()] = torch.arange(int(mask().sum()), device="cuda").float()
    return x.tolist()


@program
def counting() -> Any:
    values, counts = torch.unique(labels() % 3, return_counts=True)
    return values.tolist(), counts.tolist(), torch.bincount(labels()).shape


@program
def classes() -> Any:
    found = labels()
    return F.one_hot(found).sum(0).tolist(), F.one_hot(found, 12).shape


@program
def scattering() -> Any:
    index = torch.tensor([[0], [1], [2]], device="cuda")
    made = torch.zeros(3, 4, dtype=torch.long, device="cuda").scatter_(1, index, 1)
    return made.tolist(), made.gather(1, index).tolist()


@program
def drawing() -> Any:
    weights = torch.softmax(torch.randn(3, 5, device="cuda"), -1)
    drawn = torch.multinomial(weights, 2).tolist()
    mean = torch.zeros(3, device="cuda")
    return drawn, torch.normal(mean, torch.ones_like(mean)).tolist(), torch.rand(2).tolist()


@program
def distributions() -> Any:
    normal = torch.distributions.Normal(torch.zeros(3, device="cuda"), torch.ones(3).cuda())
    chosen = torch.distributions.Categorical(logits=torch.randn(4, 6, device="cuda")).sample()
    return normal.log_prob(normal.sample()).tolist(), chosen.tolist()


@program
def packing() -> Any:
    lengths = torch.tensor([7, 5, 2])
    packed = pack_padded_sequence(torch.randn(3, 7, 4).cuda(), lengths, batch_first=True)
    _, found = pad_packed_sequence(packed, batch_first=True)
    return packed.batch_sizes.tolist(), found.tolist(), packed.data.shape


@program
def copies() -> Any:
    found = labels()
    pinned = found.cpu().pin_memory()
    twice = (found.clone(), found.data, copy.deepcopy(found), pinned.cuda(non_blocking=True))
    return [item.tolist() for item in twice], np.asarray(found.cpu()).sum().item(), pinned.tolist()


@program
def losses_kept_on_the_host() -> Any:
    losses = torch.zeros(5)
    for step in range(5):
        losses[step] = (torch.ones(3, device="cuda") * step).mean()
    return losses.mean().item(), losses.numpy().tolist()


@program
def training() -> Any:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 2))
    before = [id(weight) for weight in model.parameters()]
    start = model[0].bias.tolist()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 5, device="cuda"), torch.tensor([0, 1, 1, 0], device="cuda")
    found = []
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert [id(weight) for weight in model.parameters()] == before
    return start, found, model[1].running_mean.tolist(), model[1].num_batches_tracked.item()


@program
def training_on_the_host() -> Any:
    model = nn.Linear(5, 3)
    x = torch.randn(4, 5).requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    model.cuda()(x.cuda()).sum().backward()
    return model.cpu().bias.tolist(), x.grad.tolist()  # type: ignore[union-attr]


@program
def saving() -> Any:
    model = nn.Linear(5, 3)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    file = io.BytesIO()
    torch.save({"host": model.state_dict(), "device": model.cuda().state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    with torch.no_grad():
        model.weight.zero_()
    model.load_state_dict(loaded["host"])
    assert torch.equal(model.weight.cpu(), first["weight"])
    assert loaded["device"]["bias"].is_cuda
    again = pickle.loads(pickle.dumps(model.cpu()))
    return loaded["device"]["bias"].tolist(), again.weight.tolist(), loaded["host"]["bias"].tolist()


@program
def padding_masks() -> Any:
    """As transformers does it: is there any padding, and where do positions begin?"""
    ids = torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0]], device="cuda")
    attention = (ids != 0).long()
    return bool(attention.all()), (attention.cumsum(-1) - 1).clamp(min=0).tolist()


@program
def lists_of_tensors() -> Any:
    some = [torch.ones(2, device="cuda") * n for n in range(3)]
    torch._foreach_add_(some, 1.5)
    made = torch._foreach_mul(some, [2.0, 3.0, 4.0])
    torch._foreach_zero_(some)
    return [item.tolist() for item in (*made, *some)], torch._foreach_norm(made)[2].item()


@program
def how_it_prints() -> Any:
    found = labels()
    return repr(found[:2]), f"{found[0]} {found.float().mean():.2f}", repr(found[:2].double())


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_computing_all(name: str) -> None:
    found = []
    for compute in ("real", "shapes"):
        torch.manual_seed(0)
        with gpuprobe.virtual_gpu("h100-80gb", compute) as session:
            found.append(PROGRAMS[name]())
            peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found.append(peak)
        assert not any("unknown" in text for text in session.machine.assumed)
    assert found[2:] == found[:2]


# -- what is unknown


@pytest.fixture
def session() -> Iterator[VirtualSession]:
    with gpuprobe.virtual_gpu("h100-80gb", "shapes") as found:
        yield found


def known(session: VirtualSession, tensor: torch.Tensor) -> bool:
    from gpuprobe.virtual.reads.known import is_known

    return is_known(session.machine, tensor)


def unknown_float(device: str = "cuda") -> torch.Tensor:
    """One that depends on more of floating point than is computed."""
    return torch.ones(1024, 1024, device=device).mean()


def test_large_floating_point_is_not_computed(session: VirtualSession) -> None:
    assert known(session, torch.ones(512, 512, device="cuda"))
    assert not known(session, torch.ones(512, 513, device="cuda"))
    assert not known(session, torch.ones(512, 513))
    assert known(session, torch.ones(2048, 2048, dtype=torch.bool, device="cuda"))
    assert not known(session, torch.ones(512, 513, device="cuda") > 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_unknown_values_are_written_to_is_unknown(
    session: VirtualSession, device: str
) -> None:
    x = torch.zeros(3, device=device)
    part = x[1:]
    x[0] = unknown_float(device)
    assert not known(session, x)
    assert not known(session, part)  # of the same memory
    assert not known(session, x + 1)
    with pytest.raises(ValueNeeded):
        x.tolist()
    with pytest.raises(ValueNeeded):
        x.cpu().numpy()
    part.fill_(1.0)
    assert not known(session, x)  # its first element is not
    x.fill_(2.0)
    assert known(session, x)
    assert part.tolist() == [2.0, 2.0]


def test_copies_to_the_host_keep_what_is_unknown(session: VirtualSession) -> None:
    host = torch.zeros(())
    host.copy_(unknown_float())
    assert not known(session, host)
    assert not known(session, unknown_float().cpu())
    assert not known(session, torch.stack([torch.zeros(()), unknown_float().cpu()]))
    assert known(session, torch.zeros_like(unknown_float()))
    assert torch.zeros_like(unknown_float()).item() == 0


def test_known_masks_select_of_unknown_values(session: VirtualSession) -> None:
    x = torch.ones(1024, 1024, device="cuda")
    rows = torch.arange(1024, device="cuda") % 4 == 0
    assert x[rows].shape == (256, 1024)
    assert x[:, rows].shape == (1024, 256)
    assert x.masked_select(torch.ones_like(x, dtype=torch.bool).tril()).shape == (524800,)
    x[rows] = torch.zeros(256, 1024, device="cuda")
    assert not known(session, x)
    with pytest.raises(ValueNeeded):
        x[x > 0]


def test_lists_are_known_entry_by_entry(session: VirtualSession) -> None:
    some = [torch.ones(2, device="cuda"), torch.ones(512, 513, device="cuda")]
    made = torch._foreach_add(some, 1)
    assert [known(session, item) for item in made] == [True, False]
    torch._foreach_mul_(some, 3)
    assert some[0].tolist() == [3.0, 3.0]
    assert not known(session, some[1])


def test_what_a_graph_computes_is_not_known(session: VirtualSession) -> None:
    x = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        made = x * 2
    graph.replay()
    assert not known(session, x)
    assert not known(session, made)


def test_gradients_are_of_the_kind_of_their_tensors(session: VirtualSession) -> None:
    """Known and unknown, for tensors on the host that torch made before they had a gradient."""
    for size in (5, 1024):
        weights = torch.randn(size, requires_grad=True), torch.randn(size).requires_grad_()
        for weight in weights:
            (weight.cuda() * torch.ones(size, size, device="cuda")).sum().backward()
            assert weight.grad is not None
            assert not weight.grad.is_cuda
            assert known(session, weight.grad) == (size == 5)
            weight.grad = torch.zeros(size)
            assert weight.grad.tolist() == [0.0] * size


def test_a_parameter_shares_the_memory_that_it_was_made_of(session: VirtualSession) -> None:
    array = np.zeros(3, dtype=np.float32)
    weight = nn.Parameter(torch.from_numpy(array))
    with torch.no_grad():
        weight += 1
    assert array.tolist() == [1.0, 1.0, 1.0]
    weight.data = torch.arange(3.0)
    assert weight.tolist() == [0.0, 1.0, 2.0]


def test_values_take_no_memory_of_a_device(session: VirtualSession) -> None:
    before = torch.cuda.memory_allocated()
    x = torch.arange(128, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1024
    del x
    assert torch.cuda.memory_allocated() == before
    assert not session.machine.untagged


def test_an_error_of_values_is_raised(session: VirtualSession) -> None:
    table = torch.zeros(3, 4, device="cuda")
    with pytest.raises(IndexError):
        table.index_select(0, torch.tensor([7], device="cuda"))


_LOADER = """
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, at):
        return torch.arange(at + 1), torch.randn(600, 600)

def pad(batch):
    ids, images = zip(*batch)
    return pad_sequence(ids, batch_first=True), torch.stack(images)

for pin in (False, True):
    for ids, images in DataLoader(Samples(), 3, collate_fn=pad, num_workers=1, pin_memory=pin):
        ids, images = ids.cuda(non_blocking=True), images.cuda()
        assert images.shape == (3, 600, 600)
    assert ids.max().item() == 5, ids
    data = TensorDataset(torch.randn(2000, 400), torch.arange(2000))
    for x, y in DataLoader(data, 500, num_workers=1, pin_memory=pin):
        x, y = x.cuda(), y.cuda()
    assert x.shape == (500, 400) and y.max().item() == 1999
print("done", torch.cuda.max_memory_allocated())
"""


def test_workers_send_samples_with_values_and_without(tmp_path: Path) -> None:
    script = tmp_path / "loader.py"
    printed = []
    for compute in ("real", "shapes"):
        script.write_text(
            f"import gpuprobe\nwith gpuprobe.virtual_gpu('h100-80gb', {compute!r}):\n"
            f"    exec({_LOADER!r}, {{'__name__': '__main__'}})\n"
        )
        done = subprocess.run(
            [warm_python.shared().python, script],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith("done")
