"""Unmodified programs on a virtual GPU, with values and without."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from gpu_programs import NEED_VALUES, PROGRAMS

import gpuprobe
from gpuprobe.errors import ConfigError, UsageError, ValueNeeded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about the host it runs on


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs_and_leaves_nothing_behind(name: str) -> None:
    """With values and without, with the same peaks."""
    peaks = [run(name, compute) for compute in ("real", "shapes")]
    if name not in NEED_VALUES:
        assert peaks[0] == peaks[1]


def run(name: str, compute: str) -> list[tuple[int, int]]:
    """The peaks of both GPUs: allocated, reserved."""
    torch.manual_seed(0)
    gc.collect()
    with gpuprobe.virtual_gpu("2xh100-80gb", compute) as session:
        if compute == "shapes" and name in NEED_VALUES:
            with pytest.raises(ValueNeeded, match=r"gpu_programs\.py:\d+ needs the value"):
                PROGRAMS[name]()
        else:
            PROGRAMS[name]()
        gc.collect()
        for device in session.machine.devices:
            device.clear_workspaces()
            device.sim.synchronize_events()
            assert device.sim.allocated == 0
            assert device.sim.live == {}
        return [
            (torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index))
            for index in range(2)
        ]


def _everything() -> dict[str, dict[str, Any]]:
    import torch._dynamo  # it replaces names in torch once; that is not ours to undo

    owners = {
        "torch": torch,
        "Tensor": torch.Tensor,
        "UntypedStorage": torch.UntypedStorage,
        "Module": torch.nn.Module,
        "_C": torch._C,
        "cuda": torch.cuda,
        "memory": torch.cuda.memory,
        "streams": torch.cuda.streams,
        "graphs": torch.cuda.graphs,
        "nvtx": torch.cuda.nvtx,
        "nccl": torch.cuda.nccl,
        "amp": torch.amp,
        "accelerator": torch.accelerator,
        "backends.cuda": torch.backends.cuda,
        "backends.cudnn": torch.backends.cudnn,
        "version": torch.version,
        "distributed": torch.distributed,
        "serialization": torch.serialization,
    }
    return {name: dict(vars(owner)) for name, owner in owners.items()}


def test_leaving_puts_everything_back() -> None:
    before = _everything()
    with gpuprobe.virtual_gpu("h100-80gb"):
        PROGRAMS["mixed_precision"]()
    after = _everything()
    for name, attributes in before.items():
        changed = {
            key
            for key in attributes.keys() | after[name].keys()
            if attributes.get(key) is not after[name].get(key)
            # Caches that torch or Python fill themselves.
            and key != "__slotnames__"
        }
        assert not changed, name
    assert not torch.cuda.is_available()
    assert torch.zeros(2).add(1).tolist() == [1.0, 1.0]
    for key in ("AutocastIPU", "AutocastPrivateUse1"):
        assert not torch._C._dispatch_tls_is_dispatch_key_included(key)


def test_an_error_inside_passes_and_leaves_torch_clean() -> None:
    before = _everything()

    def fail() -> None:
        with gpuprobe.virtual_gpu("h100-80gb"):
            torch.zeros(3, device="cuda")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert _everything()["Tensor"] == before["Tensor"]


def test_one_at_a_time() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        with pytest.raises(UsageError), gpuprobe.virtual_gpu("h100-80gb"):
            pass
        assert torch.cuda.is_available()


def test_unknown_names() -> None:
    with pytest.raises(ConfigError), gpuprobe.virtual_gpu("h100-80gbb"):
        pass
    with pytest.raises(UsageError), gpuprobe.virtual_gpu("h100-80gb", "magic"):
        pass


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_are_those_of_the_cpu(dropout: float) -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        model = torch.nn.Sequential(layer, torch.nn.Dropout(dropout), torch.nn.Linear(16, 4))
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        batches = torch.randn(4, 2, 8, 16)
        torch.manual_seed(2)  # what follows is drawn on the device: a sequence of its own
        for batch in batches:
            loss = model(batch.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses("cpu")
    with gpuprobe.virtual_gpu("h100-80gb"):
        assert losses("cuda") == expected


def test_both_ways_of_computing_take_the_same_memory() -> None:
    peaks = {}
    for kind in ("real", "shapes"):
        with gpuprobe.virtual_gpu("h100-80gb", kind) as session:
            PROGRAMS["mlp_adamw"]()
            PROGRAMS["mixed_precision"]()
            sim = session.machine.devices[0].sim
            peaks[kind] = (sim.peak_allocated, sim.peak_reserved)
    assert peaks["real"] == peaks["shapes"]


def test_devices_do_not_mix() -> None:
    with gpuprobe.virtual_gpu("2xh100-80gb"):
        here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
        for other in (there, torch.ones(3)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                here + other
        assert (here + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            here.numpy()
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(1, device="cuda:2")


def test_a_full_device_raises_torchs_error() -> None:
    with gpuprobe.virtual_gpu("t4", "shapes"):
        kept = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8\.00 GiB\. GPU 0"):
            torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == kept.nbytes
        assert torch.cuda.memory_stats()["num_ooms"] == 1


@pytest.mark.parametrize("asked", ["empty", "randn", "copy", "product", "computed"])
def test_the_host_is_not_asked_for_what_the_device_has_not(asked: str) -> None:
    """Each result is larger than any host's memory, or would take minutes to compute."""
    with gpuprobe.virtual_gpu("t4"):
        column = torch.zeros(1 << 21, 1, device="cuda")
        wide = torch.zeros(1, device="cuda").expand(10 << 40)
        before = torch.cuda.memory_allocated()
        makers = {
            "empty": lambda: torch.empty(10 << 40, dtype=torch.uint8, device="cuda"),
            "randn": lambda: torch.randn(40, 1 << 40, device="cuda"),
            "copy": lambda: torch.zeros(1).expand(10 << 40).to("cuda"),
            "product": lambda: column @ column.t(),  # no shape among the arguments tells
            "computed": lambda: wide * 2,
        }
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate \d+\.00 GiB\. GPU 0"):
            makers[asked]()
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        assert column.sum().item() == 0.0


def test_device_contexts_in_a_fresh_process() -> None:
    """torch lists its factories once: that must not be of the replaced ones, nor outlive them."""
    text = (
        "import torch, gpuprobe\n"
        "for compute in ('shapes', 'real'):\n"
        "    with gpuprobe.virtual_gpu('t4', compute=compute):\n"
        "        with torch.device('cuda'):\n"
        "            assert torch.empty(2).is_cuda and torch.nn.Linear(2, 2).weight.is_cuda\n"
        "            assert torch.tensor([1.0]).is_cuda\n"
        "with torch.device('meta'):\n"
        "    assert torch.empty(2).is_meta and torch.tensor([1.0]).is_meta\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
