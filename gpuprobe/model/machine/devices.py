"""Devices, the processes on them, and how the sources that describe them agree.

A device is identified by its UUID, then by its PCI bus id; never by an index. Every measured
value is a `Reading`: the value, or `Unavailable` with the reason, and the source it came from.
Units are in the field docs: bytes, percent, degrees Celsius, milliwatts, megahertz.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum
from typing import Any

from gpuprobe.model.record import record
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import (
    AnyBytes,
    Bytes,
    Displayed,
    Reading,
    ReadStatus,
    Timestamp,
    Unavailable,
)

_NOT_COLLECTED = Unavailable("not collected", ReadStatus.NOT_COLLECTED)

NOT_READ: Reading[Any] = Reading(_NOT_COLLECTED, "")
"""The default of every reading: no source was queried."""


@record(frozen=True, slots=True)
class MigInstance:
    """One MIG compute instance: a separate device to CUDA, a part of a GPU to NVML.

    ``name`` is the profile, such as ``1g.10gb``. ``memory_*`` in bytes.
    """

    uuid: str
    gpu_instance: int
    compute_instance: int
    name: str = ""
    sm_count: Reading[int] = NOT_READ
    memory_total: Reading[Bytes] = NOT_READ
    memory_used: Reading[Bytes] = NOT_READ
    memory_free: Reading[Bytes] = NOT_READ
    cuda_ordinal: int | Unavailable = _NOT_COLLECTED
    torch_ordinal: int | Unavailable = _NOT_COLLECTED


@record(frozen=True, slots=True)
class DeviceIdentity:
    """Every name one GPU goes by.

    * ``uuid``: ``GPU-…``; ``pci_bus_id``: ``domain:bus:device.function`` in lower case with
      an eight-digit domain, as NVML prints it.
    * ``torch_ordinal``: N of ``cuda:N`` in this process; ``cuda_ordinal``: the CUDA driver's
      number after ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``; both unavailable for a
      GPU that the process cannot see.
    * ``nvml_index``: by PCI bus order, all GPUs; ``minor``: N of ``/dev/nvidiaN``.
    """

    uuid: str | Unavailable = _NOT_COLLECTED
    pci_bus_id: str | Unavailable = _NOT_COLLECTED
    torch_ordinal: int | Unavailable = _NOT_COLLECTED
    cuda_ordinal: int | Unavailable = _NOT_COLLECTED
    nvml_index: int | Unavailable = _NOT_COLLECTED
    minor: int | Unavailable = _NOT_COLLECTED
    mig_instances: tuple[MigInstance, ...] = ()

    @property
    def key(self) -> str:
        """The UUID, else the PCI bus id, else the index of the source that saw the device.

        What processes, errors, findings and the topology refer to devices by.
        """
        if not isinstance(self.uuid, Unavailable):
            return self.uuid
        if not isinstance(self.pci_bus_id, Unavailable):
            return f"pci-{self.pci_bus_id}"
        for name in ("nvml_index", "cuda_ordinal", "torch_ordinal"):
            index = getattr(self, name)
            if not isinstance(index, Unavailable):
                return f"{name.partition('_')[0]}-{index}"
        return "unidentified"


@record(frozen=True, slots=True)
class DeviceMemory:
    """Device memory in bytes. ``used + free + reserved == total`` where NVML reports all four;
    ``reserved`` is held by the driver and firmware. BAR1 is the window that the CPU and other
    PCIe devices reach the memory through.
    """

    total: Reading[Bytes] = NOT_READ
    used: Reading[Bytes] = NOT_READ
    free: Reading[Bytes] = NOT_READ
    reserved: Reading[Bytes] = NOT_READ
    bar1_total: Reading[Bytes] = NOT_READ
    bar1_used: Reading[Bytes] = NOT_READ


@record(frozen=True, slots=True)
class Utilisation:
    """Percent of the driver's last sampling period (1 s to 1/6 s) in which the unit was busy."""

    gpu: Reading[int] = NOT_READ
    memory: Reading[int] = NOT_READ
    encoder: Reading[int] = NOT_READ
    decoder: Reading[int] = NOT_READ


@record(frozen=True, slots=True)
class Temperatures:
    """Degrees Celsius. ``slowdown`` and ``shutdown`` are the thresholds of the chip,
    ``gpu_max`` and ``memory_max`` the highest ones at which it still runs at full speed.
    """

    gpu: Reading[int] = NOT_READ
    memory: Reading[int] = NOT_READ
    slowdown: Reading[int] = NOT_READ
    shutdown: Reading[int] = NOT_READ
    gpu_max: Reading[int] = NOT_READ
    memory_max: Reading[int] = NOT_READ


@record(frozen=True, slots=True)
class Power:
    """Milliwatts. ``limit`` is the limit in force, the lowest of all that apply."""

    draw: Reading[int] = NOT_READ
    limit: Reading[int] = NOT_READ
    default_limit: Reading[int] = NOT_READ
    min_limit: Reading[int] = NOT_READ
    max_limit: Reading[int] = NOT_READ
    energy: Reading[int] = NOT_READ  # millijoules since the driver was loaded


@record(frozen=True, slots=True)
class Clocks:
    """Megahertz, now and at most."""

    sm: Reading[int] = NOT_READ
    memory: Reading[int] = NOT_READ
    graphics: Reading[int] = NOT_READ
    video: Reading[int] = NOT_READ
    max_sm: Reading[int] = NOT_READ
    max_memory: Reading[int] = NOT_READ
    max_graphics: Reading[int] = NOT_READ
    max_video: Reading[int] = NOT_READ


@record(frozen=True, slots=True)
class PcieLink:
    """The PCIe link: generation and lanes now and at most (of device and slot together), and
    throughput over the driver's last 20 ms in bytes per second. An idle link drops its
    generation to save power: compare with the maximum only under load.
    """

    generation: Reading[int] = NOT_READ
    width: Reading[int] = NOT_READ
    max_generation: Reading[int] = NOT_READ
    max_width: Reading[int] = NOT_READ
    tx: Reading[int] = NOT_READ
    rx: Reading[int] = NOT_READ
    replays: Reading[int] = NOT_READ  # link errors that were retried, since the driver loaded


@record(frozen=True, slots=True)
class NvLink:
    """One NVLink of a GPU. ``remote`` is the PCI bus id at its other end (a GPU or a switch).

    ``tx``/``rx`` are the driver's data counters in bytes since it was loaded.
    """

    link: int
    active: Reading[bool] = NOT_READ
    version: Reading[int] = NOT_READ
    remote: Reading[str] = NOT_READ
    remote_kind: Reading[str] = NOT_READ  # "gpu", "switch", "cpu" (IBM POWER), "unknown"
    tx: Reading[int] = NOT_READ
    rx: Reading[int] = NOT_READ


@record(frozen=True, slots=True)
class EccCounts:
    """Memory errors found by ECC. Volatile counts begin at the driver's load, aggregate ones
    at the board's manufacture.
    """

    enabled: Reading[bool] = NOT_READ
    pending: Reading[bool] = NOT_READ  # the mode after the next reboot
    corrected_volatile: Reading[int] = NOT_READ
    uncorrected_volatile: Reading[int] = NOT_READ
    corrected_aggregate: Reading[int] = NOT_READ
    uncorrected_aggregate: Reading[int] = NOT_READ


@record(frozen=True, slots=True)
class RetiredMemory:
    """Memory taken out of use: pages before Ampere, rows since."""

    pages_single_bit: Reading[int] = NOT_READ
    pages_double_bit: Reading[int] = NOT_READ
    pages_pending: Reading[bool] = NOT_READ
    rows_corrected: Reading[int] = NOT_READ
    rows_uncorrected: Reading[int] = NOT_READ
    rows_pending: Reading[bool] = NOT_READ  # a reset will remap
    rows_failed: Reading[bool] = NOT_READ  # a remap failed: the board is due for replacement


@record(frozen=True, slots=True)
class MigMode:
    """Whether the GPU is partitioned now, and whether it will be after its next reset."""

    enabled: Reading[bool] = NOT_READ
    pending: Reading[bool] = NOT_READ
    max_instances: Reading[int] = NOT_READ


@record(frozen=True, slots=True)
class TorchView:
    """What torch in this process reports about the device. Bytes.

    ``allocated`` and ``reserved`` are this process's caching allocator; ``free`` is reported by the
    driver, and read only from devices that torch has initialised already.
    """

    initialised: Reading[bool] = NOT_READ
    total: Reading[Bytes] = NOT_READ
    free: Reading[Bytes] = NOT_READ
    allocated: Reading[Bytes] = NOT_READ
    reserved: Reading[Bytes] = NOT_READ


@record(frozen=True, slots=True)
class Device(Displayed):
    """One physical GPU, joined from all queried sources."""

    identity: DeviceIdentity
    name: Reading[str] = NOT_READ
    brand: Reading[str] = NOT_READ
    architecture: Reading[str] = NOT_READ  # "hopper", "blackwell", …
    compute_capability: Reading[tuple[int, int]] = NOT_READ
    sm_count: Reading[int] = NOT_READ
    unified_memory: Reading[bool] = NOT_READ  # the GPU uses the host's memory (GB10, Jetson)
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    utilisation: Utilisation = field(default_factory=Utilisation)
    temperature: Temperatures = field(default_factory=Temperatures)
    power: Power = field(default_factory=Power)
    fans: Reading[tuple[int, ...]] = NOT_READ  # percent of full speed
    clocks: Clocks = field(default_factory=Clocks)
    pstate: Reading[int] = NOT_READ  # 0 is fastest
    throttling: Reading[tuple[str, ...]] = NOT_READ  # reasons in force now, in words
    pcie: PcieLink = field(default_factory=PcieLink)
    nvlinks: Reading[tuple[NvLink, ...]] = NOT_READ
    ecc: EccCounts = field(default_factory=EccCounts)
    retired: RetiredMemory = field(default_factory=RetiredMemory)
    mig: MigMode = field(default_factory=MigMode)
    persistence: Reading[bool] = NOT_READ
    compute_mode: Reading[str] = NOT_READ
    display_active: Reading[bool] = NOT_READ
    vbios: Reading[str] = NOT_READ
    serial: Reading[str] = NOT_READ
    numa_node: Reading[int] = NOT_READ
    cpu_affinity: Reading[tuple[int, ...]] = NOT_READ
    torch: TorchView = field(default_factory=TorchView)
    attributes: dict[str, Reading[int]] = field(default_factory=dict)  # of the CUDA driver

    def __repr__(self) -> str:
        name, total = self.name.value, self.memory.total.value
        words = "GPU" if isinstance(name, Unavailable) else name
        memory = "" if isinstance(total, Unavailable) else f", {human_bytes(total)}"
        return f"<{words}{memory}, {self.key}>"

    @property
    def key(self) -> str:
        return self.identity.key


@record(frozen=True, slots=True)
class Container:
    """What a process runs in, from its cgroup. ``runtime``: ``docker``, ``podman``,
    ``kubernetes``, ``containerd``, ``crio``, ``lxc`` or ``slurm``; absent parts are empty.
    """

    runtime: str
    id: str = ""
    pod: str = ""  # kubernetes pod UID
    job: str = ""  # slurm job (and step) id


@record(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a device.

    ``device`` is the device's key, ``mig`` the UUID of the MIG instance or empty. ``kinds``:
    ``compute``, ``graphics``, ``mps``. ``hidden``: the PID means nothing in this PID
    namespace, so that no more can be known of the process from here.
    """

    pid: int
    device: str
    kinds: tuple[str, ...]
    memory: Reading[Bytes] = NOT_READ
    mig: str = ""
    own: bool = False  # this very process
    hidden: bool = False
    user: Reading[str] = NOT_READ
    uid: Reading[int] = NOT_READ
    name: Reading[str] = NOT_READ
    command: Reading[str] = NOT_READ
    started_at: Reading[float] = NOT_READ  # seconds since the Unix epoch
    container: Reading[Container] = NOT_READ
    rank: Reading[int] = NOT_READ
    local_rank: Reading[int] = NOT_READ


@record(frozen=True, slots=True)
class DriverInfo:
    """The NVIDIA driver. ``cuda`` is the newest CUDA version it supports, as ``12.8``."""

    version: Reading[str] = NOT_READ
    nvml: Reading[str] = NOT_READ
    cuda: Reading[str] = NOT_READ
    kernel_module: Reading[str] = NOT_READ  # from /proc/driver/nvidia/version


@record(frozen=True, slots=True)
class HostInfo:
    """The machine and this process. Versions of packages are from their metadata: nothing is
    imported for them. ``sandbox``: the sandbox whose own kernel this process runs on, ``"gVisor"``;
    ``""`` for none that is known.
    """

    hostname: str = ""
    platform: str = ""
    python: str = ""
    pid: int = 0
    cpu_count: int = 0
    memory_total: Reading[Bytes] = NOT_READ
    memory_available: Reading[Bytes] = NOT_READ
    container: Reading[Container] = NOT_READ  # that this process itself runs in
    torch: Reading[str] = NOT_READ
    torch_cuda: Reading[str] = NOT_READ  # the CUDA runtime torch was built with
    torch_archs: Reading[tuple[str, ...]] = NOT_READ  # only with the torch source
    pycuda: Reading[str] = NOT_READ
    nvidia_ml_py: Reading[str] = NOT_READ
    sandbox: str = ""


@record(frozen=True, slots=True)
class SourceStatus:
    """Whether a source is available, and if not, why."""

    name: str
    available: bool
    reason: str = ""
    version: str = ""
    devices_seen: int | Unavailable = _NOT_COLLECTED


@record(frozen=True, slots=True)
class Disagreement:
    """A contradiction between two sources, or between a source and the environment.

    ``kind``: ``order``, ``hidden``, ``selection``, ``invalid-selection``, ``total``, ``name``,
    ``capability``, ``unmatched``. ``expected``: there is an ordinary explanation, which the
    message gives; nothing needs to be done unless the user meant otherwise.
    """

    kind: str
    message: str
    devices: tuple[str, ...] = ()
    evidence: tuple[tuple[str, str], ...] = ()
    expected: bool = False


@record(frozen=True, slots=True)
class VisibleEntry:
    """One entry of ``CUDA_VISIBLE_DEVICES``: its text and what it selects.

    ``device`` is a device key (or the UUID of a MIG instance), empty where the entry selects
    nothing; ``reason`` is then why.
    """

    text: str
    device: str = ""
    reason: str = ""


@record(frozen=True, slots=True)
class Visibility:
    """What CUDA will show of the devices, by its own rules, in CUDA's order.

    ``setting`` is the raw value of ``CUDA_VISIBLE_DEVICES``, None where it is not set.
    ``devices`` are the keys in ordinal order, unavailable where the order cannot be known
    without asking CUDA (``FASTEST_FIRST`` among different models).
    """

    setting: str | None = None
    order: str = "FASTEST_FIRST"
    entries: tuple[VisibleEntry, ...] = ()
    devices: tuple[str, ...] | Unavailable = ()
    problems: tuple[str, ...] = ()


class WaterfallPart(str, Enum):
    """The parts that a GPU's memory is divided into, from the bottom up."""

    DRIVER = "driver_reserved"
    OTHER_USERS = "other_users"
    OWN_PROCESSES = "own_other_processes"
    CONTEXT = "this_context"
    CACHED = "torch_unused"
    ALLOCATED = "torch_allocated"
    UNEXPLAINED = "unexplained"
    FREE = "free"


@record(frozen=True, slots=True)
class MemoryWaterfall:
    """Where one GPU's memory is. ``parts`` sum to ``total`` exactly, in bytes.

    A part that could not be read is `Unavailable` and counts as nothing: its bytes are in
    ``unexplained``, and ``notes`` name it. ``unexplained`` is below zero if the parts overlap or
    were read at different moments.
    """

    device: str
    total: Bytes | Unavailable
    parts: dict[WaterfallPart, AnyBytes | Unavailable] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@record(frozen=True, slots=True)
class TopologyCell:
    """How one GPU reaches another.

    ``nvlinks`` counts active links between the two, directly or through switches.
    ``ancestor``: ``internal``, ``single``, ``multiple``, ``hostbridge``, ``node``, ``system``
    (NVML's words: the PCIe path crosses a board, one switch, several, a host bridge, a NUMA
    node, or the link between nodes). ``p2p``: ``ok``, or why not, as NVML has it. ``peer``:
    whether CUDA lets a kernel on one read the other's memory (``cuDeviceCanAccessPeer``, which
    torch's and pycuda's ``can_access_peer`` call), for GPUs that are visible to CUDA.
    """

    nvlinks: Reading[int] = NOT_READ
    ancestor: Reading[str] = NOT_READ
    p2p: Reading[str] = NOT_READ
    peer: Reading[bool] = NOT_READ


@record(frozen=True, slots=True)
class TopologyMatrix:
    """``cells[i][j]`` is how ``devices[i]`` reaches ``devices[j]``; None on the diagonal."""

    devices: tuple[str, ...]
    cells: tuple[tuple[TopologyCell | None, ...], ...]


@record(frozen=True, slots=True)
class ProbeError:
    """Something that should have been readable and was not.

    ``unsupported`` values are not errors; a lost device, a refused permission and an
    unexpected failure are. ``device`` is a key, or empty for the source as a whole.
    """

    source: str
    status: ReadStatus
    message: str
    device: str = ""
    what: str = ""


@record(frozen=True, slots=True)
class Inventory(Displayed):
    """Everything that was found, at one moment.

    ``taken_at`` in seconds since the Unix epoch. ``demo`` names the fake fleet, empty for
    real hardware. ``topology`` is None if it was not requested.
    """

    taken_at: Timestamp
    sources: tuple[SourceStatus, ...]
    driver: DriverInfo = field(default_factory=DriverInfo)
    host: HostInfo = field(default_factory=HostInfo)
    devices: tuple[Device, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    visibility: Visibility = field(default_factory=Visibility)
    disagreements: tuple[Disagreement, ...] = ()
    waterfalls: tuple[MemoryWaterfall, ...] = ()
    topology: TopologyMatrix | None = None
    errors: tuple[ProbeError, ...] = ()
    demo: str = ""

    def __repr__(self) -> str:
        demo = f" of the fake fleet {self.demo}" if self.demo else ""
        return f"<inventory{demo}: {list(self.devices)}>"

    def device(self, key: str) -> Device | None:
        """The device with this key, or None."""
        return next((d for d in self.devices if d.key == key), None)
