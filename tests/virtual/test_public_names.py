"""Every public name of ``torch.cuda`` and its modules, called as documented, on virtual GPUs."""

from __future__ import annotations

import ctypes
import importlib
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import pytest
import torch

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

OLD = not hasattr(torch.cuda, "tunable") or not hasattr(torch.accelerator, "Graph")
"""Whether this version of torch lacks some of the names."""
ON_0, ON_1 = torch.device("cuda", 0), torch.device("cuda", 1)

# What a call returns, or what holds for it.
CALLS: dict[str, Any] = {
    # devices
    "torch.cuda.can_device_access_peer(0, 1)": True,
    "torch.cuda.current_blas_handle()": lambda handle: handle > 0,
    "torch.cuda.current_solver_handle()": lambda handle: handle > 0,
    "torch.cuda.get_arch_list()": ["sm_90"],
    "torch.cuda.get_gencode_flags()": lambda flags: "sm_90" in flags,
    "torch.cuda.get_sync_debug_mode()": 0,
    "torch.cuda.init()": None,
    "torch.cuda.ipc_collect()": None,
    "torch.cuda.is_bf16_supported(including_emulation=False)": True,
    "torch.cuda.is_tf32_supported()": True,
    "torch.cuda.list_gpu_processes()": lambda text: text.startswith("GPU:0"),
    "torch.cuda.has_half": True,
    "torch.cuda.check_error(0)": None,
    "str(torch.cuda.CudaError(2))": "out of memory (2)",
    "torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(400))": (
        "invalid resource handle"
    ),
    # streams and events
    "torch.cuda.Stream.priority_range()": (0, -3),
    "[torch.cuda.Stream(priority=-n).priority for n in range(6)]": [0, -1, -2, -3, -3, -3],
    "torch.Stream('cuda').native_handle": lambda handle: handle > 0,
    "torch.cuda.Event(enable_timing=True)._as_parameter_": (
        lambda handle: isinstance(handle, ctypes.c_void_p)
    ),
    "torch.Event('cuda', interprocess=True).ipc_handle()": lambda handle: len(handle) == 64,
    "torch.cuda.get_stream_from_external(5, 1).device": ON_1,
    "torch.cuda.is_current_stream_capturing()": False,
    "torch.cuda.default_stream(1).device": ON_1,
    # memory
    "torch.cuda.caching_allocator_enable(True)": None,
    "torch.cuda.get_allocator_backend()": "native",
    "torch.cuda.get_per_process_memory_fraction('cuda:1')": 1.0,
    "torch.cuda.max_memory_cached() >= torch.cuda.memory_cached()": True,
    "torch.cuda.memory_stats_as_nested_dict()['oversize_segments']['peak']": 0,
    "torch.cuda.memory_summary(1, abbreviated=True)": lambda text: "Allocated memory" in text,
    "torch.cuda.reset_accumulated_memory_stats(1)": None,
    "torch.cuda.reset_max_memory_allocated()": None,
    "torch.cuda.reset_max_memory_cached()": None,
    "torch.cuda.memory_snapshot()": lambda found: isinstance(found, list),
    "torch.cuda.MemPool(use_on_oom=True, no_split=True).use_count()": 1,
    # random numbers
    "len(torch.cuda.get_rng_state_all())": 2,
    "torch.cuda.seed_all()": None,
    "torch.Generator('cuda').graphsafe_get_state().device": ON_0,
    # accelerators
    "torch.accelerator.current_accelerator(check_available=True).type": "cuda",
    "torch.accelerator.get_device_capability(1)['supported_dtypes'] >= {torch.bfloat16}": True,
    "torch.accelerator.empty_host_cache()": None,
    "torch.accelerator.get_memory_info(0) == torch.cuda.mem_get_info()": True,
    "torch.get_device_module() is torch.cuda": True,
    "torch.amp.is_autocast_available('cuda')": True,
    "torch.cuda.amp.common.amp_definitely_not_available()": False,
    # libraries
    "torch.backends.cuda.preferred_linalg_library('cusolver').name": "Cusolver",
    "torch.backends.cuda.preferred_blas_library('cublaslt').name": "Cublaslt",
    "torch.backends.cuda.cufft_plan_cache[1].max_size": 4096,
    "torch.backends.cuda.cufft_plan_cache.size": 0,
    "torch.backends.cuda.cufft_plan_cache.clear()": None,
    "len(torch.cuda.nccl.unique_id())": 128,
    "torch.cuda.tunable.tuning_is_enabled()": True,
    "torch.cuda.tunable.get_max_tuning_duration()": 30,
    "torch.cuda.tunable.get_filename()": "tunableop_results0.csv",
    "torch.cuda.tunable.get_results()": (),
    "torch.cuda.tunable.set_numerical_check_tolerances(True)": None,
    "torch.cuda.tunable.read_file()": False,
    "torch.cuda.profiler.start()": None,
    "torch.profiler.ProfilerActivity.CUDA in torch.autograd.profiler._supported_activities()": True,
    # tensors
    "torch.cuda.FloatTensor(4, device='cuda:1').device": ON_1,
    "torch.cuda.FloatTensor(torch.cuda.FloatStorage(4)).shape": (4,),
    "torch.ones(2, device='cuda').is_shared()": True,
    "torch.ones(2).is_shared()": False,
}


@pytest.fixture(params=["real", "shapes"])
def compute(request: Any) -> Iterator[str]:
    with gpuprobe.virtual_gpu("2xh100-80gb", compute=request.param):
        yield request.param


def _missing(call: str) -> bool:
    """Whether the first name of a call is one that this version of torch does not have."""
    match = re.search(r"torch(\.\w+)+", call)
    found: Any = torch
    for name in match.group().split(".")[1:] if match else ():
        if not hasattr(found, name):
            return True
        found = getattr(found, name)
    return False


def test_what_calls_return(compute: str) -> None:
    wrong = {}
    for call, expected in CALLS.items():
        if _missing(call):
            assert OLD, call
            continue
        found = eval(call)
        holds = expected(found) if callable(expected) else found == expected
        if not holds:
            wrong[call] = found
    assert not wrong


REFUSED: dict[Callable[[], Any], type[Exception]] = {
    lambda: torch.cuda.current_stream(7): RuntimeError,
    lambda: torch.cuda.default_stream(7): RuntimeError,
    lambda: torch.cuda.synchronize(7): RuntimeError,
    lambda: torch.cuda.Stream(7): RuntimeError,
    lambda: torch.cuda.Stream(priority=1): RuntimeError,
    lambda: torch.cuda.memory_allocated(7): RuntimeError,
    lambda: torch.cuda.reset_peak_memory_stats(7): RuntimeError,
    lambda: torch.cuda.set_per_process_memory_fraction(0.5, 7): RuntimeError,
    lambda: torch.cuda.FloatTensor(torch.ones(2)): TypeError,
    lambda: torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph(): RuntimeError,
    lambda: setattr(torch.backends.cuda.cufft_plan_cache, "max_size", -1): RuntimeError,
}


def test_what_is_refused(compute: str) -> None:
    for call, error in REFUSED.items():
        with pytest.raises(error):
            call()


# Called elsewhere in the tests of `tests/virtual`, or nothing to call.
_ELSEWHERE = frozenset(
    """CUDAGraph CUDAPluggableAllocator DeferredCudaCallError Event MemPoolContext ExternalStream
    GradScaler Graph GreenContext OutOfMemoryError StreamContext amp autocast
    caching_allocator_alloc caching_allocator_delete caching_allocator_disabled
    change_current_allocator cudaStatus current_device current_device_idx current_device_index
    current_stream custom_bwd custom_fwd default_generators device device_count device_index
    device_of empty_cache get_device_name get_device_properties get_rng_state graph
    graph_pool_handle graphs has_magma initial_seed is_available is_initialized jiterator
    make_graphed_callables manual_seed manual_seed_all max_memory_allocated max_memory_reserved
    mem_get_info memory memory_allocated memory_reserved memory_stats nccl nvtx profiler random
    reset_peak_memory_stats seed set_device set_device_idx set_device_index
    set_per_process_memory_fraction set_rng_state set_rng_state_all set_stream
    set_sync_debug_mode sparse stream streams synchronize tunable use_mem_pool
    get_device_capability host_memory_stats host_memory_stats_as_nested_dict
    reset_accumulated_host_memory_stats reset_peak_host_memory_stats range_push range_pop
    range_start range_end mark range stop profile mgpu_tune_gemm_in_file
    tune_gemm_in_file""".split()  # noqa: SIM905
)
_SENSORS = (
    "clock_rate",
    "device_memory_used",
    "memory_usage",
    "power_draw",
    "temperature",
    "utilization",
)


def test_each_public_name_is_called() -> None:
    called = " ".join(CALLS)
    for name in ("", ".memory", ".nvtx", ".random", ".graphs", ".profiler"):
        module = importlib.import_module(f"torch.cuda{name}")
        names = getattr(module, "__all__", ())
        missing = {
            one
            for one in names
            if one not in called
            and one not in _ELSEWHERE.union(_SENSORS)
            and not one.endswith(("Tensor", "Storage"))
        }
        assert not missing, module.__name__


@pytest.mark.parametrize("name", _SENSORS)
def test_sensors_are_refused(name: str) -> None:
    with (
        gpuprobe.virtual_gpu("h100-80gb"),
        pytest.raises(RuntimeError, match="a virtual GPU has no sensors"),
    ):
        getattr(torch.cuda, name)()


def test_synchronizing_operations_are_reported(compute: str) -> None:
    values = torch.ones(4, device="cuda")
    waiting: list[Callable[[], Any]] = [
        values.sum().item,
        values.nonzero,
        values.cpu,
        lambda: values.copy_(torch.ones(4)),
        lambda: torch.tensor([1.0], device="cuda"),
    ]
    others: list[Callable[[], Any]] = [
        values.sum,
        values.clone,
        torch.cuda.synchronize,
        lambda: values.to("cuda:1"),
        lambda: torch.ones(4).pin_memory().to("cuda", non_blocking=True),
    ]
    for mode in ("warn", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        for call in others:
            call()
        for call in waiting:
            if mode == "error":
                with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                    call()
                continue
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                call()
            assert [str(one.message) for one in found] == ["called a synchronizing CUDA operation"]
    torch.cuda.set_sync_debug_mode("default")
    values.sum().item()


@pytest.mark.skipif(OLD, reason="torch before 2.13 has other names for them")
def test_statistics_of_pinned_memory(compute: str) -> None:
    def figures() -> list[int]:
        found = torch.cuda.host_memory_stats()
        names = ("allocated_bytes.current", "active_bytes.current", "active_bytes.peak")
        return [found[name] for name in names]

    before = figures()[0]
    memory = torch.empty(3000, dtype=torch.uint8, pin_memory=True)
    assert figures() == [before + 4096, 4096, 4096]
    del memory
    assert figures() == [before + 4096, 0, 4096]
    again = torch.empty(4000, dtype=torch.uint8, pin_memory=True)  # the same block
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == 1
    del again
    torch.accelerator.empty_host_cache()
    torch.cuda.reset_peak_host_memory_stats()
    assert figures() == [before, 0, 0]
    assert torch.cuda.host_memory_stats_as_nested_dict()["num_host_free"] == 1
    torch.cuda.reset_accumulated_host_memory_stats()
    assert torch.cuda.host_memory_stats()["active_requests.freed"] == 0


def test_marks_of_nested_ranges() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        nvtx = torch.cuda.nvtx
        assert [nvtx.range_push("outer"), nvtx.range_push("inner")] == [0, 1]
        assert [nvtx.range_pop(), nvtx.range_pop(), nvtx.range_pop()] == [1, 0, -2]
        assert nvtx.range_start("a") != nvtx.range_start("b")
        nvtx.range_end(1)
        nvtx.mark("here")
        with nvtx.range("step {}", 1), torch.autograd.profiler.emit_nvtx():
            assert nvtx.range_push("within") == 1


def test_profilers_print_no_errors(capfd: pytest.CaptureFixture[str]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with gpuprobe.virtual_gpu("h100-80gb"):
        with torch.profiler.profile(activities=activities) as kineto:
            torch.ones(2, device="cuda").mul(2)
        with torch.autograd.profiler.profile(use_device="cuda") as legacy:
            torch.ones(2, device="cuda").mul(2)
    for profile in (kineto, legacy):
        assert "aten::mul" in {event.key for event in profile.key_averages()}
    assert "Failed to record" not in capfd.readouterr().err


@pytest.mark.skipif(OLD, reason="torch before 2.13 has none")
def test_graphs_of_accelerators(compute: str) -> None:
    graph = torch.accelerator.Graph()
    values = torch.ones(2, device="cuda")
    with graph:
        twice = values * 2
    values.fill_(3)
    graph.replay()
    if compute == "real":
        assert twice.tolist() == [6, 6]
    assert graph.pool()
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(kept):
        values * 2
    assert kept.raw_cuda_graph()
    assert kept.raw_cuda_graph_exec()


def test_generators_that_share_a_state() -> None:
    with gpuprobe.virtual_gpu("h100-80gb"):
        generator = torch.Generator("cuda").manual_seed(1)
        own = generator.graphsafe_get_state()
        first = torch.rand(2, device="cuda", generator=generator)
        generator.graphsafe_set_state(own)  # the state that it draws from anyway
        second = torch.rand(2, device="cuda", generator=generator)
        generator.graphsafe_set_state(torch.Generator("cuda").manual_seed(1))
        assert torch.equal(torch.rand(2, device="cuda", generator=generator), first)
        generator.graphsafe_set_state(own)
        generator.manual_seed(1)
        torch.rand(2, device="cuda", generator=generator)
        assert torch.equal(torch.rand(2, device="cuda", generator=generator), second)


def test_draws_from_a_generator_without_values() -> None:
    with gpuprobe.virtual_gpu("h100-80gb", compute="shapes"):
        generator = torch.Generator("cuda")
        values = torch.ones(1 << 20, device="cuda")
        for draw, given in (
            (values.exponential_, ()),
            (values.cauchy_, ()),
            (values.log_normal_, ()),
            (values.geometric_, (0.5,)),
        ):
            before = generator.get_offset()
            assert draw(*given, generator=generator).shape == values.shape
            assert generator.get_offset() > before


def test_pickles_of_tensors(compute: str) -> None:
    """Without values, too: torch's older format is written by C++ code."""
    for tensor in (torch.tensor([1.0, 2.0], device="cuda:1"), torch.randn(1 << 20, device="cuda")):
        stream = BytesIO()
        torch.save(tensor, stream, _use_new_zipfile_serialization=False)
        stream.seek(0)
        for loaded in (pickle.loads(pickle.dumps(tensor)), torch.load(stream)):
            assert (loaded.device, loaded.shape) == (tensor.device, tensor.shape)
            if len(tensor) == 2:
                assert loaded.tolist() == [1.0, 2.0]


def test_copies_into_tensors_of_several_devices(compute: str) -> None:
    from torch.cuda import comm

    whole = torch.arange(8.0, device="cuda").view(4, 2)
    halves = [torch.empty(n, 2, device=f"cuda:{n // 3}") for n in (1, 3)]
    comm.scatter(whole, out=halves)
    back = torch.empty(4, 2, device="cuda")
    comm.gather(halves, out=back)
    copies = [torch.empty(4, 2, device=place) for place in (ON_0, ON_1)]
    comm.broadcast(back, out=copies)
    if compute == "real":
        assert [copy.tolist() for copy in copies] == [whole.tolist()] * 2
