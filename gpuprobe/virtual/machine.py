"""The virtual machine: its devices, which storage lies where, and what each thread has current.

A *tag* says where a storage is supposed to lie. The storage itself is ordinary CPU memory
(``compute="real"``) or has no memory at all (``"shapes"``: a meta tensor, whose values may be
`known`). A tag is the weak reference to its storage: when the storage is gone, its block goes back
to the allocator.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpuprobe.allocator.blocks import PoolBlock
from gpuprobe.allocator.settings import in_environment, parse_conf
from gpuprobe.catalogue.gpus import GpuModel
from gpuprobe.hazards.observer import HOST, PINNED, Observer, RegisteredMemory
from gpuprobe.model.plans.assumptions import Assumptions
from gpuprobe.model.trace import AllocatorSettings
from gpuprobe.torch_support import compile_notes
from gpuprobe.torch_support.cuda_streams import NodeStreams
from gpuprobe.torch_support.process_gpus import visible
from gpuprobe.torch_support.tensors import is_meta, is_sparse, parts, storage_key
from gpuprobe.torch_support.version import installed
from gpuprobe.virtual.accuracy import CalledOperators
from gpuprobe.virtual.device.host_statistics import HostStatistics
from gpuprobe.virtual.device.virtual_device import VirtualDevice
from gpuprobe.virtual.device.visible import Use
from gpuprobe.virtual.generators import Generators

__all__ = ["HOST", "PINNED", "Local", "Machine", "Tag", "is_meta", "parts"]

_MIB: Final = 2**20
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_NO_NODE: Final = object()
"""The node at work before the first one of a backward pass."""


@dataclass(slots=True)
class ValueLimits:
    """The most bytes of one storage whose values are computed. Floating point weighs, and seldom
    decides; whole numbers and masks decide, and are small.
    """

    floating: float = _MIB
    others: float = 256 * _MIB

    def allow(self, dtype: torch.dtype, nbytes: int) -> bool:
        if dtype.is_floating_point or dtype.is_complex:
            return nbytes <= self.floating
        return nbytes <= self.others


class Tag(weakref.ref[Any]):
    """Where a live storage lies. ``block`` is None for host memory and empty storages.

    ``zeroed`` numbers the node of the backward pass that made it as zeros, None for all others.

    ``held`` is the storage that this one stands for and keeps alive: see `compiled.graph`.

    ``registered`` is host memory that the program pinned itself, where the storage lies in it;
    ``offset`` the storage's first byte in there.

    ``values`` is the host memory with the values of a storage without memory, None where they are
    unknown; ``lost`` says of a storage with memory that its contents are unknown (`known`).
    ``window`` is the last tensor over ``values`` that `known.kept_window` has made.
    """

    __slots__ = (
        "block",
        "held",
        "key",
        "lost",
        "nbytes",
        "offset",
        "place",
        "registered",
        "stream",
        "values",
        "window",
        "zeroed",
    )

    key: int
    place: int
    nbytes: int
    stream: int
    block: PoolBlock | None
    registered: RegisteredMemory | None
    offset: int
    held: Any
    zeroed: int | None
    values: Any
    lost: bool
    window: Any


class Local(threading.local):
    """What one thread has current."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, int] = {}
        # The streams that were current where backward was called, while it runs; the node at
        # work, and the streams that it began with.
        self.base: dict[int, int] | None = None
        self.node: Any = None
        self.node_streams: dict[int, int] = {}
        self.entered_streams: list[tuple[int, int]] = []  # device and stream before each
        self.new_place: int | None = None  # the place of storages that the call at hand makes
        self.entered = False  # the keys and the dispatch mode are on in this thread
        self.inside = False  # a kernel is at work: tensors answer what torch made them
        self.reason = ""  # why the copy at hand is made, where torch itself makes it
        self.standing_in = False  # what runs works on tensors without values
        self.paused = False  # what runs is not charged to any device
        self.reading = ""  # how the program reads a value: see `unknown`
        self.unknown = False  # what it read is unknown
        self.explicit = False  # the program itself named the device of the copy at hand
        # Memory that the running operator allocated for its results: device, bytes, stream, block.
        self.for_results: list[tuple[VirtualDevice, int, int, PoolBlock]] = []
        # Host storages that C++ code made within the Python instruction at hand.
        self.fresh: set[int] = set()
        self.instruction: tuple[int, int] | None = None


class Machine:
    """All of a virtual machine's state.

    ``compute`` is ``"real"`` (values on the CPU) or ``"shapes"`` (those of small tensors only, as
    `limits` say). ``observer`` is notified where hazards are looked for. ``torch`` is the (major,
    minor) of the torch whose CUDA kernels are simulated, by default of the installed one.
    """

    def __init__(
        self,
        models: Sequence[GpuModel],
        compute: str,
        settings: AllocatorSettings,
        *,
        context: int | None = None,
        order: str = "driver",
        endless: bool = False,
        torch_version: tuple[int, int] | None = None,
    ) -> None:
        self.shapes = compute == "shapes"
        self.torch = torch_version or installed()
        self.endless = endless
        # What processes need that an estimated program starts, by `physical`: planning.processes.
        self.others: dict[int, Any] = {}
        self.limits = ValueLimits()
        self.devices = [
            VirtualDevice(
                index,
                model,
                settings,
                context=model.context_bytes if context is None else context,
                order=order,
                endless=endless,
            )
            for index, model in enumerate(models)
        ]
        self.settings = settings
        self.conf_is_given = True  # else it is that of the environment
        self._all = list(self.devices)
        self.count = len(models)  # of the devices that the program has, which come first
        self.use = Use()
        self.use.select = self.select
        self.use.begin = self._read_environment
        self.local = Local()
        self.tags: dict[int, Tag] = {}
        self.untagged: dict[int, Tag] = {}  # values of storages that have no place yet
        self.registered: dict[int, RegisteredMemory] = {}  # by address: see cuda_api.runtime
        self.pinned = HostStatistics()
        self.generators = Generators(len(models))
        self.cuda_numbers = False  # random numbers are those of CUDA's kernels: `kernels.philox`
        self.observer: Observer | None = None
        self.meter: Callable[..., None] | None = None  # is given each operator of a device
        self.called = CalledOperators()  # that are not known to allocate what CUDA's do
        self.capture: Any = None  # the graph being captured: see cuda_api.graphs
        self.sync_debug_mode = 0
        self.many_streams = False
        self.created_streams: set[int] = set()  # handles that ``cudaStreamCreate`` gave out
        self.blocking_streams: set[int] = set()  # the numbers of those that torch was given
        self.nodes = NodeStreams()
        self.closed = False
        self._pid = os.getpid()
        self.unknown_as_nan = False
        self.given_nan = ""  # where the program was first given NaN for a value
        self.bounded = ""  # where a size was first taken to be the largest possible
        self.assumptions = Assumptions()  # what the user said of unknown values
        self.verdicts: dict[Any, Any] = {}  # of branches on unknown conditions: see `unknown`
        self.zeros: dict[int, Any] = {}  # memory in place of storages: see `saving`
        self.ranks = 1  # of a pretended cluster
        self.estimated = False  # what is run is estimated, and nothing else wanted of it
        self.waits = False  # what is estimated waits for a process of its own that was stopped
        self.rank = 0  # the one that this process pretends to be
        self.traffic: Any = None  # what is sent, as `torch_support.jobs.traffic.Traffic`
        self.in_flight: Any = None  # what is sent, as `virtual.distributed.in_flight.InFlight`
        self.unwaited: dict[int, Any] = {}  # of that, what nobody has waited for
        self.reductions: Any = None  # of a pretended cluster: `torch_support.jobs.reductions`
        self.peers: Any = None  # the others, as `virtual.distributed.pretended.PeerRanks`
        self.assumed: dict[str, int] = {}
        self.compiled: dict[str, None] = {}  # names of what torch.compile was asked to compile
        self._compiled_before = compile_notes.counts()
        self.dispatch: Any = None  # the dispatch mode of a session
        self.tracing: Any = None  # while compilers may trace: see compiled.tracing

    def select(self, setting: str | None) -> None:
        """Have the GPUs that a setting of ``CUDA_VISIBLE_DEVICES`` selects; none is used yet. The
        others stay behind them, since a recorder may ask for them that has begun already.
        """
        chosen = visible(setting, self._all)
        self.count = len(chosen)
        self.devices[:] = [*chosen, *(one for one in self._all if one not in chosen)]
        for index, device in enumerate(self.devices):
            device.number(index)

    def configure(self, settings: AllocatorSettings) -> None:
        """Have all allocators go by these settings from now on."""
        self.settings = settings
        for device in self._all:
            device.configure(settings)

    def _read_environment(self) -> None:
        """What the program has set for the allocator counts if it has done so before it first uses
        a GPU, as for torch: ``CUDAAllocatorConfig::instance`` in
        ``c10/cuda/CUDAAllocatorConfig.h``. Raises ConfigError for settings that torch refuses.
        """
        conf = self.settings.conf if self.conf_is_given else in_environment().strip()
        if conf != self.settings.conf:
            self.configure(parse_conf(conf))

    def physical(self, device: VirtualDevice) -> int:
        """The number of a device among all of the machine, whatever the process may see."""
        return self._all.index(device)

    def assume(self, what: str) -> None:
        """Count something that was taken for granted; reports say so."""
        self.assumed[what] = self.assumed.get(what, 0) + 1

    @property
    def unwatched(self) -> bool:
        """Whether nobody is told of operators that allocate nothing."""
        return (
            self.observer is None
            and self.capture is None
            and self.meter is None
            and not self.many_streams
            and not self.sync_debug_mode
        )

    @property
    def compiler_notes(self) -> dict[str, int]:
        """What torch's compiler did since this machine was made: graphs, breaks, recompilations."""
        return compile_notes.counts_since(self._compiled_before)

    # -- storages

    def tag_of(self, tensor: Any) -> Tag | None:
        """The tag of a tensor's storage, None where it has none. A tensor without a storage
        has the tag of its first part.
        """
        try:
            if type(tensor) in _PLAIN:
                storage = tensor.untyped_storage()
            else:
                with torch._C.DisableTorchFunctionSubclass():  # this is no call of the program's
                    storage = tensor.untyped_storage()
            tag = self.tags.get(storage._cdata)
            return self._registered(storage) if tag is None and self.registered else tag
        except (NotImplementedError, RuntimeError):  # a subclass or layout without storage
            if is_sparse(tensor) and self.tracing is not None and self.tracing.under_way():
                return None  # the compiler's
            found = parts(tensor)
            return self.tag_of(found[0]) if found else None

    def place_of(self, tensor: Any) -> int:
        """Device index, `HOST` or `PINNED`. A tensor without storage is the host's."""
        tag = self.tag_of(tensor)
        if tag is None:
            return HOST if self.tracing is None else int(self.tracing.place_of(tensor))
        return tag.place

    def _registered(self, storage: Any) -> Tag | None:
        """The tag of a host storage that lies in memory which the program pinned itself."""
        for memory in self.registered.values():
            if memory.overlaps(storage.data_ptr(), 1):
                return self.track(storage, PINNED, registered=memory)
        return None

    def unregister(self, memory: RegisteredMemory) -> None:
        """What lies there is ordinary host memory again."""
        del self.registered[memory.address]
        for tag in list(self.tags.values()):
            if tag.registered is memory:
                del self.tags[tag.key]
        if self.observer is not None:
            self.observer.unregistered(memory)

    @property
    def valueless(self) -> bool:
        """Whether nothing is computed by the operators at hand."""
        return (
            self.shapes
            or self.local.standing_in
            or (self.tracing is not None and self.tracing.under_way())
        )

    def known_integers(self, tensor: Any) -> list[int] | None:
        """The values of an integer tensor, in order; None where it has none."""
        if is_meta(tensor):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            flat = torch._C.TensorBase.flatten(tensor)
            return list(torch._C.TensorBase.tolist(flat))

    def track(
        self,
        storage: Any,
        place: int,
        *,
        instead: Tag | None = None,
        charged: bool = True,
        registered: RegisteredMemory | None = None,
    ) -> Tag:
        """Tag a storage, and take a block for it where it lies on a device.

        ``instead``: the storage takes over this one's block, if it has the same size. Not
        ``charged``: it has a size but no memory (zeros that are only known to be so).
        ``registered``: the memory that it lies in, where the program pinned that itself. Raises
        torch.OutOfMemoryError where that device is full.
        """
        nbytes = storage.nbytes()
        block = None
        stream = 0
        if place >= 0:
            self.use.use()
            stream = self.stream(place)
        if place >= 0 and nbytes and charged:
            if instead is not None and instead.nbytes == nbytes and instead.place == place:
                block, instead.block = instead.block, None
            if block is None:
                block = self._for_result(place, nbytes, stream)
        tag = Tag(storage, self._on_freed)
        tag.key = storage._cdata
        tag.place = place
        tag.nbytes = nbytes
        tag.stream = stream
        tag.block = block
        tag.registered = registered
        tag.offset = 0 if registered is None else storage.data_ptr() - registered.address
        tag.held = None
        tag.zeroed = None
        without_place = self.untagged.pop(tag.key, None)
        tag.values = None if without_place is None else without_place.values
        tag.lost = False
        tag.window = None
        self.tags[tag.key] = tag
        if place == PINNED and registered is None:
            self.pinned.pinned(nbytes)
        if self.observer is not None:
            self.observer.allocated(tag)
        return tag

    def _for_result(self, place: int, nbytes: int, stream: int) -> PoolBlock:
        """The block that the running operator allocated for such a result, or a new one."""
        device, prepared = self.devices[place], self.local.for_results
        for at, (of, size, of_stream, block) in enumerate(prepared):
            if of is device and size == nbytes and of_stream == stream:
                del prepared[at]
                return block
        return device.malloc(nbytes, stream)

    def keeper_of(self, tensor: Any) -> Tag | None:
        """The tag that keeps a tensor's values: its own, or one that only does that."""
        tag = self.tag_of(tensor)
        if tag is None and self.untagged and is_meta(tensor):
            return self.untagged.get(storage_key(tensor))
        return tag

    def keep_values(self, storage: Any, values: Any) -> None:
        """Keep the values of a storage that has no place yet: `track` takes them over."""
        tag = Tag(storage, self._forgotten)
        tag.key, tag.values, tag.nbytes = storage._cdata, values, storage.nbytes()
        tag.window = None
        self.untagged[tag.key] = tag

    def moved(self, tensor: Any) -> None:
        """A tensor that has no place yet has another storage, or one of another size."""
        tag = self.untagged.get(storage_key(tensor))
        if tag is not None and tag.nbytes != tensor.untyped_storage().nbytes():
            del self.untagged[tag.key]

    def _forgotten(self, tag: Tag) -> None:
        if self.untagged.get(tag.key) is tag:
            del self.untagged[tag.key]

    def in_child(self) -> bool:
        """Whether this is a process that was forked off, and uses no GPU: a worker that makes
        samples, say. There, host tensors are whole, since they are sent on as bytes.
        """
        return os.getpid() != self._pid and not self.use.here

    def made_on_host(self, key: int, instruction: tuple[int, int]) -> None:
        """A factory made a host storage while Python was at ``instruction`` (frame id, offset).

        Most are the program's own. But C++ code that works for a device's tensor also asks for
        "memory like this tensor's", which is host memory here: `fresh` tells them apart, since
        that is used within the same instruction.
        """
        local = self.local
        if local.instruction != instruction:
            local.instruction = instruction
            local.fresh.clear()
        local.fresh.add(key)

    def fresh(self, key: int, instruction: tuple[int, int]) -> bool:
        """Whether a host storage was made within the instruction at hand."""
        return self.local.instruction == instruction and key in self.local.fresh

    def resized(self, tag: Tag, storage: Any) -> None:
        """A storage changed its size: another block, allocated before the old one is freed
        (``resize_bytes_cuda`` in ``aten/src/ATen/native/cuda/Resize.cpp``).
        """
        old, nbytes = tag.block, storage.nbytes()
        tag.nbytes = nbytes
        if tag.values is not None:
            tag.values.resize_(nbytes)
        if tag.place < 0:
            return
        device = self.devices[tag.place]
        tag.stream = self.stream(tag.place)
        tag.block = device.malloc(nbytes, tag.stream) if nbytes else None
        if self.observer is not None:
            self.observer.resized(tag, old)
        if old is not None:
            device.free(old)

    def _on_freed(self, tag: Tag) -> None:
        if self.tags.get(tag.key) is tag:
            del self.tags[tag.key]
        if self.zeros:
            self.zeros.pop(tag.key, None)
        if self.closed:
            return
        if tag.place == PINNED and tag.registered is None:
            self.pinned.freed(tag.nbytes)
        if self.observer is not None and tag.registered is None:
            self.observer.freed(tag)
        if tag.place >= 0:
            device = self.devices[tag.place]
            if tag.block is not None:
                device.free(tag.block)

    # -- streams

    def stream(self, index: int) -> int:
        """The current stream of a device, that work of this thread goes to. Within the backward
        pass that is the stream of the node at work, unless its code chose another.
        """
        if not self.many_streams:
            return 0
        local = self.local
        if local.base is not None:
            self.enter_node()
        return local.streams.get(index, 0)

    def queued(self, index: int) -> None:
        """Work was launched on a device: its stream is busy."""
        if self.many_streams:
            self.devices[index].busy_streams.add(self.stream(index))
        elif 0 not in self.devices[index].busy_streams:
            self.devices[index].busy_streams.add(0)

    def enter_node(self) -> None:
        """Within the backward pass: make the streams of the node at work current, as the engine
        does before it calls the node and its hooks (``evaluate_function`` in ``engine.cpp``).
        """
        local = self.local
        if local.base is None:
            return
        node = torch._C._current_autograd_node()
        if node is local.node:
            return
        local.node = node
        found = None if node is None else self.nodes.of(node)
        self._make_current(dict(local.base if found is None else found))
        local.node_streams = dict(local.streams)
        if self.observer is not None:
            self.observer.node_begins(node)

    def blocking(self, index: int, number: int) -> bool:
        """Whether a stream and the legacy default stream wait for each other."""
        return number in self.blocking_streams

    def stream_chosen(self, index: int) -> bool:
        """Whether code within the backward pass (a hook, a function of the program's own) has
        made another stream current than it was called on.
        """
        local = self.local
        return local.base is not None and (
            local.streams.get(index, 0) != local.node_streams.get(index, 0)
        )

    def switch(self, index: int, stream: int) -> None:
        """Make ``stream`` this thread's current one on a device."""
        if stream:
            self.many_streams = True
        self.enter_node()
        streams = self.local.streams
        if streams.get(index, 0) != stream:
            streams[index] = stream
            self.nodes.switched(streams, _disable_current_modes)

    def _make_current(self, streams: dict[int, int]) -> None:
        """Make these streams this thread's current ones, on all devices."""
        if streams != self.local.streams:
            self.local.streams = streams
            self.nodes.switched(streams, _disable_current_modes)

    def backward_begins(self) -> Any:
        """Returns what `backward_ended` is to be given."""
        if self.many_streams:
            self.enter_node()
        local = self.local
        before = (local.base, local.node, local.node_streams, dict(local.streams))
        local.base, local.node, local.node_streams = before[3], _NO_NODE, dict(before[3])
        return before

    def backward_ended(self, before: Any) -> None:
        """Put back what was current before."""
        local = self.local
        local.base, local.node, local.node_streams, streams = before
        self._make_current(streams)
        if local.base is None:
            self.nodes.forget_leaves()

    def leaves_used(self, args: Any, kwargs: Any) -> None:
        """Autograd records an operator with these arguments: see `NodeStreams`."""
        if torch.is_grad_enabled() and not self.local.inside:
            if self.many_streams:
                self.enter_node()
            self.nodes.leaves_used(args, self.local.streams)
            if kwargs:
                self.nodes.leaves_used(kwargs.values(), self.local.streams)

    def function_applied(self, args: Any) -> None:
        """A ``torch.autograd.Function`` was applied: autograd has recorded it, and none of its
        own operators.
        """
        if self.many_streams and torch.is_grad_enabled() and not self.local.inside:
            self.enter_node()
            self.nodes.leaves_used(args, self.local.streams, _disable_current_modes)

    def close(self) -> None:
        """Storages that outlive the virtual machine no longer count."""
        self.closed = True
        self.tags.clear()
        self.untagged.clear()
