"""Rules about the host and the program's environment: allocator settings, variables, limits, NCCL.

The values of the allocator's settings are checked by `gpuprobe.allocator.settings`; the rules here
report what torch ignores, or reports only in a log. Source: ``c10/core/AllocatorConfig`` and
``c10/cuda/CUDAAllocatorConfig`` of torch 2.6 and 2.13.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpuprobe.allocator.settings import KEYS, parse_conf
from gpuprobe.errors import ConfigError
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.rules import Rule
from gpuprobe.model.text import human_bytes
from gpuprobe.model.values import Unavailable
from gpuprobe.probes.health.base import MachineFacts, driver_status, needed, rule
from gpuprobe.probes.health.driver import version_pair

OLD = "PYTORCH_CUDA_ALLOC_CONF"
NEW = "PYTORCH_ALLOC_CONF"  # since torch 2.9, for every accelerator

_RENAMED_IN = (2, 9)

# Keys in torch 2.13's headers that torch 2.6's parser lacks: the users of 2.6 get a warning.
_AFTER_2_6 = frozenset(
    {
        "large_segment_size_mb",
        "per_process_memory_fraction",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
# ROCm's spellings, which CUDA builds accept as well.
_ROCM = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}
_BOOLEAN = frozenset(
    {
        "expandable_segments",
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_background_threads",
        "pinned_free_catch_all",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
_BACKENDS = ("native", "cudaMallocAsync")
# Settings of the native allocator: cudaMallocAsync leaves caching to the driver.
_NATIVE_ONLY = frozenset(
    {
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "expandable_segments",
        "large_segment_size_mb",
    }
)


def _split(conf: str) -> list[tuple[str, str | None]]:
    """(key, value) pairs; the value is None without a colon. torch ignores blanks."""
    parts = re.split(r",(?![^\[]*\])", conf.replace(" ", ""))
    pairs: list[tuple[str, str | None]] = []
    for part in parts:
        key, colon, value = part.partition(":")
        if part:
            pairs.append((key, value if colon else None))
    return pairs


def _problem(key: str, value: str | None, torch: tuple[int, int] | None) -> str:
    """Why torch would reject a pair, or an empty text."""
    name = _ROCM.get(key, key)
    if name not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1)
        return "unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if name in _AFTER_2_6 and torch is not None and torch <= (2, 6):
        return f"torch {torch[0]}.{torch[1]} does not know this key"
    if not value:
        return "no value: torch expects KEY:VALUE"
    if name in _BOOLEAN:
        return "" if value in ("True", "False") else "torch expects exactly True or False"
    if name == "backend":
        return "" if value in _BACKENDS else f"torch wants {' or '.join(_BACKENDS)}"
    try:
        parse_conf(f"{name}:{value}")
    except ConfigError as error:
        return str(error).partition(" is not valid: ")[2] or str(error)
    return ""


_QUOTES = "\"'"


def _corrected(conf: str) -> tuple[str, list[str]]:
    """The settings as torch would read them, and what was wrong with the way they are written."""
    wrong = []
    text = conf.strip()
    if len(text) > 1 and text[0] in _QUOTES and text[-1] == text[0]:
        text = text[1:-1]
        wrong.append("the quotes are part of the value (env files and Dockerfiles keep them)")
    if ";" in text:
        text = text.replace(";", ",")
        wrong.append("settings are separated by commas, not by semicolons")
    pairs = []
    for key, value in _split(text):
        name, equals, after = key.partition("=")
        if equals and value is None and name in KEYS:
            wrong.append(f"a key and its value are separated by a colon: {name}:{after}")
            key, value = name, after
        name = _ROCM.get(key, key)
        if name in _BOOLEAN and value in ("true", "false"):
            wrong.append("torch expects exactly True or False")
            value = value.capitalize()
        pairs.append(key if value is None else f"{key}:{value}")
    return ",".join(pairs), list(dict.fromkeys(wrong))


def _valid(conf: str, facts: MachineFacts) -> bool:
    torch = _torch_version(facts)
    return not any(_problem(key, value, torch) for key, value in _split(conf))


def _export(variable: str, conf: str, facts: MachineFacts) -> str:
    """The command that sets these settings, written as torch reads them; "" if that is unknown."""
    text, _ = _corrected(conf)
    return f"export {variable}={shlex.quote(text)}" if _valid(text, facts) else ""


def _set(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, environ[name]) for name in (OLD, NEW) if environ.get(name, "").strip()]


def _torch_version(facts: MachineFacts) -> tuple[int, int] | None:
    return None if isinstance(facts.torch, Unavailable) else version_pair(facts.torch.version)


@rule(
    "GP140",
    "allocator-conf-invalid",
    "The allocator settings are valid",
    Level.ERROR,
    "environment, torch",
)
def conf_invalid(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """torch refuses a key or a value, and ends the program at its first use of the GPU with
    "Unrecognized key" or the like. Booleans must be written `True` and `False`.
    """
    environ = needed(facts.environ)
    for variable, conf in _set(environ):
        text, wrong = _corrected(conf)
        if wrong and _valid(text, facts):
            yield self.finding(
                f"{variable}: {'; '.join(wrong)}",
                (variable, conf),
                fix="Write the settings as torch reads them.",
                code=_export(variable, conf, facts),
                subject=variable,
            )
            continue
        for key, value in _split(conf):
            problem = _problem(key, value, _torch_version(facts))
            if problem:
                shown = key if value is None else f"{key}:{value}"
                yield self.finding(
                    f"{variable}: '{shown}': {problem}",
                    (variable, conf),
                    fix="Correct or remove this setting.",
                    subject=f"{variable} {key}",
                )


@rule(
    "GP141",
    "allocator-conf-conflict",
    "The allocator settings are consistent",
    Level.WARNING,
    "environment",
)
def conf_conflict(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """One of two settings silently wins: both variables with different values (torch 2.13 takes
    `PYTORCH_CUDA_ALLOC_CONF`), a key given twice, or options of the native allocator next to
    `backend:cudaMallocAsync`, which ignores them. `expandable_segments:True` leaves
    `max_split_size_mb` little to do.
    """
    environ = needed(facts.environ)
    given = _set(environ)
    if len(given) == 2 and sorted(_split(given[0][1])) != sorted(_split(given[1][1])):
        yield self.finding(
            f"{OLD} and {NEW} are both set, with different values; torch reads only one of them",
            *given,
            fix=f"Keep one: {NEW} for torch 2.9 and newer, {OLD} for older ones.",
            code=f"unset {OLD}",
            subject="both",
        )
    for variable, conf in given:
        pairs = _split(conf)
        keys = [key for key, _ in pairs]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            yield self.finding(
                f"{variable} gives {key} more than once: the last one wins",
                (variable, conf),
                fix="Keep one of them.",
                subject=f"{variable} {key}",
            )
        ignored = [key for key in keys if key in _NATIVE_ONLY]
        if ("backend", "cudaMallocAsync") in pairs and ignored:
            yield self.finding(
                f"backend:cudaMallocAsync ignores {', '.join(ignored)}",
                (variable, conf),
                fix="Remove the ignored settings, or the backend.",
                subject=f"{variable} backend",
            )
        elif ("expandable_segments", "True") in pairs and "max_split_size_mb" in keys:
            yield self.finding(
                "max_split_size_mb has little effect with expandable_segments:True",
                (variable, conf),
                fix="Keep only expandable_segments:True, which solves the same problem "
                "(fragmentation).",
                subject=f"{variable} split",
            )


@rule(
    "GP142",
    "allocator-conf-name",
    "The allocator settings use a variable that this torch reads",
    (Level.WARNING, Level.NOTE),
    "environment, torch",
)
def conf_name(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """torch 2.9 brought `PYTORCH_ALLOC_CONF`. The old name `PYTORCH_CUDA_ALLOC_CONF` still works: a
    note. The new name under an older torch does nothing: a warning.
    """
    environ = needed(facts.environ)
    given = dict(_set(environ))
    if not given:
        return
    torch = _torch_version(facts)
    if torch is None:
        yield Unavailable("torch's version is unknown")
    elif NEW in given and OLD not in given and torch < _RENAMED_IN:
        yield self.finding(
            f"torch {torch[0]}.{torch[1]} does not read {NEW}",
            (NEW, given[NEW]),
            fix=f"Use {OLD} with torch older than 2.9.",
            code=_export(OLD, given[NEW], facts),
            subject=NEW,
        )
    elif OLD in given and torch >= _RENAMED_IN:
        renamed = _export(NEW, given[OLD], facts)
        yield self.finding(
            f"{OLD} is the old name of {NEW}",
            (OLD, given[OLD]),
            fix=f"Rename it to {NEW}, unless torch older than 2.9 runs in this environment too.",
            code=f"{renamed}; unset {OLD}" if renamed else "",
            subject=OLD,
            level=Level.NOTE,
        )


_MIB = 1024**2
_SHM_SMALL = 1024 * _MIB  # docker's default is 64 MiB; one batch of images is easily 100
_SHM_FREE = 256 * _MIB
_MEMLOCK_RDMA = 1024 * _MIB  # a rule of thumb: vendors advise "unlimited"


@dataclass(frozen=True, slots=True)
class _Switch:
    """A variable that changes how programs run, the values that switch it on, and the cost."""

    name: str
    on: tuple[str, ...]  # lower case; empty: any value other than off
    effect: str
    level: Level = Level.WARNING


_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = frozenset({"", "0", "false", "no", "off", "n", "f"})

# Sources: the CUDA programming guide (environment variables), torch's CUDA environment
# variables and debugging pages, NCCL's environment variables page.
_SWITCHES = (
    _Switch("CUDA_LAUNCH_BLOCKING", _TRUE, "every kernel launch waits for the kernel: slow"),
    _Switch(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", (), "every tensor calls cudaMalloc and cudaFree: slow"
    ),
    _Switch("PYTORCH_NO_HIP_MEMORY_CACHING", (), "every tensor calls hipMalloc and hipFree: slow"),
    _Switch("TORCH_CUDA_SANITIZER", _TRUE, "torch checks every operation for races: slow"),
    _Switch("CUDA_FORCE_PTX_JIT", _TRUE, "all device code is recompiled at load time"),
    _Switch("CUDA_CACHE_DISABLE", _TRUE, "compiled kernels are not kept between runs"),
    _Switch("NVIDIA_TF32_OVERRIDE", ("0",), "TF32 is off in every NVIDIA library: slow matmuls"),
    _Switch("CUDA_INJECTION64_PATH", (), "a tool is loaded into every CUDA program"),
    _Switch("CUDA_DEBUGGER_SOFTWARE_PREEMPTION", _TRUE, "the CUDA debugger's mode is on"),
    _Switch("TORCHDYNAMO_DISABLE", _TRUE, "torch.compile does nothing"),
    _Switch("TORCH_COMPILE_DISABLE", _TRUE, "torch.compile does nothing"),
    _Switch("TORCH_COMPILE_DEBUG", _TRUE, "torch.compile writes its debug files: slow"),
    _Switch("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _TRUE, "compiled code is not kept"),
    _Switch("PYTORCH_JIT", ("0",), "TorchScript is off"),
    _Switch("TORCH_DISTRIBUTED_DEBUG", ("detail",), "every collective is checked: slow"),
    _Switch("TORCH_DISTRIBUTED_DEBUG", ("info",), "DDP checks and logs more", Level.NOTE),
    _Switch("TORCH_NCCL_BLOCKING_WAIT", _TRUE, "collectives block the host until they end"),
    _Switch("NCCL_BLOCKING_WAIT", _TRUE, "collectives block the host until they end"),
    _Switch("NCCL_DEBUG", ("trace",), "NCCL logs every call: slow"),
    _Switch("NCCL_DEBUG", ("info",), "NCCL logs its set-up", Level.NOTE),
    _Switch("NCCL_P2P_DISABLE", (), "NCCL does not use NVLink or PCIe peer access: slow"),
    _Switch("NCCL_SHM_DISABLE", (), "NCCL does not use shared memory within the machine"),
    _Switch("NCCL_IB_DISABLE", (), "NCCL does not use InfiniBand or RoCE", Level.NOTE),
    _Switch("TORCH_SHOW_CPP_STACKTRACES", _TRUE, "errors carry C++ stacks", Level.NOTE),
    _Switch("TORCH_LOGS", (), "torch writes debug logs", Level.NOTE),
    _Switch("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", _TRUE, "GPU faults write core dumps", Level.NOTE),
    _Switch("CUBLAS_LOGINFO_DBG", _TRUE, "cuBLAS logs every call"),
    _Switch("CUDNN_LOGINFO_DBG", _TRUE, "cuDNN logs every call"),
    _Switch("PYTHONDEVMODE", _TRUE, "Python's development mode is on: slow", Level.NOTE),
)
_SANITIZERS = ("libasan", "libtsan", "libubsan", "libcompute-sanitizer", "libSanitizerCollection")


@rule(
    "GP143",
    "debug-variable",
    "No debug variable is set",
    (Level.WARNING, Level.NOTE),
    "environment",
)
def debug_variable(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Variables that are set to find a bug and then forgotten. Those that make programs slower or
    switch something off are warnings; those that only log are notes.
    """
    environ = needed(facts.environ)
    for switch in _SWITCHES:
        value = environ.get(switch.name)
        if value is None:
            continue
        text = value.strip().lower()
        if text in switch.on if switch.on else text not in _FALSE:
            yield self.finding(
                f"{switch.name}={value}: {switch.effect}",
                (switch.name, value),
                fix="Unset it unless you are debugging.",
                code=f"unset {switch.name}",
                subject=switch.name,
                level=switch.level,
            )
    preloaded = environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in _SANITIZERS):
        yield self.finding(
            "a sanitizer is loaded into every program (LD_PRELOAD)",
            ("LD_PRELOAD", preloaded),
            fix="Unset it unless you are debugging.",
            code="unset LD_PRELOAD",
            subject="LD_PRELOAD",
        )


@rule(
    "GP144",
    "sandbox",
    "The machine is not a sandbox with its own kernel",
    Level.NOTE,
    "host",
)
def sandbox(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """A sandbox such as gVisor runs programs on its own kernel. Device memory gets ascending
    addresses, where ordinary Linux has descending ones, so peaks differ a little (reserved memory
    by up to 1.1% in 28 runs); an estimate is a range over both. Processes outside the sandbox are
    hidden.
    """
    inventory = needed(facts.inventory)
    name = inventory.host.sandbox
    if name:
        yield self.finding(
            f"this machine is a {name} sandbox: peaks of reserved memory may differ by about 1% "
            "from those on ordinary Linux",
            ("sandbox", name),
            fix="Compare memory only with runs on the same kind of machine.",
        )


@rule(
    "GP150",
    "shared-memory-small",
    "/dev/shm is large enough for DataLoader workers",
    (Level.ERROR, Level.WARNING),
    "/dev/shm, container",
)
def shared_memory_small(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """DataLoader workers pass batches through shared memory. If it is too small they fail with
    "insufficient shared memory (shm)"; containers have 64 MiB by default. A warning below 1 GiB in
    total or 256 MiB free, an error if it is not writable.
    """
    shm = needed(facts.shared_memory)
    fix, code = "Increase its size.", "sudo mount -o remount,size=8G /dev/shm"
    if facts.in_container is True:
        fix = "Start the container with --shm-size or --ipc=host; in Kubernetes mount an "
        fix += "emptyDir with medium: Memory at /dev/shm."
        code = "docker run --shm-size=8g ..."
    evidence = (("size", human_bytes(shm.total)), ("free", human_bytes(shm.free)))
    if not shm.writable:
        yield self.finding(
            "/dev/shm is not writable: DataLoader workers and NCCL will fail",
            *evidence,
            fix="Make it writable for this user (mode 1777).",
            code="sudo chmod 1777 /dev/shm",
        )
    elif shm.total < _SHM_SMALL:
        yield self.finding(
            f"/dev/shm is small: {human_bytes(shm.total)}",
            *evidence,
            fix=fix,
            code=code,
            level=Level.WARNING,
        )
    elif shm.free < _SHM_FREE:
        yield self.finding(
            f"/dev/shm is nearly full: {human_bytes(shm.free)} of {human_bytes(shm.total)} free",
            *evidence,
            fix="Remove files left by killed programs, or increase its size.",
            code="ls -l /dev/shm",
            level=Level.WARNING,
        )


@rule(
    "GP151",
    "locked-memory-limit",
    "The locked-memory limit is high enough for RDMA",
    Level.WARNING,
    "locked-memory limit, /sys/class/infiniband",
)
def locked_memory(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """InfiniBand and RoCE transfers need locked memory; with a low limit (`ulimit -l`) NCCL fails
    with "ibv_reg_mr ... Cannot allocate memory". Only machines with such a device are checked.
    """
    if isinstance(facts.rdma_devices, Unavailable):
        yield facts.rdma_devices
    elif isinstance(facts.memlock, Unavailable):
        yield facts.memlock
    elif facts.rdma_devices and 0 <= facts.memlock < _MEMLOCK_RDMA:
        yield self.finding(
            f"only {human_bytes(facts.memlock)} may be locked, but this machine has RDMA devices",
            ("limit", human_bytes(facts.memlock)),
            ("RDMA devices", ", ".join(facts.rdma_devices)),
            fix="Raise the limit: 'memlock unlimited' in /etc/security/limits.conf, "
            "LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for a container.",
            code="ulimit -l unlimited",
        )


@rule(
    "GP160",
    "nccl-missing",
    "torch has NCCL if there are several GPUs",
    Level.WARNING,
    "torch, nvml",
)
def nccl_missing(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Without NCCL, training on several GPUs is left with gloo, which copies through the host."""
    torch = needed(facts.torch)
    inventory = needed(facts.inventory)
    cuda = needed(torch.cuda)
    status = driver_status(inventory)
    if isinstance(status, Unavailable) or not status.available:
        yield Unavailable("no driver: unknown whether there are several GPUs")
        return
    if len(inventory.devices) < 2:
        return
    for version in (torch.nccl_built, torch.nccl_loaded):
        if isinstance(version, Unavailable):
            yield self.finding(
                f"torch {torch.version} has no NCCL for {len(inventory.devices)} GPUs",
                ("torch error", version.reason),
                fix="Install torch's own NCCL package, or a torch wheel for Linux with CUDA.",
                code=f"pip install --upgrade nvidia-nccl-cu{_major(cuda)}",
            )
            return


@rule(
    "GP161",
    "nccl-mismatch",
    "torch uses the NCCL it was built with",
    (Level.WARNING, Level.NOTE),
    "torch, packages",
)
def nccl_mismatch(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """Another NCCL is loaded than torch was built with, from another package, `LD_LIBRARY_PATH` or
    `LD_PRELOAD`. An older one lacks functions that torch calls; a newer one is a note. Ranks on
    several machines must all have the same.
    """
    torch = needed(facts.torch)
    built = needed(torch.nccl_built)  # GP160 checks whether there should be one
    loaded = needed(torch.nccl_loaded)
    if loaded == built:
        return
    packages = {} if isinstance(facts.packages, Unavailable) else facts.packages
    newer = _numbers(loaded) > _numbers(built)
    yield self.finding(
        f"torch was built with NCCL {built} and uses {loaded}",
        ("built with", built),
        ("in use", loaded),
        *((name, version) for name, version in packages.items() if name.startswith("nvidia-nccl")),
        fix="Nothing, if this is intended and the same on every machine."
        if newer
        else "Remove the older NCCL from LD_LIBRARY_PATH and LD_PRELOAD, or reinstall torch with "
        "its dependencies.",
        code=f"pip install nvidia-nccl-cu{_major(torch.cuda)}=={built}",
        level=Level.NOTE if newer else Level.WARNING,
    )


def _major(cuda: str | Unavailable) -> str:
    return "12" if isinstance(cuda, Unavailable) else cuda.partition(".")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


CHECKS = (
    conf_invalid,
    conf_conflict,
    conf_name,
    debug_variable,
    sandbox,
    shared_memory_small,
    locked_memory,
    nccl_missing,
    nccl_mismatch,
)
