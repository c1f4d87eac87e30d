"""Simulated GPUs in a process: its settings, the libraries loaded, and what they count."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from gpuprobe.catalogue.gpu_model import GpuModel
from gpuprobe.errors import EnvironmentUnavailable, TooLate
from gpuprobe.model.io.trust import private_folder
from gpuprobe.model.values import Unavailable
from gpuprobe.native import autograd_threads
from gpuprobe.native.answers import MODELS
from gpuprobe.native.libraries import (
    PRELOAD,
    Libraries,
    TorchBuild,
    cache_folder,
    check_supported,
    libraries_for,
    libraries_in,
    torch_build,
)
from gpuprobe.patching import patch
from gpuprobe.torch_support.eager import defer_compiler
from gpuprobe.torch_support.process_gpus import NAME, add_startup, visible
from gpuprobe.torch_support.process_gpus import NATIVE_SETTINGS as SETTINGS

VALUES: Final = "GPUPROBE_VALUES"
"""The environment variable with what is computed in processes that inherit the engine, as JSON: see
`gpuprobe.native.session.NativeSession`."""
_BLOCKS: Final = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24}
"""Resident blocks of a multiprocessor where it is not 32. Source: CUDA C++ Programming Guide,
technical specifications per compute capability.
"""


_ENDLESS: Final = "endless=1"


def settings_text(
    gpus: Sequence[GpuModel],
    build: TorchBuild,
    *,
    endless: bool = False,
    graph: tuple[int, int] = (0, 0),
) -> str:
    """The settings of a process whose machine has ``gpus``, as `gpuprobe/native/runtime/device.c`
    reads them. ``endless``: GPUs never run out of memory, whatever size they report. ``graph``:
    bytes of the driver's own for each executable CUDA graph, and for each of its nodes.
    """
    parts = [f"cuda={build.cuda_number}", *([_ENDLESS] if endless else [])]
    if any(graph):
        parts += [f"graph_bytes={graph[0]}", f"graph_node_bytes={graph[1]}"]
    for name, places in (("cudnn", (10000, 100, 1)), ("nccl", (10000, 100, 1))):
        version = build.libraries.get(name, "")
        if version:
            numbers = [int(part) for part in version.split(".")[:3]]
            parts.append(f"{name}={sum(a * b for a, b in zip(numbers, places, strict=False))}")
    for gpu in gpus:
        values = {
            "device": gpu.title.replace(";", " "),
            "total_memory": gpu.total_memory,
            "context_bytes": gpu.context_bytes,
            "major": gpu.major,
            "minor": gpu.minor,
            "multiprocessors": gpu.multi_processor_count,
            "threads_per_multiprocessor": gpu.max_threads_per_multi_processor,
            "blocks_per_multiprocessor": _BLOCKS.get(gpu.capability, 32),
            "registers_per_multiprocessor": gpu.regs_per_multiprocessor,
            "threads_per_block": gpu.max_threads_per_block,
            "warp_size": gpu.warp_size,
            "shared_per_multiprocessor": gpu.shared_memory_per_multiprocessor,
            "shared_per_block": gpu.shared_memory_per_block,
            "shared_per_block_optin": gpu.shared_memory_per_block_optin,
            "l2_bytes": gpu.L2_cache_size,
            "clock_khz": gpu.clock_rate,
            "memory_clock_khz": gpu.memory_clock_rate,
            "bus_bits": gpu.memory_bus_width,
        }
        parts += [
            f"{key}={value}" for key, value in values.items() if not isinstance(value, Unavailable)
        ]
    return ";".join(parts)


def add_to_environment(
    environment: MutableMapping[str, str], libraries: Libraries, settings: str, build: TorchBuild
) -> None:
    """Make programs that are started with ``environment`` run on the simulated GPU.

    What ``LD_PRELOAD`` and ``LD_LIBRARY_PATH`` name already stays in place.
    """
    environment[SETTINGS] = settings
    add_startup(environment)
    preload = str(libraries.preload)
    before = environment.get("LD_PRELOAD", "")
    if preload not in before.replace(":", " ").split():
        environment["LD_PRELOAD"] = f"{preload} {before}".strip()
    # Triton links its launchers to libcuda, which it would search for on the machine.
    environment["TRITON_LIBCUDA_PATH"] = str(libraries.folder)
    environment.update(compile_caches(cache_folder().parent / "compiled"))
    if build.folder.parent.is_relative_to(cache_folder()):  # of `gpuprobe cuda-torch install`
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        if str(build.folder.parent) not in paths:
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(build.folder.parent), *filter(None, paths)]
            )


def compile_caches(folder: Path) -> dict[str, str]:
    """Variables that keep what torch compiles in ``folder``. In the caches of real programs,
    choices between kernels would stay that were made by times on a GPU that computes nothing.

    Raises EnvironmentUnavailable if others can change one of them: what is in it is executed.
    """
    try:
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(private_folder(folder / "inductor")),
            "TRITON_CACHE_DIR": str(private_folder(folder / "triton")),
        }
    except OSError as error:
        raise EnvironmentUnavailable(
            f"{folder} cannot be used for what torch compiles: {error.strerror or error}",
            hint="set XDG_CACHE_HOME to a folder of your own",
        ) from None


class LogKind(IntEnum):
    """Calls that the runtime logs: ``enum log_kind`` in `gpuprobe/native/runtime/native.h`."""

    LAUNCH = 0
    LIBRARY = 1
    MALLOC = 2
    FREE = 3
    HOST_ALLOC = 4
    HOST_FREE = 5
    MEMCPY = 6
    MEMSET = 7
    EVENT_RECORD = 8
    EVENT_WAIT = 9
    EVENT_SYNC = 10
    EVENT_QUERY = 11
    STREAM_CREATE = 12
    STREAM_DESTROY = 13
    STREAM_SYNC = 14
    STREAM_QUERY = 15
    DEVICE_SYNC = 16
    HOST_FUNCTION = 17
    CAPTURE_BEGIN = 18
    CAPTURE_END = 19
    GRAPH_LAUNCH = 20
    COLLECTIVE = 21
    UNANSWERED = 22
    MAP = 23
    UNMAP = 24
    OPERATOR = 25
    GRAPH_NODE = 26


class _Entry(ctypes.Structure):
    _fields_ = (
        ("time_ns", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("kind", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("work", ctypes.c_uint32),
        ("captured", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class NativeCall:
    """One logged call. ``stream`` numbers streams from 2 on in the order of their creation; 0 is
    the default stream, 1 the per-thread one. ``a`` and ``b``: target and source of a copy, or the
    number of an event and the stream that it was recorded on, or the flags that a stream was
    created with. ``name``: a kernel's mangled name, or a library function's.
    """

    kind: LogKind
    device: int
    stream: int
    a: int
    b: int
    bytes: int
    name: str
    thread: int
    time_ns: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int


class Runtime:
    """The runtime of this process."""

    def __init__(self, core: ctypes.CDLL, libraries: Libraries, settings: str) -> None:
        self.libraries = libraries
        self.settings = settings
        self._core = core
        self.collectives = ExchangedCollectives(core)
        core.gpn_settings_read.restype = ctypes.c_bool
        core.gpn_set_settings.restype = ctypes.c_bool
        core.gpn_set_settings.argtypes = (ctypes.c_char_p,)
        core.gpn_used.restype = ctypes.c_ulonglong
        core.gpn_models_used.restype = ctypes.c_uint
        core.gpn_models_forget.restype = None
        core.gpn_unanswered_count.restype = ctypes.c_size_t
        core.gpn_unanswered_name.restype = ctypes.c_char_p
        core.gpn_unanswered_name.argtypes = (ctypes.c_size_t,)
        core.gpn_uncomputed_note.argtypes = (ctypes.c_bool,)
        core.gpn_uncomputed_count.restype = ctypes.c_size_t
        core.gpn_uncomputed_name.restype = ctypes.c_char_p
        core.gpn_uncomputed_name.argtypes = (ctypes.c_size_t,)
        core.gpn_log_take.restype = ctypes.c_size_t
        core.gpn_log_take.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        core.gpn_log_count.restype = ctypes.c_size_t
        core.gpn_log_start.argtypes = (ctypes.c_size_t,)
        core.gpn_log_entry_size.restype = ctypes.c_size_t
        core.gpn_log_dropped.restype = ctypes.c_ulonglong
        core.gpn_ncclWriteUpTo.argtypes = (ctypes.c_size_t,)
        core.gpn_set_endless.argtypes = (ctypes.c_bool,)
        core.gpn_set_hidden.argtypes = (ctypes.c_bool,)
        core.gpn_driver_memory.argtypes = (ctypes.c_int, ctypes.c_longlong)
        core.gpn_graphs_made.restype = ctypes.c_ulonglong
        core.gpn_graph_nodes_made.restype = ctypes.c_ulonglong
        if core.gpn_log_entry_size() != ctypes.sizeof(_Entry):
            raise EnvironmentUnavailable("the simulated GPU's library is of another gpuprobe")

    def settings_read(self) -> bool:
        """Whether torch has queried the devices."""
        return bool(self._core.gpn_settings_read())

    def change(self, settings: str) -> bool:
        """Take other settings. False if torch has used the GPUs, or counted them and there would be
        another number, unless all that changes is whether GPUs run out of memory.
        """
        if not self._core.gpn_set_settings(settings.encode()):
            parts = settings.split(";")
            if set(parts) ^ set(self.settings.split(";")) != {_ENDLESS}:
                return False
            self._core.gpn_set_endless(_ENDLESS in parts)
        self.settings = settings
        return True

    def used(self, index: int) -> int:
        """Bytes that this process holds on a device of the machine, its context included."""
        return int(self._core.gpn_used(index))

    def hold(self, ordinal: int, more: int) -> None:
        """Count ``more`` bytes (or less: a negative number) for the driver and the libraries on a
        device, which the process numbers ``ordinal``. Beyond its capacity, it has no free memory.
        """
        self._core.gpn_driver_memory(ordinal, more)

    def hide(self, on: bool) -> None:
        """Refuse kernels from now on, with CUDA's error for a machine without a GPU; or no more.
        What memory holds can still be copied.
        """
        self._core.gpn_set_hidden(on)

    def graphs(self) -> tuple[int, int]:
        """CUDA graphs that were instantiated since the process began, and their nodes."""
        return int(self._core.gpn_graphs_made()), int(self._core.gpn_graph_nodes_made())

    def refused(self) -> tuple[str, ...]:
        """The functions that were called and are not answered, each once."""
        count = self._core.gpn_unanswered_count()
        return tuple(self._core.gpn_unanswered_name(i).decode() for i in range(count))

    def models(self) -> tuple[str, ...]:
        """What is assumed behind the answers of `MODELS` that the program got."""
        used = self._core.gpn_models_used()
        return tuple(text for bit, (_, text) in enumerate(MODELS) if used >> bit & 1)

    def forget_models(self) -> None:
        """Begin again to note the models that are used."""
        self._core.gpn_models_forget()

    def visible(self) -> tuple[int, ...]:
        """The indices, in the machine, of the devices that CUDA numbers from 0. The first call
        settles which these are, as a program's first use of CUDA does.
        """
        return tuple(map(self._core.gpn_machine_index, range(self._core.gpn_visible_devices())))

    def note_uncomputed(self, on: bool) -> None:
        """Note the kernels that are launched outside of operators whose values are computed, from
        now on, and forget earlier ones; or note no more.
        """
        self._core.gpn_uncomputed_note(on)

    def uncomputed(self) -> tuple[str, ...]:
        """The mangled names of the kernels that were noted, each once; at most 256."""
        count = self._core.gpn_uncomputed_count()
        return tuple(self._core.gpn_uncomputed_name(i).decode() for i in range(count))

    def values_started(self) -> None:
        """Values are computed in this process. Without this, one that should compute them reports
        that it does not.
        """
        self._core.gpn_values_started()

    def write_collectives(self, most: int) -> None:
        """Collectives write their results into buffers of up to ``most`` bytes: 1 MiB at first."""
        self._core.gpn_ncclWriteUpTo(most)

    def start_log(self, most: int = 1_000_000) -> None:
        """Log calls from now on; at most ``most`` are kept until they are taken."""
        self._core.gpn_log_start(most)

    def stop_log(self) -> None:
        """Log no more calls."""
        self._core.gpn_log_stop()

    def logged(self) -> int:
        """Calls that were kept since the log was started, and not taken."""
        return int(self._core.gpn_log_count())

    def dropped(self) -> int:
        """Calls that were not kept since the log was started."""
        return int(self._core.gpn_log_dropped())

    def take_log(self) -> Iterator[NativeCall]:
        """The logged calls, oldest first, which are then forgotten."""
        buffer = (_Entry * 4096)()
        while True:
            count = self._core.gpn_log_take(ctypes.byref(buffer), len(buffer))
            for entry in buffer[:count]:
                yield NativeCall(
                    LogKind(entry.kind),
                    entry.device,
                    entry.stream,
                    entry.a,
                    entry.b,
                    entry.bytes,
                    (entry.name or b"").decode(errors="replace"),
                    entry.thread,
                    entry.time_ns,
                    (entry.grid[0], entry.grid[1], entry.grid[2]),
                    (entry.block[0], entry.block[1], entry.block[2]),
                    entry.shared,
                )
            if count < len(buffer):
                return


_PLACE: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


class ExchangedCollectives:
    """The collectives of this process with the other processes of its job."""

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        core.gpn_collectives_issued.argtypes = (ctypes.c_void_p,)
        core.gpn_collectives_known.restype = ctypes.c_bool
        core.gpn_collectives_known.argtypes = (ctypes.c_ulonglong, ctypes.c_ulonglong)
        core.gpn_collectives_unknown.restype = ctypes.c_bool
        core.gpn_collectives_unknown.argtypes = (ctypes.c_bool,)
        core.gpn_collectives_play.argtypes = (ctypes.c_void_p,)
        core.gpn_collectives_captured.argtypes = (ctypes.c_void_p, ctypes.c_int)
        core.gpn_collectives_place.argtypes = (_PLACE,)
        core.gpn_ncclAlone.argtypes = (ctypes.c_bool,)
        self._waiting = ctypes.c_int.in_dll(core, "gpn_collectives_pending")
        self._place = _PLACE()

    def alone(self, on: bool) -> None:
        """The other ranks of this process's job are no processes: they are assumed to hold what it
        holds.
        """
        self._core.gpn_ncclAlone(on)

    def name_places(self, place: Callable[[], tuple[str, int]]) -> None:
        """Name the calls of this process by ``place``: where its program is, and its rank in the
        whole job, -1 outside one.
        """

        def write(buffer: int, size: int) -> int:
            text, rank = place()
            data = text.encode(errors="replace")[: size - 1] + b"\0"
            ctypes.memmove(buffer, data, len(data))
            return rank

        self._place = _PLACE(write)
        self._core.gpn_collectives_place(self._place)

    @property
    def waiting(self) -> bool:
        """Whether results were not taken yet."""
        return bool(self._waiting.value)

    def settle(self) -> None:
        """Take all results that were not taken yet. An error is raised at the next use of CUDA."""
        self._core.gpn_collectives_settle()

    def issued(self) -> tuple[int, int]:
        """The numbers of the first and the last collective that this thread has called since it
        called this function before; 0 if there were none.
        """
        found = (ctypes.c_ulonglong * 2)()
        self._core.gpn_collectives_issued(ctypes.byref(found))
        return found[0], found[1]

    def send_unknown(self, unknown: bool) -> bool:
        """Whether what this thread sends from now on has no values; returns what it was."""
        return bool(self._core.gpn_collectives_unknown(unknown))

    def known(self, first: int, last: int) -> bool:
        """Whether the results of the collectives with these numbers have values. Waits for them."""
        return bool(self._core.gpn_collectives_known(first, last))

    def captured(self) -> list[int]:
        """The collectives that this thread has captured in a graph since the last call. The caller
        plays them.
        """
        found = (ctypes.c_void_p * 256)()
        count = self._core.gpn_collectives_captured(ctypes.byref(found), len(found))
        return [int(found[i] or 0) for i in range(count)]

    def play(self, captured: int) -> None:
        """Run one of these, as a replay of its graph does."""
        self._core.gpn_collectives_play(captured)


_loaded: Runtime | None = None
_preloaded: Runtime | None = None


def loaded() -> Runtime | None:
    """The runtime of this process, or None. A child of a process that has it finds it too."""
    global _loaded
    settings = os.environ.get(SETTINGS)
    if _loaded is None and settings is not None:
        # Those that this process has: its environment could have it find others.
        named = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        preload = next((Path(name) for name in named if Path(name).name == PRELOAD), None)
        build = torch_build()
        if preload is not None and build is not None and build.cuda:
            _loaded = _open(libraries_in(preload.parent), settings)
    return _loaded


def when_used(callback: Callable[[], None]) -> None:
    """Call ``callback``, once, when this process first uses a GPU. torch is imported."""
    import torch

    cuda: Any = torch.cuda
    original = cuda._lazy_init
    pending = [callback]

    @functools.wraps(original)
    def lazy_init() -> None:
        if pending and not cuda.is_initialized() and not cuda._is_in_bad_fork():
            pending.pop()()
        original()

    patch(cuda, "_lazy_init", lazy_init)


def build_to_run() -> TorchBuild | None:
    """The torch that programs of this process run on a simulated GPU: its own, or the one that
    ``gpuprobe cuda-torch install`` installed if its own has no CUDA; None without torch.
    """
    build = torch_build()
    if build is not None and not build.cuda and "torch" not in sys.modules:
        from gpuprobe.native.install import activate

        return activate() or build
    return build


def load(gpus: Sequence[GpuModel], *, endless: bool = False) -> Runtime:
    """Load the simulated GPU into this process, before torch, and into the programs it starts.
    ``endless``: its GPUs never run out of memory.

    Raises TooLate if torch is imported already, or if this process has other GPUs;
    EnvironmentUnavailable where torch or the machine does not allow it.
    """
    global _loaded
    build = build_to_run()
    if build is None:
        raise EnvironmentUnavailable("torch is not installed", hint="pip install torch")
    check_supported(build)
    settings = settings_text(gpus, build, endless=endless)
    runtime = loaded()
    if runtime is not None:
        if runtime.settings == settings:
            return runtime
        if not runtime.change(settings):
            raise TooLate(
                "this process has another simulated GPU already, which it keeps to its end: use "
                "one process for each",
            )
        os.environ[SETTINGS] = settings
        return runtime
    runtime = _preloaded or _open(_before_torch(build), settings)
    if not runtime.change(settings):
        raise TooLate("torch has queried CUDA before the simulated GPU was loaded")
    if not visible(os.environ.get(NAME), gpus):
        del os.environ[NAME]  # it is about the machine's own GPUs
    add_to_environment(os.environ, runtime.libraries, settings, build)
    defer_compiler()  # 2 s of processor time that an eager program does not need
    _loaded = runtime
    return _loaded


def preload() -> None:
    """Load the runtime's libraries into this process, before torch, without a GPU: until `load`
    adds some, torch's CUDA code finds none. A fork of this process in which CUDA was not used can
    call `load` although torch is imported.

    Raises what `load` raises.
    """
    global _preloaded
    build = build_to_run()
    if build is None:
        raise EnvironmentUnavailable("torch is not installed", hint="pip install torch")
    check_supported(build)
    if loaded() is None and _preloaded is None:
        _preloaded = _open(_before_torch(build), "")


def awaits_gpu() -> bool:
    """Whether this process has preloaded the libraries and no GPU yet: torch must not look for one
    before it is chosen.
    """
    return _preloaded is not None and not _preloaded.settings_read() and loaded() is None


def _before_torch(build: TorchBuild) -> Libraries:
    """The libraries for this build. Raises TooLate if torch is imported already."""
    libraries = libraries_for(build)
    if "torch" in sys.modules:
        raise TooLate(
            "torch was imported before the simulated GPU: call gpuprobe.virtual_gpu() or "
            "gpuprobe.estimate() before the first `import torch`, and before packages that import "
            "it",
            hint="or start the program with gpuprobe run --gpu GPU, which loads it first",
        )
    return libraries


def environment_with(gpus: Sequence[GpuModel], *, endless: bool = False) -> dict[str, str]:
    """The environment of this process with ``gpus`` added, for a program that has them from its
    start. Raises EnvironmentUnavailable where torch or the machine does not allow it.
    """
    build = torch_build()
    if build is not None and not build.cuda:
        from gpuprobe.native.install import installed, release_here

        build = installed(release_here()) or build
    if build is None:
        raise EnvironmentUnavailable("torch is not installed", hint="pip install torch")
    libraries = libraries_for(build)
    environment = dict(os.environ)
    settings = settings_text(gpus, build, endless=endless)
    add_to_environment(environment, libraries, settings, build)
    return environment


def _open(libraries: Libraries, settings: str) -> Runtime:
    core = ctypes.CDLL(str(libraries.core), mode=ctypes.RTLD_GLOBAL)
    for path in libraries.others:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    atexit.register(autograd_threads.wait_until_idle)
    atexit.register(core.gpn_collectives_end)
    return Runtime(core, libraries, settings)
