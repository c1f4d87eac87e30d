"""The rules of ``gpuprobe doctor --distributed``, and the checks of what the ranks report.

Pure functions: the ranks communicate in `gpuprobe.probes.distributed.meeting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuprobe.model.findings import Finding, Level
from gpuprobe.model.machine.diagnosis import ClockSkew
from gpuprobe.model.rules import define
from gpuprobe.model.text import human_ns

_E, _W, _N = Level.ERROR, Level.WARNING, Level.NOTE


ENVIRONMENT = define(
    "GP180",
    "job-environment",
    _E,
    "Every rank has a complete environment",
    reads=("environment",),
    description="""A rank needs consistent `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and
    `MASTER_PORT`. `torchrun` sets them all; with other launchers a script must set them.
    """,
)
DISAGREEMENT = define(
    "GP181",
    "job-disagreement",
    (_E, _W),
    "The ranks agree on the job",
    reads=(
        "environment of every rank",
        "torch",
    ),
    description="""All ranks must have the same `WORLD_SIZE`, each its own `RANK`; ranks that would
    use the same GPU must differ in `LOCAL_RANK`. Different versions of torch are a warning.
    """,
)
UNREACHABLE = define(
    "GP182",
    "master-unreachable",
    (_E, _N),
    "Rank 0 can be reached",
    reads=(
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    description="""All ranks connect to `MASTER_ADDR:MASTER_PORT`. Usual causes: the name does not
    resolve, no route or a firewall, or rank 0 never started. On rank 0, an address of a different
    machine is a note: a service may forward it.
    """,
)
PORT_TAKEN = define(
    "GP183",
    "master-port-taken",
    _E,
    "The rendezvous port is free",
    reads=("MASTER_PORT",),
    description="""Another program, often the rest of a killed job, listens on `MASTER_PORT` of rank
    0's machine.
    """,
)
MISSING = define(
    "GP184",
    "ranks-missing",
    _E,
    "Every rank joins in time",
    reads=("the ranks' store",),
    description="""The named ranks did not connect to rank 0 within the time limit. Usual causes: a
    process did not start, a host is down, or a firewall blocks the connection.
    """,
)
COLLECTIVE = define(
    "GP185",
    "collective-failed",
    _E,
    "Process group, barrier and collectives work",
    reads=("torch.distributed",),
    description="""All ranks connected to rank 0, but the process group could not be set up, or a
    collective failed or did not end in time: the backend uses other ports and network interfaces.
    """,
)
WRONG = define(
    "GP186",
    "all-reduce-wrong",
    _E,
    "Collectives give the right values on every rank",
    reads=("torch.distributed",),
    description="""A collective whose result is known gave wrong values. Usual causes: broken
    hardware, a broken link, or peer-to-peer copies that an IOMMU redirects.
    """,
)
DEVICES = define(
    "GP187",
    "device-shared",
    (_E, _W),
    "Every rank has its own GPU",
    reads=("GPU UUID of every rank",),
    description="""Two ranks use one GPU, which NCCL rejects. Usually
    `torch.cuda.set_device(LOCAL_RANK)` is missing, or more processes than GPUs were started. If
    only some ranks have a GPU, that is a warning.
    """,
)
SKEW = define(
    "GP188",
    "clock-skew",
    (_W, _N),
    "The clocks of the ranks agree",
    reads=("wall clocks of all ranks",),
    description="""If clocks differ, logs of several hosts are hard to put in order, and tokens may
    be rejected. More than a second is a warning, more than 50 ms a note, after the error of the
    measurement is subtracted.
    """,
)

SLOW_LINK = define(
    "GP189",
    "slow-link",
    _W,
    "No link between neighbouring ranks is much slower than the others",
    reads=("torch.distributed",),
    description="""Each rank sends 4 MiB to the next one, one link at a time. A link that takes
    three times the median of all links, and 2 ms longer, slows down every collective. If both links
    of a rank are slow, the rank is named.
    """,
)

RULES = (
    ENVIRONMENT,
    DISAGREEMENT,
    UNREACHABLE,
    PORT_TAKEN,
    MISSING,
    COLLECTIVE,
    WRONG,
    DEVICES,
    SKEW,
    SLOW_LINK,
)

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SKEW_WARNING_NS = 1_000_000_000
_SKEW_NOTE_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """The job as this process's environment describes it, and the process's rank in it.

    ``agent_store``: the launcher already listens on the port (as ``torchrun`` does), so that no
    rank has to. ``run`` separates the keys of this attempt in the store from an earlier one's.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent_store: bool
    run: str


@dataclass(frozen=True, slots=True)
class Member:
    """One process as it describes itself when it joins. ``device``: a GPU's UUID, or ``cpu``."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: str
    torch: str


def read_job(environ: Mapping[str, str]) -> JobEnvironment | tuple[Finding, ...]:
    """The job, or findings about an invalid environment."""
    missing = [name for name in _REQUIRED if not environ.get(name, "").strip()]
    if missing:
        return (
            ENVIRONMENT.finding(
                f"not started as a rank of a job: {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set",
                *((name, environ[name]) for name in _REQUIRED if environ.get(name, "").strip()),
                fix="Start it with torchrun on every machine of the job.",
                code="torchrun --standalone --nproc-per-node 2 -m gpuprobe doctor --distributed",
                subject=",".join(missing),
            ),
        )
    numbers: dict[str, int] = {}
    wrong = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        text = environ[name].strip()
        if text.isdecimal() and text.isascii():
            numbers[name] = int(text)
        else:
            wrong.append(f"{name}={text} is not an integer")
    if not wrong:
        if not 0 < numbers["MASTER_PORT"] < 65536:
            wrong.append(f"MASTER_PORT={numbers['MASTER_PORT']} is not a port (1 to 65535)")
        if numbers["WORLD_SIZE"] < 1:
            wrong.append("WORLD_SIZE is 0")
        elif numbers["RANK"] >= numbers["WORLD_SIZE"]:
            wrong.append(
                f"RANK={numbers['RANK']} does not exist with WORLD_SIZE={numbers['WORLD_SIZE']}: "
                "ranks count from 0"
            )
        if numbers["LOCAL_RANK"] > numbers["RANK"]:
            wrong.append(f"LOCAL_RANK={numbers['LOCAL_RANK']} is above RANK={numbers['RANK']}")
        local_size = environ.get("LOCAL_WORLD_SIZE", "")
        if local_size.isdecimal() and numbers["LOCAL_RANK"] >= int(local_size):
            wrong.append(
                f"LOCAL_RANK={numbers['LOCAL_RANK']} does not exist with "
                f"LOCAL_WORLD_SIZE={local_size}"
            )
    if wrong:
        return tuple(
            ENVIRONMENT.finding(
                message,
                *((name, environ[name]) for name in _REQUIRED),
                fix="Fix the launcher's settings; torchrun sets these automatically.",
                subject=message.partition("=")[0],
            )
            for message in wrong
        )
    return JobEnvironment(
        numbers["RANK"],
        numbers["WORLD_SIZE"],
        numbers["LOCAL_RANK"],
        environ["MASTER_ADDR"].strip(),
        numbers["MASTER_PORT"],
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "/".join(
            environ.get(name, "-") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        ),
    )


def missing_ranks(world_size: int, members: Sequence[Member]) -> tuple[int, ...]:
    """The ranks that no process has, in order."""
    return tuple(sorted(set(range(world_size)) - {member.rank for member in members}))


def check_members(
    job: JobEnvironment, members: Sequence[Member], timeout: float
) -> Iterator[Finding]:
    """Findings of rank 0 about the processes that joined within ``timeout`` seconds."""
    missing = missing_ranks(job.world_size, members)
    if missing:
        listed = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
        hosts = sorted({member.host for member in members})
        yield MISSING.finding(
            f"rank{'' if len(missing) == 1 else 's'} {listed} of {job.world_size} did not join "
            f"within {timeout:g} s",
            ("joined", ", ".join(str(m.rank) for m in sorted(members, key=lambda m: m.rank))),
            ("hosts that joined", ", ".join(hosts)),
            fix="Check the logs on these ranks' hosts: did the process start, and can it reach "
            f"{job.address}:{job.port}? A slow start needs a larger --timeout.",
            code=f"nc -vz {job.address} {job.port}",
            subject=listed,
        )
    for member in members:
        if member.world_size != job.world_size:
            yield DISAGREEMENT.finding(
                f"rank {member.rank} has WORLD_SIZE={member.world_size}, rank 0 has "
                f"{job.world_size}",
                ("host", member.host),
                ("process", member.pid),
                fix="Start all ranks with the same WORLD_SIZE: the same --nnodes and "
                "--nproc-per-node on every machine.",
                subject=f"world size {member.rank}",
            )
    yield from _duplicates(members, "rank", lambda m: (m.rank,))
    # Two nodes of a job may be on one host: the same LOCAL_RANK matters only on the same GPU.
    on_gpus = [member for member in members if member.device != "cpu"]
    yield from _duplicates(on_gpus, "LOCAL_RANK", lambda m: (m.device, m.host, m.local_rank), 1)
    versions = sorted({member.torch for member in members})
    if len(versions) > 1:
        yield DISAGREEMENT.finding(
            "the ranks have different versions of torch: " + ", ".join(versions),
            *((f"rank {member.rank} on {member.host}", member.torch) for member in members),
            fix="Install the same version everywhere.",
            subject="torch",
            level=_W,
        )
    gpus = [member for member in members if member.device != "cpu"]
    if gpus and len(gpus) < len(members):
        without = ", ".join(str(m.rank) for m in members if m.device == "cpu")
        yield DEVICES.finding(
            f"some ranks have no GPU: {without}",
            *((f"rank {member.rank} on {member.host}", member.device) for member in members),
            fix="Give every rank a GPU, or none.",
            code="gpuprobe info",
            subject="mixed",
            level=_W,
        )
    by_device: dict[tuple[str, str], list[Member]] = {}
    for member in gpus:
        by_device.setdefault((member.host, member.device), []).append(member)
    for (host, device), sharing in by_device.items():
        if len({member.rank for member in sharing}) > 1:
            ranks = " and ".join(str(member.rank) for member in sharing)
            yield DEVICES.finding(
                f"ranks {ranks} are on the same GPU of {host}",
                ("GPU", device),
                *((f"rank {m.rank}", f"LOCAL_RANK {m.local_rank}") for m in sharing),
                fix="Start one process per GPU, and let each use the GPU of its LOCAL_RANK.",
                code='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
                subject=device,
            )


def _duplicates(
    members: Sequence[Member],
    what: str,
    key: Callable[[Member], tuple[object, ...]],
    hidden: int = 0,
) -> Iterator[Finding]:
    """Findings for processes with the same key, whose first ``hidden`` parts are not shown."""
    groups: dict[tuple[object, ...], list[Member]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    for whole, claimants in groups.items():
        claim = whole[hidden:]
        if len(claimants) > 1:
            yield DISAGREEMENT.finding(
                f"{len(claimants)} processes claim to be {what} {claim[-1]}"
                + (f" on {claim[0]}" if len(claim) > 1 else ""),
                *((f"process {m.pid} on {m.host}", f"rank {m.rank}") for m in claimants),
                fix="Give each process its own number. Is an earlier job still running?",
                subject=f"{what} {claim[-1]}",
            )


def check_skews(skews: Sequence[ClockSkew]) -> Iterator[Finding]:
    """Findings for clocks that differ by more than the error of the measurement."""
    for skew in skews:
        certain = abs(skew.ahead_ns) - skew.error_ns
        if certain > _SKEW_NOTE_NS:
            word = "ahead of" if skew.ahead_ns > 0 else "behind"
            yield SKEW.finding(
                f"rank {skew.rank}'s clock is {human_ns(abs(skew.ahead_ns))} {word} rank 0's",
                ("give or take", human_ns(skew.error_ns)),
                fix="Synchronise the clocks of all machines with NTP (chrony).",
                code="chronyc tracking",
                subject=f"rank {skew.rank}",
                level=_W if certain > _SKEW_WARNING_NS else _N,
            )
