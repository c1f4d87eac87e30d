"""The machine and the processes on it, from ``/proc`` and package metadata.

Reads ``/proc`` directly: importing psutil would take longer than all the reads together. The folder
may be a different one (a host's ``/proc`` mounted into a container, or a test's tree), see
`proc_root`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

from gpuprobe.errors import EnvironmentUnavailable
from gpuprobe.model.machine.devices import Container, GpuProcess, HostInfo
from gpuprobe.model.record import record
from gpuprobe.model.values import Bytes, Reading, ReadStatus, Unavailable

if TYPE_CHECKING:
    from gpuprobe.model.machine.process import ProcessDetails

# The inode of the first PID namespace: PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

# What gVisor's kernel reports in uname, the same in all its releases: _LINUX_VERSION in
# pkg/sentry/syscalls/linux/linux64.go.
_GVISOR = "#1 SMP Sun Jan 10 15:06:54 PST 2016"

# Where launchers put the rank, the usual one first: torchrun, Open MPI, Slurm, PMI.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")

# Compiled at first use, by the cache of `re`: the table needs none of them.
_HEX_ID = r"[0-9a-f]{12,64}"
_POD = r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})"
_SLURM_JOB = r"job_(\d+)(?:/step_([^/]+))?"
_RUNTIMES = (
    ("docker-", "docker"),
    ("libpod-", "podman"),
    ("cri-containerd-", "containerd"),
    ("crio-", "crio"),
)
_PARENT_FOLDERS = {"docker": "docker", "libpod": "podman", "podman": "podman"}

_ENDED = Unavailable("the process has ended")


class ProcessFacts(TypedDict, total=False):
    """The fields of `GpuProcess` that ``/proc`` has; without ``full``, only those of the table."""

    hidden: bool
    uid: Reading[int]
    user: Reading[str]
    name: Reading[str]
    command: Reading[str]
    started_at: Reading[float]
    container: Reading[Container]
    rank: Reading[int]
    local_rank: Reading[int]


def proc_root() -> str:
    """``/proc``, or the folder that ``GPUPROBE_PROCFS`` names instead."""
    return os.environ.get("GPUPROBE_PROCFS") or "/proc"


def container_of(cgroup: str) -> Container | None:
    """The container, pod or job that the text of a ``/proc/PID/cgroup`` names, or None.

    Knows cgroup v1 and v2 paths of docker, podman, containerd, CRI-O, kubernetes, LXC and
    Slurm, in the cgroupfs form (``/docker/<id>``) and systemd's (``docker-<id>.scope``).
    """
    runtime = identifier = pod = job = ""
    for line in cgroup.splitlines():
        path = line.split(":", 2)[-1]
        match = re.search(_POD, path)
        if match:
            pod = pod or match.group(1).replace("_", "-")
        match = re.search(_SLURM_JOB, path)
        if match:
            job = job or match.group(1) + (f".{match.group(2)}" if match.group(2) else "")
        parts = path.split("/")
        for position, part in enumerate(parts):
            parent = parts[position - 1]
            for known, number in _container_ids(
                part, parent if position else "", bool(pod and position)
            ):
                runtime, identifier = runtime or known, identifier or number
    if pod:
        runtime = "kubernetes"
    elif job and not runtime:
        runtime = "slurm"
    return Container(runtime, identifier, pod, job) if runtime else None


def _container_ids(part: str, parent: str, in_pod: bool) -> Iterator[tuple[str, str]]:
    """(runtime, container id) that a folder of a cgroup path, below ``parent``, names. Inside a
    kubernetes pod, a folder with a container id does not name its runtime: "".
    """
    name = part.removesuffix(".scope")
    for prefix, runtime in _RUNTIMES:
        if name.startswith(prefix) and re.fullmatch(_HEX_ID, name[len(prefix) :]):
            yield runtime, name[len(prefix) :]
    if (parent in _PARENT_FOLDERS or in_pod) and len(part) == 64 and re.fullmatch(_HEX_ID, part):
        yield _PARENT_FOLDERS.get(parent, ""), part
    if parent in ("lxc", "lxc.payload") and part:
        yield "lxc", part
    if part.startswith("lxc.payload."):
        yield "lxc", part.removeprefix("lxc.payload.")


class ProcTree:
    """One ``/proc`` folder."""

    # No pathlib in this module: importing it takes 5 of the 60 ms of `gpuprobe info`.

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = proc_root() if root is None else os.fspath(root)
        self._users: dict[int, str] | None = None
        self._boot: float | Unavailable | None = None
        self._real = self.root == "/proc"

    def read(self, *parts: str) -> str | Unavailable:
        """A file's text; bytes that are not UTF-8 are preserved (surrogateescape)."""
        path = "/".join((self.root, *parts))
        try:
            # Not Path.open: this reads several files of every process.
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                return file.read().decode("utf-8", "surrogateescape")
        except PermissionError:
            return Unavailable(f"no permission to read {parts[-1]}", ReadStatus.DENIED)
        except (FileNotFoundError, ProcessLookupError):
            return Unavailable("no such process", ReadStatus.ERROR)
        except OSError as error:
            return Unavailable(f"{parts[-1]}: {error.strerror}", ReadStatus.ERROR)

    @property
    def is_real(self) -> bool:
        """Whether this is this process's own ``/proc``, not a different tree."""
        return self._real

    def machine(self) -> tuple[str, int]:
        """The host's name and its number of CPUs; empty and 0 if the tree does not contain them."""
        name, stat = self.read("sys", "kernel", "hostname"), self.read("stat")
        cpus = 0 if isinstance(stat, Unavailable) else len(re.findall(r"^cpu\d+ ", stat, re.M))
        return "" if isinstance(name, Unavailable) else name.strip(), cpus

    def stat(self, pid: int) -> Stat | Unavailable:
        """The ``/proc/PID/stat`` of a process."""
        line = self.read(str(pid), "stat")
        return line if isinstance(line, Unavailable) else parse_stat(line)

    def in_first_namespace(self) -> bool | Unavailable:
        """Whether PIDs in this tree are those of the whole machine."""
        try:
            return os.readlink(f"{self.root}/self/ns/pid") == _FIRST_PID_NAMESPACE  # noqa: PTH115
        except OSError as error:
            return Unavailable(f"PID namespace: {error.strerror}")

    def user(self, uid: int) -> str:
        """The user's name, or the number as text if no user has it."""
        if self._real:
            import pwd

            try:
                return pwd.getpwuid(uid).pw_name
            except KeyError:
                return str(uid)
        if self._users is None:
            # The passwd file of the tree's machine, mounted next to it.
            self._users = {}
            text = self.read("..", "etc", "passwd")
            for line in "" if isinstance(text, Unavailable) else text.split("\n"):
                fields = line.split(":")
                if len(fields) > 2 and fields[2].isdecimal():
                    self._users.setdefault(int(fields[2]), fields[0])
        return self._users.get(uid, str(uid))

    def started_at(self, stat: Stat) -> float | Unavailable:
        """A process's start in seconds since the Unix epoch."""
        if self._boot is None:
            text = self.read("stat")
            match = None if isinstance(text, Unavailable) else re.search(r"^btime (\d+)", text, 8)
            self._boot = float(match.group(1)) if match else Unavailable("boot time unknown")
        if isinstance(self._boot, Unavailable):
            return self._boot
        return self._boot + stat.start / os.sysconf("SC_CLK_TCK")


@record(frozen=True, slots=True)
class Stat:
    """Fields of a ``/proc/PID/stat`` line (Linux, proc_pid_stat(5)).

    ``busy`` (time on a CPU) and ``start`` in clock ticks, ``resident`` in pages.
    """

    name: str
    state: str
    parent: int
    busy: int
    start: int
    resident: int


def parse_stat(line: str) -> Stat | Unavailable:
    """Parse a line. The name may contain any character, brackets too: it ends at the last one."""
    head, closed, tail = line.rpartition(")")
    fields = tail.split()
    if not closed or len(fields) < 20:
        return Unavailable("the stat line is incomplete")
    name = head.partition("(")[2]
    try:
        return Stat(
            name=name,
            state=fields[0],
            parent=int(fields[1]),
            busy=int(fields[11]) + int(fields[12]),
            start=int(fields[19]),
            resident=int(fields[21]) if len(fields) > 21 else 0,
        )
    except ValueError:
        return Unavailable("the stat line has invalid numbers")


def describe_processes(
    processes: tuple[GpuProcess, ...], proc: ProcTree | None = None, *, full: bool = True
) -> tuple[GpuProcess, ...]:
    """Add user, command, start, container and rank to the processes that NVML listed."""
    if not processes:
        return ()
    tree = ProcTree() if proc is None else proc
    known: dict[int, ProcessFacts] = {}
    described = []
    for process in processes:
        if process.pid not in known:
            known[process.pid] = process_facts(tree, process.pid, full)
        described.append(add_facts(process, known[process.pid]))
    return tuple(described)


def add_facts(process: GpuProcess, facts: ProcessFacts) -> GpuProcess:
    """Add the result of `process_facts`. Not ``dataclasses.replace``: it takes longer."""
    return GpuProcess(
        process.pid,
        process.device,
        process.kinds,
        process.memory,
        process.mig,
        process.own,
        **facts,
    )


def process_facts(tree: ProcTree, pid: int, full: bool = True) -> ProcessFacts:
    """A process's user, name and command; with ``full`` also its start, container and rank."""
    status = tree.read(str(pid), "status")
    if isinstance(status, Unavailable):
        return _unknown_process(tree, status)
    fields = dict(line.partition(":\t")[::2] for line in status.split("\n"))
    real_uid = fields.get("Uid", "").split("\t")[0]
    uid: int | Unavailable = int(real_uid) if real_uid.isdecimal() else Unavailable("no Uid line")
    command = tree.read(str(pid), "cmdline")
    if not isinstance(command, Unavailable):
        command = _command(command)
    name = fields.get("Name", Unavailable("no Name line"))
    facts: ProcessFacts = {
        "uid": Reading(uid, "host"),
        "user": Reading(uid if isinstance(uid, Unavailable) else tree.user(uid), "host"),
        "name": Reading(name, "host"),
        # A kernel thread or a zombie has no arguments.
        "command": Reading(name if command == "" else command, "host"),
    }
    if full:
        stat = tree.stat(pid)
        started = stat if isinstance(stat, Unavailable) else tree.started_at(stat)
        cgroup = tree.read(str(pid), "cgroup")
        container = cgroup if isinstance(cgroup, Unavailable) else _container(cgroup)
        environ = tree.read(str(pid), "environ")
        facts["started_at"] = Reading(started, "host")
        facts["container"] = Reading(container, "host")
        facts["rank"] = Reading(_number(environ, _RANK), "host")
        facts["local_rank"] = Reading(_number(environ, _LOCAL_RANK), "host")
    return facts


def _unknown_process(tree: ProcTree, missing: Unavailable) -> ProcessFacts:
    first = tree.in_first_namespace()
    hidden = first is False and missing.status is ReadStatus.ERROR
    if hidden:
        reason = Unavailable("hidden by the PID namespace", ReadStatus.DENIED)
    elif missing.status is ReadStatus.DENIED:
        reason = missing
    else:
        reason = Unavailable("no such process: it ended, or it is hidden", ReadStatus.ERROR)
        if first is True:
            reason = Unavailable("no such process: it ended but still holds memory")
    text: Reading[str] = Reading(reason, "host")
    number: Reading[int] = Reading(reason, "host")
    return {
        "hidden": hidden,
        "uid": number,
        "user": text,
        "name": text,
        "command": text,
        "started_at": Reading(reason, "host"),
        "container": Reading(reason, "host"),
        "rank": number,
        "local_rank": number,
    }


def _command(raw: str) -> str:
    """A ``cmdline`` as text: arguments are separated by NULs; some programs overwrite it with one
    text and trailing NULs.
    """
    return raw.rstrip("\0").replace("\0", " ")


def _container(cgroup: str) -> Container | Unavailable:
    found = container_of(cgroup)
    return found or Unavailable("not in a container", ReadStatus.UNSUPPORTED)


def _number(environ: str | Unavailable, names: tuple[str, ...]) -> int | Unavailable:
    """The value of the first of these variables that is a number."""
    if isinstance(environ, Unavailable):
        return environ
    values = dict(entry.partition("=")[::2] for entry in environ.split("\0"))
    for name in names:
        text = values.get(name, "")
        if text.isdecimal() and text.isascii():
            return int(text)
    return Unavailable("the environment sets no rank", ReadStatus.UNSUPPORTED)


def sandbox_of(version: str) -> str:
    """The sandbox that reports this ``version`` in uname, or ``""``."""
    return "gVisor" if version == _GVISOR else ""


def describe_host(*, full: bool = True) -> HostInfo:
    """This machine and this process. Reads package versions without importing the packages."""
    tree = ProcTree()
    torch = _version("torch")
    names = os.uname()
    hostname, cpus = (names.nodename, os.cpu_count() or 0) if tree.is_real else tree.machine()
    memory = tree.read("meminfo") if full else Unavailable("", ReadStatus.NOT_COLLECTED)
    cgroup = tree.read("self", "cgroup") if full else Unavailable("", ReadStatus.NOT_COLLECTED)
    return HostInfo(
        hostname=hostname or names.nodename,
        platform=f"{names.sysname} {names.release} {names.machine}",
        sandbox=sandbox_of(names.version),
        python=".".join(map(str, sys.version_info[:3])),
        pid=os.getpid(),
        cpu_count=cpus,
        memory_total=meminfo(memory, "MemTotal"),
        memory_available=meminfo(memory, "MemAvailable"),
        container=Reading(
            cgroup if isinstance(cgroup, Unavailable) else _container(cgroup), "host"
        ),
        torch=torch,
        torch_cuda=_torch_cuda(torch),
        pycuda=_version("pycuda"),
        nvidia_ml_py=_version("nvidia-ml-py"),
    )


def kernel_module(proc: ProcTree | None = None) -> Reading[str]:
    """The version of the loaded NVIDIA kernel module, with "(open)" for the open one. It differs
    from the libraries' version after an update without a reboot.
    """
    text = (ProcTree() if proc is None else proc).read("driver", "nvidia", "version")
    if isinstance(text, Unavailable):
        if text.status is ReadStatus.DENIED:
            return Reading(text, "host")
        missing = Unavailable("the NVIDIA kernel module is not loaded", ReadStatus.UNSUPPORTED)
        return Reading(missing, "host")
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", text)
    if match is None:
        return Reading(Unavailable("its version file has no version"), "host")
    return Reading(match.group(1) + (" (open)" if "Open Kernel" in text else ""), "host")


def meminfo(text: str | Unavailable, name: str) -> Reading[Bytes]:
    """One line of ``/proc/meminfo``, in bytes."""
    if isinstance(text, Unavailable):
        return Reading(text, "host")
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.M)
    value = Bytes(int(match.group(1)) * 1024) if match else Unavailable(f"no {name} line")
    return Reading(value, "host")


def _version(distribution: str) -> Reading[str]:
    """A package's version, from the name of its ``.dist-info`` folder (PEP 427).

    ``importlib.metadata`` would take 20 ms to import: it imports ``email``.
    """
    prefix = distribution.replace("-", "_").lower() + "-"
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")  # noqa: PTH208 (hundreds of names, no paths needed)
        except OSError:
            continue  # sys.path may contain zip files and folders that do not exist
        for name in names:
            if name.endswith(".dist-info") and name.lower().startswith(prefix):
                return Reading(name[len(prefix) : -len(".dist-info")], "metadata")
    missing = Unavailable(f"{distribution} is not installed", ReadStatus.UNSUPPORTED)
    return Reading(missing, "metadata")


def _torch_cuda(torch: Reading[str]) -> Reading[str]:
    """The CUDA runtime that a torch wheel was built with, from its local version: ``+cu126``.

    PyPI's wheels have no local version; they depend on a ``nvidia-cuda-runtime`` package, whose
    version is used instead.
    """
    if isinstance(torch.value, Unavailable):
        return torch
    local = torch.value.partition("+")[2]
    if local == "cpu":
        missing = Unavailable("this torch is built without CUDA", ReadStatus.UNSUPPORTED)
        return Reading(missing, "metadata")
    match = re.fullmatch(r"cu(\d+)(\d)", local)
    if match:
        return Reading(f"{match.group(1)}.{match.group(2)}", "metadata")
    for package in ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu11"):
        runtime = _version(package)
        if not isinstance(runtime.value, Unavailable):
            return Reading(".".join(runtime.value.split(".")[:2]), "metadata")
    return Reading(Unavailable("not in the package metadata"), "metadata")


def process_details(pid: int, ticks: int) -> ProcessDetails:
    """One process in depth: the process with this PID that started at ``ticks`` (clock ticks since
    boot); 0 for any.

    Nothing is masked here: `gpuprobe.probes.secrets` masks secrets for screens.
    """
    from gpuprobe.model.machine.process import ProcessDetails  # 1 ms, not needed by `info`

    tree = ProcTree()
    stat = tree.stat(pid)
    if isinstance(stat, Unavailable) or (ticks and stat.start != ticks):
        return ProcessDetails(pid, _ENDED, _ENDED, _ENDED)
    command = tree.read(str(pid), "cmdline")
    environ = tree.read(str(pid), "environ")
    status = tree.read(str(pid), "status")
    threads = (
        None if isinstance(status, Unavailable) else re.search(r"^Threads:\s+(\d+)", status, 8)
    )
    return ProcessDetails(
        pid,
        command if isinstance(command, Unavailable) else tuple(command.rstrip("\0").split("\0")),
        _folder(tree, pid),
        environ
        if isinstance(environ, Unavailable)
        else tuple(
            (name, value)
            for name, equals, value in (one.partition("=") for one in environ.split("\0"))
            if equals
        ),
        int(threads.group(1)) if threads else 0,
    )


def _folder(tree: ProcTree, pid: int) -> str | Unavailable:
    try:
        return os.readlink(f"{tree.root}/{pid}/cwd")  # noqa: PTH115 (as `ProcTree`: no pathlib)
    except PermissionError:
        return Unavailable("no permission to read cwd", ReadStatus.DENIED)
    except OSError as error:
        return Unavailable(f"cwd: {error.strerror}")


def end_process(pid: int, ticks: int, number: int | None = None) -> None:
    """Send a signal, SIGTERM by default, to the process that has this PID *and* started at
    ``ticks``.

    ``ticks``: clock ticks since boot, field 22 of ``/proc/PID/stat``. The process is opened as a
    descriptor (``pidfd_open``, Linux 5.3) before its start is compared, so that the signal cannot
    reach a later process with the same PID.

    Raises EnvironmentUnavailable if the process has ended, the PID now belongs to a different one,
    or the kernel does not support this; PermissionError if the process belongs to another user.
    """
    if pid <= 1 or ticks <= 0:
        raise EnvironmentUnavailable(f"process {pid} is not visible from here")
    import signal  # 1 ms, which ``info`` does not need

    opened = getattr(os, "pidfd_open", None)
    send = getattr(signal, "pidfd_send_signal", None)
    if opened is None or send is None:
        raise EnvironmentUnavailable("this platform has no process file descriptors")
    try:
        descriptor = opened(pid)
    except ProcessLookupError as error:
        raise EnvironmentUnavailable(f"process {pid} has ended") from error
    try:
        # The real /proc, even if the screen shows a different tree: signals reach real processes.
        stat = ProcTree("/proc").stat(pid)
        if isinstance(stat, Unavailable) or stat.start != ticks:
            raise EnvironmentUnavailable(
                f"process {pid} has ended; its PID now belongs to another process"
            )
        try:
            send(descriptor, signal.SIGTERM if number is None else number)
        except ProcessLookupError as error:
            raise EnvironmentUnavailable(f"process {pid} has ended") from error
    finally:
        os.close(descriptor)
