"""The runtime in C, without torch: memory, streams, capture, processes, settings, refusals.

Each test is a program of its own: the runtime reads its settings once in a process.
"""

# ruff: noqa: E501 - programs as they are passed to the interpreter
from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.libraries import SOURCES, TorchBuild
from gpuprobe.native.process import settings_text

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the native engine runs on Linux, on x86-64 and aarch64",
)

_PRELUDE = """
import ctypes, os, sys
from ctypes import byref, c_char, c_int, c_long, c_longlong, c_size_t, c_uint64, c_void_p, create_string_buffer, POINTER
lib = ctypes.CDLL(sys.argv[1])
class _Functions:
    def __getattr__(self, name):
        function = lib["gpn_" + name]
        setattr(self, name, function)
        return function
f = _Functions()
def ok(status): assert status == 0, status
def malloc(size):
    out = c_void_p()
    ok(f.cudaMalloc(byref(out), c_size_t(size)))
    return out
def resident():
    with open("/proc/self/statm") as file: return int(file.read().split()[1]) * 4096
def info():
    free, total = c_size_t(), c_size_t()
    ok(f.cudaMemGetInfo(byref(free), byref(total)))
    return free.value, total.value
def new(create, *rest):
    out = c_void_p()
    ok(getattr(f, create)(byref(out), *rest))
    return out
GB = 1 << 30
"""


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime, compiled without a warning, and with the flags that `make sanitize` adds."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    out = tmp_path_factory.mktemp("runtime") / "libgpuprobe-cuda.so"
    subprocess.run(
        [
            *(compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra"),
            *("-Wno-unused-parameter", "-Werror", "-o", str(out), *map(str, SOURCES.glob("*.c"))),
            *(f"-Wl,--version-script={SOURCES / 'runtime.map'}", "-ldl"),
            *os.environ.get("GPUPROBE_TEST_CFLAGS", "").split(),
        ],
        check=True,
    )
    return out


def _build(cuda: str) -> TorchBuild:
    return TorchBuild(Path(), "2.13.0", cuda, {"cudnn": "9.20.0.48", "nccl": "2.28.9"})


def run(
    core: Path, code: str, spec: str = "h100-80gb", cuda: str = "13.0", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the runtime as ``lib``; the test fails where it fails."""
    settings = environment.pop("settings", settings_text(parse_spec(spec), _build(cuda)))
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", _PRELUDE + textwrap.dedent(code), str(core)],
        env={**kept, "GPUPROBE_NATIVE": settings, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_memory_costs_nothing_until_it_is_written_and_copies_keep_it_so(core: Path) -> None:
    run(
        core,
        """
        a, b = malloc(8 * GB), malloc(8 * GB)
        before = resident()
        ok(f.cudaMemcpy(b, a, c_size_t(8 * GB), 3))
        ok(f.cudaMemset(a, 0, c_size_t(8 * GB)))
        assert resident() - before < 64 << 20
        text = create_string_buffer(b"x" * 4096)
        ok(f.cudaMemcpy(c_void_p(a.value + 5 * GB), text, c_size_t(4096), 1))
        ok(f.cudaMemcpy(b, a, c_size_t(8 * GB), 3))
        assert resident() - before < 64 << 20
        back = create_string_buffer(8192)
        ok(f.cudaMemcpy(back, c_void_p(b.value + 5 * GB - 2048), c_size_t(8192), 2))
        assert back.raw == bytes(2048) + b"x" * 4096 + bytes(2048)
        # What lay in the target's memory does not survive a copy of zeros.
        ok(f.cudaMemset(b, 7, c_size_t(1 << 20)))
        ok(f.cudaMemcpy(b, c_void_p(a.value + GB), c_size_t(1 << 20), 3))
        ok(f.cudaMemcpy(back, b, c_size_t(8192), 2))
        assert back.raw == bytes(8192)
        """,
    )


def test_memory_is_placed_in_chunks_of_32_mib_and_ends_at_the_capacity(core: Path) -> None:
    run(
        core,
        """
        ok(f.cudaFree(None))
        free, total = info()
        f.used.restype = c_uint64
        assert total - free == f.used(0) > 0                # the context
        blocks = []
        out = c_void_p()
        while f.cudaMalloc(byref(out), c_size_t(GB)) == 0: blocks.append(out.value)
        assert f.cudaMalloc(byref(out), c_size_t(GB)) == 2 and not out.value
        assert f.cudaGetLastError() == 2 and f.cudaGetLastError() == 0
        assert len(blocks) == free // GB and blocks == sorted(blocks, reverse=True)
        ok(f.cudaFree(c_void_p(blocks.pop())))
        assert info()[0] == free - GB * len(blocks)
        assert f.cudaFree(c_void_p(blocks[0] + 512)) == 1      # not the begin of a block
        assert f.cudaFree(c_void_p(12345678)) == 1
        assert f.cudaMalloc(byref(out), c_size_t(2**64 - 1)) == 2
        """,
    )


def test_memory_is_placed_as_on_an_h200(core: Path) -> None:
    """Calls and distances in MiB from a run there (``cuMemAlloc``, driver 580), after its context's
    own chunks were full.
    """
    run(
        core,
        """
        ok(f.cudaFree(None))
        MIB, out = 1 << 20, c_void_p()

        def malloc(size):
            ok(f.cudaMalloc(byref(out), c_size_t(size * MIB)))
            return out.value

        malloc(24), malloc(2)  # what the context leaves
        first = malloc(64)
        at = lambda size: (malloc(size) - first) // MIB
        assert at(64) == -64
        assert at(50) == -128                        # 14 MiB of its chunk are left
        assert at(2) == -128 + 50
        assert at(26) == -160 and at(2) == -160 + 26  # the newest chunk with room
        assert at(20) == -192 and at(12) == -192 + 20
        assert at(2) == -160 + 28
        assert at(12) == -128 + 52
        assert at(100) == -320                       # four chunks
        assert at(20) == -320 + 100
        ok(f.cudaFree(c_void_p(first - 192 * MIB)))
        assert at(14) == -192                        # 20 MiB are free there
        ok(f.cudaFree(c_void_p(first)))
        assert at(40) == 0                           # the highest free addresses
        """,
    )


def test_streams_events_and_invalid_handles(core: Path) -> None:
    run(
        core,
        """
        s = new("cudaStreamCreateWithPriority", 1, -9)
        priority, flags = c_int(), c_int()
        ok(f.cudaStreamGetPriority(s, byref(priority)))
        assert priority.value == -5
        a, b = new("cudaEventCreateWithFlags", 0), new("cudaEventCreateWithFlags", 0)
        ms = ctypes.c_float()
        assert f.cudaEventElapsedTime(byref(ms), a, b) == 400  # not recorded
        ok(f.cudaEventRecord(a, s)); ok(f.cudaEventRecord(b, s))
        ok(f.cudaEventElapsedTime(byref(ms), a, b))
        assert ms.value >= 0
        ok(f.cudaStreamWaitEvent(None, b, 0)); ok(f.cudaEventQuery(b)); ok(f.cudaStreamSynchronize(s))
        ok(f.cudaEventDestroy(a)); ok(f.cudaEventDestroy(b)); ok(f.cudaStreamDestroy(s))
        other = create_string_buffer(256)
        assert f.cudaStreamSynchronize(other) == 400 and f.cudaEventQuery(other) == 400
        """,
    )


def test_the_watchdog_of_nccl_is_behind_the_host(core: Path) -> None:
    run(
        core,
        """
        import threading, time
        s, e = new("cudaStreamCreate"), new("cudaEventCreate")
        answers = []
        def watchdog():
            ctypes.CDLL(None).prctl(15, b"pt_nccl_watchdg")    # PR_SET_NAME
            ok(f.cudaEventRecord(e, s))
            answers.append(f.cudaEventQuery(e))
            ok(f.cudaDeviceSynchronize())
            answers.append(f.cudaEventQuery(e))
            ok(f.cudaEventRecord(e, s))
            answers.append(f.cudaEventQuery(e))
            kernel = create_string_buffer(256)                 # of no library
            for _ in range(1025):
                ok(f.cudaLaunchKernel(kernel, D3(1, 1, 1), D3(1, 1, 1), None, c_size_t(0), s))
            answers.append(f.cudaEventQuery(e))
            ok(f.cudaEventRecord(e, s))
            answers.append(f.cudaEventQuery(e))
            while f.cudaEventQuery(e):                         # until the host is idle for long enough
                time.sleep(0.01)
            answers.append(0)
        class D3(ctypes.Structure): _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))
        f.cudaLaunchKernel.argtypes = [c_void_p, D3, D3, c_void_p, c_size_t, c_void_p]
        thread = threading.Thread(target=watchdog)
        thread.start()
        thread.join()
        assert answers == [600, 0, 600, 0, 600, 0], answers
        ok(f.cudaEventRecord(e, s))
        ok(f.cudaEventQuery(e))                                # any other thread
        """,
    )


def test_capture_joins_streams_and_replays_copies_and_host_functions(core: Path) -> None:
    run(
        core,
        """
        s, t = new("cudaStreamCreate"), new("cudaStreamCreate")
        e, back = new("cudaEventCreate"), new("cudaEventCreate")
        a, b = malloc(64), malloc(64)
        ok(f.cudaMemset(a, 1, c_size_t(64)))
        assert f.cudaStreamBeginCapture(None, 0) == 900    # the legacy stream
        ok(f.cudaStreamBeginCapture(s, 2))
        status = c_int()
        ok(f.cudaEventRecord(e, s)); ok(f.cudaStreamWaitEvent(t, e, 0))
        ok(f.cudaStreamIsCapturing(t, byref(status)))
        assert status.value == 1
        calls = []
        call = ctypes.CFUNCTYPE(None, c_void_p)(lambda data: calls.append(data))
        ok(f.cudaMemcpyAsync(b, a, c_size_t(64), 3, t))
        ok(f.cudaLaunchHostFunc(t, call, c_void_p(5)))
        ok(f.cudaEventRecord(back, t)); ok(f.cudaStreamWaitEvent(s, back, 0))
        g = c_void_p()
        ok(f.cudaStreamEndCapture(s, byref(g)))
        ok(f.cudaStreamIsCapturing(t, byref(status)))
        assert status.value == 0 and not calls
        # Nobody may ask for an event of a capture until it is recorded again.
        assert f.cudaEventQuery(e) == 907 and f.cudaEventSynchronize(e) == 907
        ok(f.cudaEventRecord(e, s)); ok(f.cudaEventQuery(e))
        x = new("cudaGraphInstantiate", g, c_longlong(0))
        held = create_string_buffer(64)
        for value in (3, 4):
            ok(f.cudaMemset(a, value, c_size_t(64)))
            ok(f.cudaGraphLaunch(x, s))
            ok(f.cudaMemcpy(held, b, c_size_t(64), 2))
            assert held.raw == bytes([value]) * 64
        assert calls == [5, 5]
        # Waiting for a stream that is captured ends the capture with an error.
        ok(f.cudaStreamBeginCapture(s, 2))
        assert f.cudaStreamSynchronize(s) == 900
        assert f.cudaStreamEndCapture(s, byref(g)) == 901 and not g.value
        assert f.cudaStreamEndCapture(s, byref(g)) == 401
        """,
    )


def test_a_graph_keeps_a_user_object_until_its_last_copy_is_destroyed(core: Path) -> None:
    run(
        core,
        """
        ended = []
        call = ctypes.CFUNCTYPE(None, c_void_p)(ended.append)
        g = new("cudaGraphCreate", 0)
        o = new("cudaUserObjectCreate", c_void_p(7), call, 1, 1)
        ok(f.cudaUserObjectRetain(o, 1))
        ok(f.cudaGraphRetainUserObject(g, o, 1, 1))  # one of the two moves to the graph
        ok(f.cudaUserObjectRelease(o, 1))
        x = new("cudaGraphInstantiate", g, c_longlong(0))
        ok(f.cudaGraphDestroy(g))
        assert ended == []
        ok(f.cudaGraphExecDestroy(x))
        assert ended == [7]
        assert f.cudaUserObjectCreate(byref(o), c_void_p(7), call, 0, 1) == 1
        """,
    )


def test_the_program_may_close_and_replace_the_descriptors_of_the_runtime(core: Path) -> None:
    run(
        core,
        """
        import os, resource, tempfile
        lowest = os.dup(0)
        os.close(lowest)
        a, b = malloc(GB), malloc(GB)
        ok(f.cudaMemset(a, 9, c_size_t(4096)))
        ok(f.cudaMemcpy(b, a, c_size_t(GB), 3))   # looks which pages are present
        handles = [create_string_buffer(64) for _ in range(2)]
        ok(f.cudaIpcGetMemHandle(handles[0], a))
        ok(f.cudaIpcGetMemHandle(handles[1], b))
        def byte(address):
            out = create_string_buffer(1)
            ok(f.cudaMemcpy(out, address, c_size_t(1), 2))
            return out.raw[0]
        assert os.dup(0) == lowest
        kept = sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) > lowest + 1)
        assert len(kept) == 3, kept
        if resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 8192:
            assert kept[0] > 4096
        own = os.open(tempfile.mkdtemp() + "/own", os.O_RDWR | os.O_CREAT)
        for number in kept:
            os.dup2(own, number)
        assert byte(a) == 9
        ok(f.cudaMemcpy(b, a, c_size_t(GB), 3))
        assert byte(b) == 9
        ok(f.cudaFree(a)); ok(f.cudaFree(b))
        for number in kept:
            assert os.path.sameopenfile(number, own)   # neither closed nor written
        assert os.fstat(own).st_size == 0
        """,
    )


def test_memory_is_shared_between_processes(core: Path) -> None:
    run(
        core,
        """
        import subprocess
        a = malloc(GB)
        ok(f.cudaMemset(a, 9, c_size_t(4096)))
        handle = create_string_buffer(64)
        ok(f.cudaIpcGetMemHandle(handle, a))
        class H(ctypes.Structure): _fields_ = (("b", c_char * 64),)
        lib["gpn_cudaIpcOpenMemHandle__13"].argtypes = [c_void_p, H, c_int]
        out = c_void_p()
        own = H(); ctypes.memmove(byref(own), handle, 64)
        assert lib["gpn_cudaIpcOpenMemHandle__13"](byref(out), own, 1) == 1   # in the same process
        child = '''
        import ctypes, sys
        lib = ctypes.CDLL(sys.argv[1])
        class H(ctypes.Structure): _fields_ = (("b", ctypes.c_char * 64),)
        h = H(); ctypes.memmove(ctypes.byref(h), bytes.fromhex(sys.argv[2]), 64)
        out = ctypes.c_void_p()
        open_ = lib["gpn_cudaIpcOpenMemHandle__13"]
        open_.argtypes = [ctypes.c_void_p, H, ctypes.c_int]
        assert open_(ctypes.byref(out), h, 1) == 0
        assert ctypes.string_at(out, 4097) == bytes([9]) * 4096 + bytes(1)
        ctypes.memset(out.value + 4096, 8, 10)
        assert lib.gpn_cudaIpcCloseMemHandle(out) == 0
        bad = H(); assert open_(ctypes.byref(out), bad, 1) == 1
        '''
        import textwrap
        subprocess.run([sys.executable, "-S", "-c", textwrap.dedent(child), sys.argv[1], handle.raw.hex()], check=True)
        assert ctypes.string_at(a.value + 4090, 20) == bytes([9]) * 6 + bytes([8]) * 10 + bytes(4)
        """,
    )


def test_virtual_memory_is_mapped_and_exported(core: Path) -> None:
    run(
        core,
        """
        ok(f.cudaFree(None))
        free, _ = info()
        address, size = c_uint64(), 4 << 20
        ok(f.cuMemAddressReserve(byref(address), c_size_t(GB), c_size_t(0), c_uint64(0), c_uint64(0)))
        properties = (c_int * 8)(1, 1, 1, 0)      # pinned, by file descriptor, on device 0
        p = c_void_p()
        ok(f.cuMemCreate(byref(p), c_size_t(size), properties, c_uint64(0)))
        assert f.cuMemCreate(byref(c_void_p()), c_size_t(4097), properties, c_uint64(0)) == 1
        assert info()[0] == free - size
        ok(f.cuMemMap(address, c_size_t(size), c_size_t(0), p, c_uint64(0)))
        ok(f.cudaMemset(c_void_p(address.value), 5, c_size_t(size)))
        fd = c_int(-1)
        ok(f.cuMemExportToShareableHandle(byref(fd), p, 1, c_uint64(0)))
        q = c_void_p()
        ok(f.cuMemImportFromShareableHandle(byref(q), c_void_p(fd.value), 1))
        second = address.value + 8 * size
        ok(f.cuMemMap(c_uint64(second), c_size_t(size), c_size_t(0), q, c_uint64(0)))
        assert ctypes.string_at(second, 8) == bytes([5]) * 8
        ok(f.cuMemRelease(p))
        assert info()[0] == free - size            # it is mapped still
        ok(f.cuMemUnmap(address, c_size_t(size)))
        assert f.cuMemUnmap(address, c_size_t(size)) == 1
        assert info()[0] == free
        """,
    )


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", [1]),
        ("3,0", [3, 0]),
        ("0,9,1", [0]),
        ("0,0", []),
        ("", []),
        ("-1", []),
        ("nonsense", []),
        ("GPU-67", []),
        ("GPU-{2}", [2]),
    ],
)
def test_visible_devices(core: Path, visible: str, expected: list[int]) -> None:
    uuids = [bytes((0x67 + 29 * k) % 256 for k in range(15)) + bytes([i]) for i in range(4)]
    text = uuids[2].hex()
    named = visible.replace(
        "{2}", "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
    )
    if visible == "GPU-67":  # the begin of all four: the first is meant, as for an exact one
        expected = [0]
    run(
        core,
        f"""
        count = c_int(-1)
        status = f.cudaGetDeviceCount(byref(count))
        assert count.value == {len(expected)}, count
        assert status == ({"0" if expected else "100"})
        for ordinal, index in enumerate({expected}):
            uuid = create_string_buffer(16)
            ok(f.cuDeviceGetUuid(uuid, ordinal))
            assert uuid.raw[15] == index, (ordinal, uuid.raw)
        assert f.cudaSetDevice(count.value) in (100, 101)
        """,
        spec="4xh100-80gb",
        CUDA_VISIBLE_DEVICES=named,
    )


def test_settings_are_read_and_a_damaged_one_is_harmless(core: Path) -> None:
    settings = ";;x;cuda=12040;=;nccl=abc;device=A;total_memory=1073741824;major=8;minor=9;bad;device=B;major=x"
    run(
        core,
        """
        version, count, name = c_int(), c_int(), create_string_buffer(64)
        ok(f.cudaRuntimeGetVersion(byref(version))); ok(f.cudaGetDeviceCount(byref(count)))
        assert (version.value, count.value) == (12040, 2)
        ok(f.cuDeviceGetName(name, 64, 0))
        assert name.value == b"A"
        total = c_size_t()
        ok(f.cuDeviceTotalMem_v2(byref(total), 0))
        assert total.value == GB
        """,
        settings=settings,
    )
    run(
        core,
        """
        count = c_int()
        assert f.cudaGetDeviceCount(byref(count)) == 100 and count.value == 0
        assert f.cudaMalloc(byref(c_void_p()), c_size_t(10)) == 100
        """,
        settings="",
    )


def test_refused_functions_are_named_once_and_return_their_status(core: Path) -> None:
    done = run(
        core,
        """
        for name in (b"cusolverDnSfoo", b"cusolverDnSfoo", b"cusolverDnSbar"):
            assert f.refuse_cusolver(name, None) == 9
        assert f.refuse_cuda(b"cudaFoo", None) == 801 and f.cudaGetLastError() == 801
        f.unanswered_name.restype = ctypes.c_char_p
        f.unanswered_count.restype = c_size_t
        assert [f.unanswered_name(c_size_t(i)) for i in range(f.unanswered_count())] == [
            b"cusolverDnSfoo", b"cusolverDnSbar", b"cudaFoo"]
        """,
    )
    assert done.stderr.splitlines() == [
        f"gpuprobe: {name} is not answered by the simulated GPU"
        for name in ("cusolverDnSfoo", "cusolverDnSbar", "cudaFoo")
    ]


@pytest.mark.parametrize(
    ("spec", "cuda", "ptx", "binary"),
    [
        ("h100-80gb", "13.0", 90, 90),
        ("rtx4090", "13.0", 86, 86),  # compute capability 8.9: the cubin of 8.6 runs
        ("rtx4090", "12.4", 86, 86),
        ("a100-80gb", "12.4", 80, 80),
        ("b200", "12.4", 90, 100),  # no cubin: the PTX of 9.0 is compiled for the device
        ("b200", "13.0", 100, 100),
    ],
)
def test_kernels_are_of_the_binary_that_cuda_would_load(
    core: Path, spec: str, cuda: str, ptx: int, binary: int
) -> None:
    run(
        core,
        f"""
        attributes = create_string_buffer(b"\\xff" * 144, 160)
        ok(f.cudaFuncGetAttributes(attributes, None))
        numbers = (c_int * 40).from_buffer(attributes)
        assert (numbers[8], numbers[9]) == ({ptx}, {binary}), list(numbers)
        """,
        spec=spec,
        cuda=cuda,
    )


@pytest.mark.parametrize(("cuda", "name", "size"), [("13.0", "cudaGetDeviceProperties__13", 1008), ("12.4", "cudaGetDeviceProperties_v2__12", 1032)])  # fmt: skip
def test_properties_fill_their_structure_and_no_more(
    core: Path, cuda: str, name: str, size: int
) -> None:
    run(
        core,
        f"""
        out = create_string_buffer(b"\\xee" * 2000, 2000)
        ok(f.{name}(out, 0))
        assert out.raw[{size}:] == b"\\xee" * (2000 - {size}) and out.raw[{size} - 1] == 0
        assert out.raw.startswith(b"NVIDIA H100")
        total = int.from_bytes(out.raw[288:296], "little")
        assert total == info()[1]
        """,
        cuda=cuda,
    )


def test_a_pool_keeps_memory_up_to_its_threshold(core: Path) -> None:
    run(
        core,
        """
        ok(f.cudaFree(None))
        free, _ = info()
        p = c_void_p()
        ok(f.cudaDeviceGetDefaultMemPool(byref(p), 0))
        def attribute(number):
            value = c_uint64()
            ok(f.cudaMemPoolGetAttribute(p, number, byref(value)))
            return value.value
        a = c_void_p()
        ok(f.cudaMallocAsync(byref(a), c_size_t(33 << 20), None))
        assert (attribute(5), attribute(7)) == (64 << 20, 33 << 20)      # reserved, used
        ok(f.cudaFreeAsync(a, None))
        assert attribute(5) == 0 and info()[0] == free                    # the threshold is 0
        ok(f.cudaMemPoolSetAttribute(p, 4, byref(c_uint64(2**64 - 1))))
        ok(f.cudaMallocAsync(byref(a), c_size_t(33 << 20), None))
        ok(f.cudaFree(a))
        assert (attribute(5), attribute(7), attribute(6)) == (64 << 20, 0, 64 << 20)
        assert info()[0] == free - (64 << 20)
        ok(f.cudaMemPoolTrimTo(p, c_size_t(0)))
        assert info()[0] == free
        assert f.cudaMallocAsync(byref(a), c_size_t(1 << 50), None) == 2 and not a.value
        """,
    )


def test_recurrent_weights_fill_their_space_without_overlap(core: Path) -> None:
    run(
        core,
        """
        for mode, gates in ((0, 1), (2, 4), (3, 3)):
            for ways in (0, 1):
                for projection in ((0, 16) if mode == 2 else (0,)):
                    for bias in range(4):
                        r = new("cudnnCreateRNNDescriptor")
                        ok(f.cudnnSetRNNDescriptor_v8(r, 0, mode, bias, ways, 0, 0, 0, 0, 12, 32, projection, 2, None, 0))
                        size = c_size_t()
                        ok(f.cudnnGetRNNWeightSpaceSize(None, r, byref(size)))
                        m, b = new("cudnnCreateTensorDescriptor"), new("cudnnCreateTensorDescriptor")
                        spans = []
                        base = 1 << 20
                        for layer in range(2 * (1 + ways)):
                            for number in range(2 * gates + 1):
                                at, bias_at = c_void_p(), c_void_p()
                                ok(f.cudnnGetRNNWeightParams(None, r, layer, size, c_void_p(base), number, m, byref(at), b, byref(bias_at)))
                                for d, where in ((m, at), (b, bias_at)):
                                    if not where.value: continue
                                    kind, count, sizes, strides = c_int(), c_int(), (c_int * 3)(), (c_int * 3)()
                                    ok(f.cudnnGetTensorNdDescriptor(d, 3, byref(kind), byref(count), sizes, strides))
                                    assert count.value == 3 and sizes[0] == 1 and strides[1] == sizes[2]
                                    spans.append((where.value, where.value + 4 * sizes[1] * sizes[2]))
                        spans.sort()
                        assert spans[0][0] == base and spans[-1][1] == base + size.value
                        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:]))
        """,
    )


def test_host_results_of_cublas_and_status_of_cusolver_are_zero(core: Path) -> None:
    run(
        core,
        """
        h = new("cublasCreate_v2")
        out = ctypes.c_double(7)
        f.cublasDdot_v2.argtypes = [c_void_p, c_int, c_void_p, c_int, c_void_p, c_int, c_void_p]
        ok(f.cublasDdot_v2(h, 4, None, 1, None, 1, ctypes.addressof(out)))
        assert out.value == 0
        out.value = 7
        ok(f.cublasSetPointerMode_v2(h, 1))    # the result goes to device memory, after the call
        ok(f.cublasDdot_v2(h, 4, None, 1, None, 1, ctypes.addressof(out)))
        assert out.value == 7
        s, status = new("cusolverDnCreate"), malloc(64)
        ok(f.cudaMemset(status, 1, c_size_t(64)))
        f.cusolverDnSgetrf.argtypes = [c_void_p, c_int, c_int, c_void_p, c_int, c_void_p, c_void_p, c_void_p]
        ok(f.cusolverDnSgetrf(s, 4, 4, None, 4, None, None, status))
        assert ctypes.string_at(status, 8) == bytes(4) + bytes([1]) * 4
        """,
    )


def test_a_sparse_product_counts_its_nonzeros(core: Path) -> None:
    run(
        core,
        """
        def matrix(rows, columns, offsets, indices):
            o, i = malloc(4 * len(offsets)), malloc(4 * len(indices))
            ok(f.cudaMemcpy(o, (c_int * len(offsets))(*offsets), c_size_t(4 * len(offsets)), 1))
            ok(f.cudaMemcpy(i, (c_int * len(indices))(*indices), c_size_t(4 * len(indices)), 1))
            out = c_void_p()
            create = f.cusparseCreateCsr
            create.argtypes = [c_void_p, c_longlong, c_longlong, c_longlong, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int]
            ok(create(byref(out), rows, columns, len(indices), o, i, None, 2, 2, 0, 0))
            return out
        # [[x, x, .], [., ., x]] times [[x, .], [x, x], [., x]]: rows of 2 and 1 nonzeros.
        a = matrix(2, 3, [0, 2, 3], [0, 1, 2])
        b = matrix(3, 2, [0, 1, 3, 4], [0, 0, 1, 1])
        c = matrix(2, 2, [0, 0, 0], [0])
        f.cusparseSpGEMM_compute.argtypes = [c_void_p, c_int, c_int] + [c_void_p] * 5 + [c_int, c_int] + [c_void_p] * 3
        size = c_size_t()
        ok(f.cusparseSpGEMM_compute(None, 0, 0, None, a, b, None, c, 0, 0, None, ctypes.addressof(size), None))
        ok(f.cusparseSpGEMM_compute(None, 0, 0, None, a, b, None, c, 0, 0, None, ctypes.addressof(size), malloc(size.value)))
        rows, columns, nonzeros = c_longlong(), c_longlong(), c_longlong()
        ok(f.cusparseSpMatGetSize(c, byref(rows), byref(columns), byref(nonzeros)))
        assert (rows.value, columns.value, nonzeros.value) == (2, 2, 3)
        # Indices that no matrix can have, as memory without values may hold, are left out.
        wild = matrix(2, 3, [0, 2, 1 << 30], [1 << 30, -5, 1])
        ok(f.cusparseSpGEMM_compute(None, 0, 0, None, wild, b, None, c, 0, 0, None, ctypes.addressof(size), malloc(size.value)))
        """,
    )


def test_sizes_of_recurrent_networks_are_those_of_a_gpu(core: Path) -> None:
    """Measured on an H200 with cuDNN 9.19."""
    run(
        core,
        """
        states = c_size_t()
        ok(f.cudnnDropoutGetStatesSize(None, byref(states)))
        assert states.value == 6_488_064
        f.cudnnSetDropoutDescriptor.argtypes = [c_void_p, c_void_p, ctypes.c_float, c_void_p, c_size_t, c_uint64]
        RNN, LSTM, GRU = 1, 2, 3
        FLOAT, HALF, BFLOAT16 = 0, 2, 9
        for mode, kind, steps, batch, width, hidden, layers, ways, dropout, small, workspace, reserve in (
            (LSTM, HALF, 128, 32, 256, 128, 1, 1, 0, 3, 32965120, 5243136),
            (LSTM, FLOAT, 1, 1, 100, 1024, 3, 1, 0, 0, 110842976, 69888),
            (GRU, HALF, 400, 32, 512, 128, 3, 2, 0.3, 3, 203571712, 132710656),
            (GRU, HALF, 1, 1, 32, 32, 2, 2, 0.3, 3, 33619744, 1984),
            (GRU, BFLOAT16, 400, 4, 100, 32, 3, 1, 0.3, 3, 26401056, 2061056),
            (GRU, BFLOAT16, 1, 32, 256, 128, 3, 1, 0.3, 3, 26051072, 165120),
            (RNN, HALF, 50, 32, 256, 128, 3, 2, 0, 3, 63144448, 4096256),
            (RNN, FLOAT, 400, 1, 32, 128, 1, 1, 0, 3, 11238688, 205056),
            (RNN, BFLOAT16, 400, 1, 512, 512, 2, 2, 0, 0, 44560672, 2457856),
        ):
            d, r, x = (new("cudnnCreate" + name) for name in ("DropoutDescriptor", "RNNDescriptor", "RNNDataDescriptor"))
            ok(f.cudnnSetDropoutDescriptor(d, None, dropout, None, 0, 0))
            ok(f.cudnnSetRNNDescriptor_v8(r, small, mode, 2, ways - 1, 0, kind, 0, 0, width, hidden, hidden, layers, d, 0))
            ok(f.cudnnSetRNNDataDescriptor(x, kind, 0, steps, batch, width, None, None))
            found = c_size_t(), c_size_t()
            ok(f.cudnnGetRNNTempSpaceSizes(None, r, 1, x, byref(found[0]), byref(found[1])))
            assert (found[0].value, found[1].value) == (workspace, reserve), (mode, kind, steps, batch)
            ok(f.cudnnGetRNNTempSpaceSizes(None, r, 0, x, byref(found[0]), byref(found[1])))
            assert found[1].value == 0
        # Of 360 networks, the one that differs: 0.1% more than measured.
        ok(f.cudnnSetDropoutDescriptor(d, None, 0.3, None, 0, 0))
        ok(f.cudnnSetRNNDescriptor_v8(r, 3, RNN, 2, 0, 0, BFLOAT16, 0, 0, 32, 32, 32, 2, d, 0))
        ok(f.cudnnSetRNNDataDescriptor(x, BFLOAT16, 0, 50, 32, 32, None, None))
        ok(f.cudnnGetRNNTempSpaceSizes(None, r, 1, x, byref(found[0]), byref(found[1])))
        assert abs(found[0].value / 17351168 - 1) < 0.001
        """,
        spec="h200",
    )


def test_workspaces_of_factorisations_are_those_of_a_gpu(core: Path) -> None:
    """Measured on an H200 with cuSOLVER 12.0.4, of single-precision matrices."""
    run(
        core,
        """
        def size(name, before, after=()):
            out = c_int()
            ok(getattr(f, f"cusolverDnS{name}_bufferSize")(None, *before, byref(out), *after))
            return 4 * out.value
        for n, potrf, getrf, geqrf, orgqr, ormqr in (
            (32, 160, 768, 3145856, 136192, 369664),
            (300, 544, 6912, 3326080, 527360, 1906048),
            (768, 2432, 10496, 5243008, 1246208, 7344128),
        ):
            assert size("potrf", (0, n, None, n)) == potrf
            assert size("getrf", (n, n, None, n)) == getrf
            assert size("geqrf", (n, n, None, n)) == geqrf
            assert size("orgqr", (n, n, n, None, n, None)) == orgqr
            assert size("ormqr", (0, 1, n, n, n, None, n, None, None, n)) == ormqr
        for m, n, economic, expected in ((300, 33, 1, 3146112), (128, 300, 1, 3299968), (1024, 64, 0, 3691776), (100, 100, 0, 117632), (5, 3, 0, 3968)):
            assert size("gesvdj", (1, economic, m, n, None, m, None, None, m, None, n), (None,)) == expected
        for n, expected in ((33, 16848), (300, 407896), (512, 1124416)):
            assert size("syevj", (1, 0, n, None, n, None), (None,)) == expected
        def wide(name, *args):
            found = c_size_t(), c_size_t()
            ok(getattr(f, f"cusolverDnX{name}_bufferSize")(None, None, *args, byref(found[0]), byref(found[1])))
            return found[0].value
        n = ctypes.c_int64
        for rows, expected in ((4, 274924), (16, 314636), (768, 9959308)):
            assert abs(wide("syevd", 1, 0, n(rows), 0, None, n(rows), 0, None, 0) / expected - 1) < 0.001
        for rows, expected, most in ((33, 137216, 0), (300, 530944, 0), (1024, 4211200, 0), (100, 186368, 1024)):
            found = wide("geev", 0, 1, n(rows), 0, None, n(rows), 4, None, 0, None, n(1), 0, None, n(rows), 0)
            assert 0 <= found - expected <= most
        """,
        spec="h200",
    )


def test_work_areas_of_fourier_transforms_are_those_of_a_gpu(core: Path) -> None:
    """Measured on an H200 with cuFFT 12.0."""
    run(
        core,
        """
        REAL, COMPLEX, REAL64, COMPLEX64 = 0, 4, 1, 5
        p, n = new("cufftCreate").value or 0, c_longlong
        def area(length, batch, taken, given, execution):
            size = c_size_t()
            lengths = (c_longlong * 1)(length)
            ok(f.cufftXtMakePlanMany(c_int(p), 1, lengths, None, n(1), n(length), taken, None, n(1), n(length), given, n(batch), byref(size), execution))
            return size.value
        assert area(1024, 1000, COMPLEX, COMPLEX, COMPLEX) == 0
        assert area(8192, 6, REAL, COMPLEX, COMPLEX) == 0
        assert area(3000, 64, REAL, COMPLEX, COMPLEX) == 768000
        assert area(118, 1000, COMPLEX64, REAL64, COMPLEX64) == 944000
        assert area(10007, 64, COMPLEX, COMPLEX, COMPLEX) == 20736000
        assert area(1021, 128, REAL64, COMPLEX64, COMPLEX64) == 2091008
        for found, expected in (
            (area(65536, 3, REAL, COMPLEX, COMPLEX), 786456),
            (area(2046, 64, COMPLEX64, REAL64, COMPLEX64), 1048576),
            (area(20012, 64, COMPLEX, REAL, COMPLEX), 25861120),
            (area(50304, 33, REAL, COMPLEX, COMPLEX), 33372672),
            (area(1021, 3, REAL, COMPLEX, COMPLEX), 32720),
        ):
            assert 0 <= expected / found - 1 < 0.002
        """,
        spec="h200",
    )


def test_the_log_of_a_recording_has_operators_that_make_no_calls_and_the_threads_of_a_fork(
    core: Path,
) -> None:
    run(
        core,
        """
        import struct, threading
        lib.gpn_log_entry_size.restype = c_size_t
        SIZE = lib.gpn_log_entry_size()
        def logged():
            out = create_string_buffer(SIZE * 16)
            lib.gpn_work_take.restype = c_size_t
            rows = range(lib.gpn_work_take(out, c_size_t(16)))
            # Kind and thread, and at the end the operator.
            return [(*struct.unpack_from("II", out, i * SIZE + 48),
                     struct.unpack_from("I", out, (i + 1) * SIZE - 8)[0]) for i in rows]
        OPERATOR = 25
        HOST_ONLY = (1 << 32) - 1
        lib.gpn_work_begin.restype = ctypes.c_uint32
        lib.gpn_work_note(HOST_ONLY)
        lib.gpn_work_start(c_size_t(100))
        me = threading.get_native_id()
        assert lib.gpn_work_begin(7) == 0
        lib.gpn_work_note(HOST_ONLY)
        assert lib.gpn_work_begin(8) == 7  # the operator that runs is still the same
        lib.gpn_work_end(7)
        assert lib.gpn_work_begin(HOST_ONLY) == 7
        assert lib.gpn_work_begin(9) == HOST_ONLY
        assert logged() == [(OPERATOR, me, n) for n in (7, HOST_ONLY, 8, HOST_ONLY, 9)]
        child = os.fork()
        if not child:
            lib.gpn_work_note(1)
            lib.gpn_work_start(c_size_t(100))
            lib.gpn_work_note(2)
            right = logged() == [(OPERATOR, threading.get_native_id(), 2)]
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
    )
