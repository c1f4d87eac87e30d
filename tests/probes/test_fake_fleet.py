"""The public fakes: below nvidia-ml-py, loud on what they do not know, and gone afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path

import pynvml
import pytest

from gpuprobe.api.devices import inventory
from gpuprobe.errors import DataError, UsageError
from gpuprobe.probes.inventory import DeviceWatch
from gpuprobe.testing import UnexpectedCall, fake_fleet, fleets, load_fleet


def test_the_real_nvidia_ml_py_runs_on_it() -> None:
    with fake_fleet("8xh100") as fleet:
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == len(fleet.devices) == 8
        handle = pynvml.nvmlDeviceGetHandleByIndex(3)
        assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA H100 80GB HBM3"
        assert pynvml.nvmlDeviceGetUUID(handle) == fleet.devices[3]["uuid"]
        again = pynvml.nvmlDeviceGetHandleByUUID(fleet.devices[3]["uuid"])
        assert pynvml.nvmlDeviceGetIndex(again) == 3
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
        assert memory.total == memory.used + memory.free + memory.reserved
        pynvml.nvmlShutdown()


def test_everything_is_put_back() -> None:
    before = (
        pynvml.nvmlLib,
        dict(pynvml._nvmlGetFunctionPointer_cache),
        ctypes.CDLL,
        dict(os.environ),
    )
    with contextlib.suppress(RuntimeError), fake_fleet("reordered"):
        folder = Path(os.environ["GPUPROBE_PROCFS"])
        assert (folder / "1600" / "status").is_file()
        raise RuntimeError("an exception inside passes through")
    after = (
        pynvml.nvmlLib,
        dict(pynvml._nvmlGetFunctionPointer_cache),
        ctypes.CDLL,
        dict(os.environ),
    )
    assert before == after
    assert not folder.exists()


def test_an_unknown_function_is_loud() -> None:
    with fake_fleet("8xh100"):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(UnexpectedCall, match="nvmlDeviceGetBoardId"):
            pynvml.nvmlDeviceGetBoardId(handle)


def test_a_function_that_an_old_driver_lacks_is_not_found() -> None:
    with fake_fleet("old-driver"):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetArchitecture(handle)


def test_no_call_works_before_init() -> None:
    with fake_fleet("8xh100"):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlShutdown()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetName(handle)


def test_other_libraries_still_open() -> None:
    with fake_fleet("8xh100"):
        assert ctypes.CDLL(None).getpid() == os.getpid()


def test_nothing_that_makes_a_context_is_there() -> None:
    with fake_fleet("8xh100"):
        cuda = ctypes.CDLL("libcuda.so.1")
        with pytest.raises(UnexpectedCall, match="cuCtxCreate_v2"):
            cuda.cuCtxCreate_v2  # noqa: B018


def test_a_fleet_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    description = {
        "about": "one",
        "driver": {"version": "1", "nvml": "1", "cuda": 12000},
        "devices": [{"chip": "t400", "uuid": "GPU-1", "pci": "00000000:01:00.0", "minor": 0}],
    }
    path.write_text(json.dumps(description))
    found = inventory(("nvml",), str(path))
    assert [device.name.value for device in found.devices] == ["NVIDIA T400 4GB"]


def test_what_is_no_fleet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such fleet"):
        load_fleet("nowhere")
    path = tmp_path / "bad.json"
    for text in ("", "[]", "{}", '{"about": "x", "driver": {}, "devices": [1]}'):
        path.write_text(text)
        with pytest.raises(DataError):
            load_fleet(str(path))


def test_a_watch_reads_twice_on_one_connection() -> None:
    with DeviceWatch(("nvml",), "8xh100") as watch:
        first, second = watch.read(), watch.read()
    assert first.devices == second.devices
    assert first.processes == second.processes


@pytest.mark.parametrize("fleet", [f for f in fleets() if f not in ("hostile", "old-driver")])
def test_the_c_library_serves_the_same_fleet(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description, once through Python and once through compiled C, reads the same."""
    import subprocess

    import fleet_library as build

    if build.compiler() is None:
        pytest.skip("no C compiler")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    folder = build.build(fleet, tmp_path / "lib")
    program = (
        "import sys, json\n"
        "from gpuprobe.api.devices import inventory\n"
        "from gpuprobe.reporters.json.info import document\n"
        "demo = sys.argv[1] if len(sys.argv) > 1 else None\n"
        "d = document(inventory(('nvml',), demo))\n"
        "json.dump({k: d[k] for k in ('driver', 'devices', 'topology', 'errors')}, sys.stdout)\n"
    )
    environ = {**os.environ, **load_fleet(fleet).environ}
    in_python = subprocess.run(
        [sys.executable, "-c", program, fleet], env=environ, capture_output=True, check=True
    )
    environ["LD_LIBRARY_PATH"] = str(folder)
    in_c = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, check=True
    )
    of_c, of_python = json.loads(in_c.stdout), json.loads(in_python.stdout)
    for document in (of_c, of_python):
        del document["driver"]["kernel_module"]  # of /proc, which the C library does not fake
    assert of_c == of_python
