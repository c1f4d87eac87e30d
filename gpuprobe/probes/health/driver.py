"""Rules about the driver, and about torch and pycuda against it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuprobe.catalogue.architectures import runs_on
from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.machine.devices import SourceStatus
from gpuprobe.model.rules import Rule
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.health.base import MachineFacts, driver_status, name_of, needed, rule

_COMPATIBILITY = "docs.nvidia.com/deploy/cuda-compatibility"


def version_pair(text: str) -> tuple[int, int] | None:
    """``12.8.1`` as (12, 8); None if the text is not a version."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None


@rule("GP101", "driver-missing", "A working NVIDIA driver", Level.ERROR, "nvml, container")
def driver_missing(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """No program can use a GPU if the driver is not installed, not loaded, differs in version from
    its libraries, or is not passed into the container.
    """
    inventory = needed(facts.inventory)
    status = driver_status(inventory)
    if isinstance(status, Unavailable):
        yield status
    elif not status.available:
        if "nvidia-ml-py" in status.reason:
            yield Unavailable(status.reason)
            return
        if "different versions" in status.reason:
            fix, code = "Reboot, or unload and reload the driver.", "sudo reboot"
        elif facts.in_container is True:
            fix = (
                "If nvidia-smi works on the host, start the container with GPU access (this needs "
                "nvidia-container-toolkit on the host); otherwise install the driver on the host. "
                "Without an NVIDIA GPU in the host, there is nothing to fix."
            )
            code = "docker run --gpus all ..."
        elif "not loaded" in status.reason:
            fix = "Load the kernel module; if that fails, the kernel log shows why."
            code = "sudo modprobe nvidia && nvidia-smi"
        else:
            fix = "Install the NVIDIA driver of your distribution, and reboot. Without an NVIDIA "
            fix += "GPU in this machine, there is nothing to fix."
            code = "nvidia-smi"
        yield self.finding(
            "no NVIDIA driver responds on this machine",
            ("NVML error", status.reason),
            *(
                (f"{source.name.upper()} error", source.reason)
                for source in inventory.sources
                if source.name == "cuda" and not source.available
            ),
            ("inside a container", _yes_no(facts.in_container)),
            fix=fix,
            code=code,
        )


def _yes_no(value: bool | Unavailable) -> str:
    return "unknown" if isinstance(value, Unavailable) else "yes" if value else "no"


@rule("GP102", "driver-stub", "The driver libraries are not stubs", Level.ERROR, "driver libraries")
def driver_stub(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """The CUDA toolkit ships *stub* libraries to link against. When the loader finds one of them
    first, every call fails although the driver is fine. A stub is recognised by its folder
    (`stubs`) or its size.
    """
    libraries = needed(facts.libraries)
    if not libraries:
        yield Unavailable("neither libcuda.so.1 nor libnvidia-ml.so.1 is installed")
    for library in libraries:
        if library.stub:
            yield self.finding(
                f"{library.name} is a stub, not the real driver library",
                ("found at", library.path),
                fix="Remove the toolkit's stubs folder from LD_LIBRARY_PATH and "
                "/etc/ld.so.conf.d, then run ldconfig.",
                code=f"ldconfig -p | grep {library.name}",
                subject=library.name,
            )


@rule(
    "GP103",
    "driver-too-old",
    "The driver supports torch's CUDA runtime",
    (Level.ERROR, Level.NOTE),
    "nvml, torch, driver libraries",
)
def driver_too_old(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """A driver runs programs built for its own CUDA version and older ones, and since CUDA 11 those
    for a newer *minor* version, with limits: a note. A newer major version is an error, or a note
    if NVIDIA's forward-compatibility package is in use. Source: NVIDIA, CUDA Compatibility.
    """
    runtime, driver = _torch_runtime(facts), _driver_cuda(facts)
    for value in (runtime, driver):
        if isinstance(value, Unavailable):
            yield value
            return
    assert isinstance(runtime, str)
    assert isinstance(driver, str)
    built, supported = version_pair(runtime), version_pair(driver)
    if built is None or supported is None:
        yield Unavailable(f"no versions to compare: torch {runtime!r}, driver {driver!r}")
        return
    if supported >= built:
        return
    evidence = (("torch's CUDA runtime", runtime), ("newest CUDA of the driver", driver))
    compat = not isinstance(facts.libraries, Unavailable) and any(
        "/compat" in library.path for library in facts.libraries
    )
    minor_only = supported[0] == built[0] and built[0] >= 11
    if minor_only or compat:
        why = "of the same major version" if minor_only else "with the compatibility package"
        yield self.finding(
            f"torch was built for CUDA {runtime}, the driver is from CUDA {driver}: {why}, "
            "which works with limitations",
            *evidence,
            fix=f"Nothing, unless kernels fail to compile at run time; see {_COMPATIBILITY}.",
            level=Level.NOTE,
        )
        return
    yield self.finding(
        f"the driver is too old for torch: it supports CUDA {driver}, torch needs {runtime}",
        *evidence,
        fix=f"Update the driver, or install a torch built for CUDA {supported[0]} "
        "(pytorch.org/get-started/previous-versions has the commands).",
    )


def _driver_cuda(facts: MachineFacts) -> str | Unavailable:
    if isinstance(facts.inventory, Unavailable):
        return facts.inventory
    status = driver_status(facts.inventory)
    if isinstance(status, SourceStatus) and not status.available:
        return Unavailable("no driver to compare with")
    return facts.inventory.driver.cuda.value


def _torch_runtime(facts: MachineFacts) -> str | Unavailable:
    return facts.torch if isinstance(facts.torch, Unavailable) else facts.torch.cuda


def _gpus(facts: MachineFacts) -> int | Unavailable:
    """The number of the machine's NVIDIA GPUs."""
    if isinstance(facts.inventory, Unavailable):
        return facts.inventory
    status = driver_status(facts.inventory)
    if isinstance(status, Unavailable):
        return status
    if not status.available and not facts.inventory.devices:
        return Unavailable("no driver: unknown whether there is a GPU")
    return len(facts.inventory.devices)


@rule("GP104", "torch-without-cuda", "torch is built with CUDA", Level.ERROR, "torch, nvml")
def torch_without_cuda(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """With a CPU-only torch on a machine with an NVIDIA GPU, training silently runs on the CPU.
    Usually pip took a wheel for the wrong platform or from the CPU index.
    """
    gpus = _gpus(facts)
    if isinstance(facts.torch, Unavailable):
        yield facts.torch
    elif isinstance(gpus, Unavailable):
        yield gpus
    elif (
        gpus and isinstance(facts.torch.cuda, Unavailable) and not isinstance(facts.torch.hip, str)
    ):
        yield self.finding(
            f"torch {facts.torch.version} is built without CUDA, but this machine has {gpus} "
            "NVIDIA GPU" + ("s" if gpus > 1 else ""),
            ("torch", facts.torch.version),
            ("torch.version.cuda", facts.torch.cuda.reason),
            fix="Install a CUDA build of torch: pytorch.org/get-started shows the command.",
            code="pip uninstall torch",
        )


@rule("GP105", "torch-arch-missing", "torch has code for every GPU", Level.ERROR, "torch, nvml")
def torch_arch_missing(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """torch's wheels hold machine code for a list of GPU architectures
    (`torch.cuda.get_arch_list()`). On other GPUs, very old or very new, the first kernel fails: "no
    kernel image is available for execution on the device".
    """
    torch = needed(facts.torch)
    inventory = needed(facts.inventory)
    archs = needed(torch.archs)
    if not inventory.devices:
        yield Unavailable("no GPU to compare with")
    for device in inventory.devices:
        capability = device.compute_capability.value
        if isinstance(capability, Unavailable):
            yield Unavailable(f"{name_of(device)}: compute capability: {capability.reason}")
            continue
        major, minor = capability
        if not any(runs_on(arch, (major, minor)) for arch in archs):
            yield self.finding(
                f"torch {torch.version} has no code for {name_of(device)}, "
                f"compute capability {major}.{minor}",
                ("compute capability", f"{major}.{minor}"),
                ("torch's architectures", " ".join(archs)),
                fix="Install a torch whose wheel has this architecture: a newer one for a newer "
                "GPU, an older one for an older GPU; or build torch with TORCH_CUDA_ARCH_LIST.",
                code=f"TORCH_CUDA_ARCH_LIST={major}.{minor}",
                subject=device.key,
            )


@rule("GP106", "torch-broken", "torch can be imported", Level.ERROR, "torch")
def torch_broken(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """torch is installed, but a fresh process cannot import it. Usual causes: mixed CUDA packages,
    a foreign `LD_LIBRARY_PATH` or `LD_PRELOAD`, a file named `torch.py`.
    """
    if not isinstance(facts.torch, Unavailable):
        return
    if facts.torch.status is not ReadStatus.ERROR:
        yield facts.torch
        return
    yield self.finding(
        "torch is installed but cannot be imported",
        ("error in a new process", facts.torch.reason),
        fix="Import it manually, first with LD_LIBRARY_PATH and LD_PRELOAD unset, then in a new "
        "virtual environment.",
        code="python -c 'import torch'",
    )


@rule(
    "GP170",
    "pycuda-mismatch",
    "pycuda matches the driver",
    (Level.ERROR, Level.NOTE),
    "pycuda, nvml, torch",
)
def pycuda_mismatch(self: Rule, facts: MachineFacts) -> Iterator[Finding | Unavailable]:
    """pycuda is compiled against one CUDA version; an older driver lacks entry points that it
    calls. Another *major* version than torch's is a note: their runtime libraries cannot share a
    process safely.
    """
    pycuda_cuda = needed(facts.pycuda_cuda)
    built = version_pair(pycuda_cuda)
    driver = _driver_cuda(facts)
    if isinstance(driver, Unavailable):
        yield driver
    elif built and (supported := version_pair(driver)) and built > supported:
        yield self.finding(
            f"pycuda was built for CUDA {pycuda_cuda}, the driver supports {driver}",
            ("pycuda's CUDA", pycuda_cuda),
            ("newest CUDA of the driver", driver),
            fix="Update the driver, or rebuild pycuda with the CUDA toolkit of the driver.",
            code="pip install --no-cache-dir --no-binary pycuda --force-reinstall pycuda",
        )
    runtime = _torch_runtime(facts)
    if built and isinstance(runtime, str):
        torch_version = version_pair(runtime)
        if torch_version and torch_version[0] != built[0]:
            yield self.finding(
                f"pycuda was built for CUDA {pycuda_cuda}, torch for {runtime}",
                ("pycuda's CUDA", pycuda_cuda),
                ("torch's CUDA runtime", runtime),
                fix="Rebuild pycuda with the CUDA toolkit that torch was built with, if both "
                "are used in one program.",
                level=Level.NOTE,
            )


CHECKS = (
    driver_missing,
    driver_stub,
    driver_too_old,
    torch_without_cuda,
    torch_arch_missing,
    torch_broken,
    pycuda_mismatch,
)
