"""torch, pycuda and libcuda as sources: the calls that they make, and those that they avoid."""

from __future__ import annotations

import ctypes
import sys
import types
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

from gpuprobe.api.devices import inventory
from gpuprobe.errors import MissingExtra, UsageError
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.cuda_driver import CudaDriverSource
from gpuprobe.probes.nvml.readings import Calls
from gpuprobe.probes.nvml.source import NvmlSource
from gpuprobe.probes.pycuda_source import PycudaSource
from gpuprobe.probes.torch_cuda import TorchSource
from gpuprobe.testing import fake_fleet

GIB = 1 << 30


@dataclass
class Properties:
    """As torch's ``_CudaDeviceProperties``."""

    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    total_memory: int = 79 * GIB
    multi_processor_count: int = 132
    uuid: str = "3ebf1335-d9db-a275-96b3-7a723d058eed"
    pci_domain_id: int = 0
    pci_bus_id: int = 15
    pci_device_id: int = 0


class Cuda:
    """As ``torch.cuda``; has nothing that would create a context, but for ``mem_get_info``."""

    def __init__(self, contexts: set[int]) -> None:
        self.contexts = contexts

    def device_count(self) -> int:
        return 2

    def get_arch_list(self) -> list[str]:
        return ["sm_80", "sm_90"]

    def get_device_properties(self, ordinal: int) -> Properties:
        if ordinal:
            raise RuntimeError("CUDA error: device lost")
        return Properties()

    def memory_allocated(self, ordinal: int) -> int:
        return 3 * GIB

    def memory_reserved(self, ordinal: int) -> int:
        return 4 * GIB

    def mem_get_info(self, ordinal: int) -> tuple[int, int]:
        if ordinal not in self.contexts:
            raise AssertionError("this would create a context")
        return 70 * GIB, 79 * GIB


def torch_like(contexts: set[int]) -> Any:
    return types.SimpleNamespace(
        __version__="2.13.0+cu126",
        version=types.SimpleNamespace(cuda="12.6", hip=None),
        cuda=Cuda(contexts),
        _C=types.SimpleNamespace(_cuda_hasPrimaryContext=lambda ordinal: ordinal in contexts),
    )


def test_torch_is_not_made_to_create_a_context() -> None:
    source = TorchSource(torch_like(set()))
    assert source.status().available
    view = source.collect()
    device, lost = view.devices
    assert device.identity.uuid == "GPU-3ebf1335-d9db-a275-96b3-7a723d058eed"
    assert device.identity.pci_bus_id == "00000000:0f:00.0"
    assert device.torch.initialised.value is False
    assert device.torch.free.status is ReadStatus.NOT_COLLECTED
    assert device.torch.reserved.value == 4 * GIB
    assert isinstance(lost.identity.uuid, Unavailable)
    assert [error.device for error in view.errors] == ["torch-1"]
    assert view.torch_archs == ("sm_80", "sm_90")


def test_torch_tells_free_memory_where_it_has_a_context() -> None:
    device = TorchSource(torch_like({0})).collect().devices[0]
    assert device.torch.initialised.value is True
    assert device.torch.free.value == 70 * GIB


def test_the_real_torch_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status = TorchSource().status()
    assert (status.available, status.version) == (False, torch.__version__)
    assert status.reason == "torch sees no CUDA device"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in TorchSource().status().reason


class FakePycudaDevice:
    """As ``pycuda.driver.Device``."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def pci_bus_id(self) -> str:
        return ("0000:61:00.0", "0000:21:00.0", "0000:41:00.0", "0000:01:00.0")[self.ordinal]

    def name(self) -> str:
        return ("NVIDIA H100 80GB HBM3", *["NVIDIA GeForce RTX 4090"] * 2, "NVIDIA T400 4GB")[
            self.ordinal
        ]

    def compute_capability(self) -> tuple[int, int]:
        return ((9, 0), (8, 9), (8, 9), (7, 5))[self.ordinal]

    def total_memory(self) -> int:
        return GIB

    def get_attribute(self, attribute: int) -> int:
        if attribute not in (10, 16):
            raise PycudaError("cuDeviceGetAttribute failed: invalid argument")
        return 32 if attribute == 10 else 1


class PycudaError(Exception):
    """As ``pycuda.driver.Error``."""


class DeviceAttribute:
    """As ``pycuda.driver.device_attribute``, an enumeration made by Boost."""

    MULTIPROCESSOR_COUNT = 16
    WARP_SIZE = 10
    TOO_NEW = 999


@pytest.fixture
def pycuda_like(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package that looks like pycuda; importing ``pycuda.autoinit`` fails as unknown."""
    package = types.ModuleType("pycuda")
    package.__path__ = []
    package.VERSION_TEXT = "2026.1"  # type: ignore[attr-defined]
    driver = types.ModuleType("pycuda.driver")

    driver.Error = PycudaError  # type: ignore[attr-defined]
    driver.init = lambda: None  # type: ignore[attr-defined]
    driver.get_driver_version = lambda: 12080  # type: ignore[attr-defined]
    FakePycudaDevice.count = staticmethod(lambda: 4)  # type: ignore[attr-defined]
    driver.Device = FakePycudaDevice  # type: ignore[attr-defined]
    driver.device_attribute = DeviceAttribute  # type: ignore[attr-defined]
    package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    return driver


def test_pycuda_joins_by_pci_address(pycuda_like: types.ModuleType) -> None:
    found = inventory(("nvml", "pycuda"), "reordered")
    assert [d.identity.cuda_ordinal for d in found.devices] == [3, 1, 2, 0]
    assert found.devices[0].attributes["warp_size"].value == 32
    assert found.devices[0].attributes["warp_size"].source == "pycuda"
    assert found.devices[0].attributes["too_new"].status is ReadStatus.UNSUPPORTED
    assert found.sources[1].version == "2026.1"


def test_pycuda_that_fails_to_start_says_why(pycuda_like: types.ModuleType) -> None:
    def broken() -> None:
        raise pycuda_like.Error("cuInit failed: no CUDA-capable device is detected")

    pycuda_like.init = broken  # type: ignore[attr-defined]
    status = PycudaSource().status()
    assert not status.available
    assert "no CUDA-capable device" in status.reason


@pytest.mark.skipif(find_spec("pycuda") is not None, reason="pycuda is installed here")
def test_a_required_source_that_is_not_installed() -> None:
    assert PycudaSource().status().reason == "pycuda is not installed"
    with pytest.raises(MissingExtra, match="pycuda is not installed"):
        inventory(("pycuda",), require=("pycuda",))
    found = inventory(("nvml", "pycuda"), "8xh100")
    assert len(found.devices) == 8


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(UsageError, match="no such source"):
        inventory(("nvml", "rocm"))


class Stub:
    """A libcuda whose ``cuInit`` fails with a code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def cuInit(self, flags: int) -> int:
        return self.code


@pytest.mark.parametrize(
    ("code", "word"), [(34, "stub"), (100, "no CUDA-capable"), (803, "versions"), (777, "777")]
)
def test_libcuda_that_does_not_start_says_why(code: int, word: str) -> None:
    status = CudaDriverSource(lambda name: Stub(code)).status()
    assert not status.available
    assert word in status.reason


def test_libcuda_that_is_not_there_or_not_libcuda() -> None:
    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert "not installed" in CudaDriverSource(absent).status().reason
    assert "not a CUDA driver" in CudaDriverSource(lambda name: object()).status().reason


def test_libcuda_is_asked_for_nothing_that_makes_a_context() -> None:
    """The fake driver has no context functions at all, and raises on any it does not know."""
    with fake_fleet("reordered"):
        source = CudaDriverSource()
        assert source.status().available
        view = source.collect("full")
    assert [d.identity.cuda_ordinal for d in view.devices] == [0, 1, 2, 3]
    assert view.devices[0].attributes["warp_size"].value == 32
    assert view.devices[0].attributes["l2_cache_size"].status is ReadStatus.UNSUPPORTED
    assert view.errors == ()


def test_the_real_libraries_are_absent_with_a_reason_or_answer() -> None:
    for source in (NvmlSource(), CudaDriverSource()):
        status = source.status()
        assert status.available or status.reason
    with pytest.raises(OSError, match="no-such-library"):
        ctypes.CDLL("no-such-library.so")


class OddNvml:
    """A faulty nvidia-ml-py: each function fails differently."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"code {value}")
            self.value = value

    def nvmlSupported(self) -> int:
        return 5

    def nvmlNothing(self) -> int:
        return 0xFFFFFFFF

    def nvmlCode(self, code: int) -> int:
        raise self.NVMLError(code)

    def nvmlBytes(self) -> str:
        return b"\xff".decode()

    def nvmlShort(self) -> int:
        raise ctypes.ArgumentError("argument 1")


@pytest.mark.parametrize(
    ("name", "args", "status", "noted"),
    [
        ("Supported", (), "ok", False),
        ("Nothing", (), "unsupported", False),
        ("Absent", (), "unsupported", False),
        ("Code", (3,), "unsupported", False),
        ("Code", (13,), "unsupported", False),
        ("Code", (4,), "denied", True),
        ("Code", (15,), "lost", True),
        ("Code", (16,), "lost", True),
        ("Code", (999,), "error", True),
        ("Code", (12345,), "error", True),
        ("Bytes", (), "error", True),
        ("Short", (), "error", True),
    ],
)
def test_how_a_failure_is_called(
    name: str, args: tuple[int, ...], status: str, noted: bool
) -> None:
    calls = Calls(OddNvml())
    assert calls.read("GPU-1", name, *args).status.value == status
    assert bool(calls.errors) is noted


def test_a_bug_in_gpuprobe_is_not_swallowed() -> None:
    calls = Calls(OddNvml())
    with pytest.raises(ZeroDivisionError):
        calls.read("GPU-1", "Supported", convert=lambda value: value / 0)
