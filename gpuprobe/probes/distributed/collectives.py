"""The collectives that every rank of a job runs: they are checked for errors, values and speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median_low
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

from gpuprobe.model.findings import Finding
from gpuprobe.model.machine.diagnosis import LinkSpeed, TransferSpeed
from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Bytes
from gpuprobe.probes.distributed import rules
from gpuprobe.probes.distributed.rules import JobEnvironment

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import Store

T = TypeVar("T")

# (bytes, rounds) of the all-reduces that are timed; the last one on GPUs only.
_SIZES = ((1 << 10, 20), (64 << 10, 20), (1 << 20, 10), (16 << 20, 3), (256 << 20, 3))
_GPU_ONLY = 64 << 20

LINK_BYTES: Final = 4 << 20
"""Bytes of one transfer over a link: large enough that bandwidth matters, not latency."""

_LINK_ROUNDS: Final = 8

SLOW_LINK: Final = 3.0
"""A link is slow if the fastest of its rounds takes this many times the median of all links."""

LEAST_NS: Final = 2_000_000
"""And this much longer: a busy machine's scheduler may delay a process by this."""


def ordinal(job: JobEnvironment) -> int:
    """The GPU of this rank: that of its local rank, or the only one that its launcher shows it."""
    import torch

    count: int = torch.cuda.device_count()
    return job.local_rank % count


class Result(TypedDict):
    """The results of one rank. ``steps``: those that succeeded; ``doing``: the one that failed,
    with ``error``. ``wrong``: elements of all-reduces, ``others``: elements of other collectives,
    by name. ``times``: (bytes, rounds, nanoseconds of all of them) of all-reduces. ``link``:
    nanoseconds of a transfer from the previous rank, 0 if not measured.
    """

    steps: list[str]
    error: str
    doing: str
    wrong: int
    times: list[tuple[int, int, int]]
    others: dict[str, int]
    link: int


Step = Callable[[str, Callable[[], T]], T]


def run_collectives(store: Store, job: JobEnvironment, backend: str, timeout: float) -> Result:
    """Set up a process group and use it. Errors of collectives are in the result, not raised."""
    result: Result = {
        "steps": [],
        "error": "",
        "doing": "",
        "wrong": 0,
        "times": [],
        "others": {},
        "link": 0,
    }

    def step(name: str, action: Callable[[], T]) -> T:
        result["doing"] = name
        value = action()
        result["steps"].append(name)
        result["doing"] = ""
        return value

    try:
        with _group(store, job, backend, timeout, step) as device:
            step("barrier", lambda: _barrier(backend, timeout, device))
            result["wrong"] = step("all-reduce", lambda: _wrong_sums(job, device))
            if result["wrong"]:
                result["steps"].remove("all-reduce")
            for name, check in _checks(job, device).items():
                _checked(result, name, check, step)
            result["times"] = step("speed measured", lambda: _times(job, device, backend))
            if not result["times"]:
                result["steps"].remove("speed measured")
            else:
                result["link"] = step("links measured", lambda: _ring(job, device))
    except (RuntimeError, ValueError, TimeoutError) as error:
        lines = str(error).strip().splitlines()
        result["error"] = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return result


def _checked(result: Result, name: str, check: Callable[[], int], step: Step[int]) -> None:
    """Run a check. A backend without the collective is not an error."""
    try:
        wrong = step(name, check)
    except RuntimeError as error:
        if not any(word in str(error) for word in _NOT_SUPPORTED):
            raise
        result["doing"] = ""
        return
    if wrong:
        result["others"][name] = wrong
        result["steps"].remove(name)


_NOT_SUPPORTED = ("does not support", "not supported", "not implemented")
"""Parts of torch's error for a missing collective (torch/csrc/distributed/c10d/Backend.hpp)."""


def _clock(device: torch.device) -> int:
    """The time in nanoseconds when the device has finished its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


@contextmanager
def _group(
    store: Store, job: JobEnvironment, backend: str, timeout: float, step: Step[None]
) -> Iterator[torch.device]:
    """A process group of all ranks, and the device for its tensors."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(variable)
    if backend == "nccl":
        device = torch.device("cuda", ordinal(job))
        torch.cuda.set_device(device)
        # So that a timeout raises; by default NCCL's watchdog ends the process.
        os.environ[variable] = "1"
    try:
        step(
            "process group",
            lambda: dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=job.rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=timeout),
            ),
        )
        yield device
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if backend == "nccl":
            if before is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = before


def _barrier(backend: str, timeout: float, device: torch.device) -> None:
    import torch.distributed as dist

    if backend == "gloo":  # its barrier names the missing ranks
        dist.monitored_barrier(timeout=timedelta(seconds=timeout), wait_all_ranks=True)
    else:
        dist.barrier(device_ids=[device.index])


def _wrong_sums(job: JobEnvironment, device: torch.device) -> int:
    """The number of wrong elements in two all-reduces on this rank."""
    import torch
    import torch.distributed as dist

    count = 1 << 16
    total = job.world_size * (job.world_size + 1) // 2
    # Sums below 2^24 are exact in float32 in any order.
    pattern = torch.arange(count, device=device) % max(1, min(1009, (1 << 24) // total))
    wrong = 0
    for dtype in (torch.int64, torch.float32):
        tensor = (pattern * (job.rank + 1)).to(dtype)
        dist.all_reduce(tensor)
        wrong += int((tensor != (pattern * total).to(dtype)).sum().item())
    return wrong


def _times(job: JobEnvironment, device: torch.device, backend: str) -> list[tuple[int, int, int]]:
    """(bytes, rounds, nanoseconds of all of them) of all-reduces; empty for a job of one rank."""
    import torch
    import torch.distributed as dist

    rows = []
    for size, rounds in _SIZES if job.world_size > 1 else ():
        if backend == "gloo" and size > _GPU_ONLY:
            continue
        tensor = torch.zeros(size // 4, device=device)
        dist.all_reduce(tensor)  # connections and buffers are created at first use
        _barrier(backend, 60.0, device)
        begin = _clock(device)
        for _ in range(rounds):
            dist.all_reduce(tensor)
        rows.append((size, rounds, _clock(device) - begin))
    return rows


def check_results(results: Mapping[int, Result | None], backend: str) -> Iterator[Finding]:
    """Findings about the ranks' results, None for a rank without one."""
    silent = [rank for rank, result in results.items() if result is None]
    failed = {rank: r for rank, r in results.items() if r is not None and r["error"]}
    if silent or failed:
        doing = next((r["doing"] for r in failed.values()), "") or "collectives"
        evidence = [(f"rank {rank}", result["error"]) for rank, result in failed.items()]
        evidence += [(f"rank {rank}", "no answer in time") for rank in silent]
        hint = (
            "NCCL_DEBUG=INFO prints details; NCCL_SOCKET_IFNAME selects the interface."
            if backend == "nccl"
            else "GLOO_SOCKET_IFNAME selects the interface; the firewall must allow all ports "
            "between the machines."
        )
        yield rules.COLLECTIVE.finding(
            f"{doing} failed ({backend})",
            *evidence,
            fix=hint,
            code="export NCCL_DEBUG=INFO"
            if backend == "nccl"
            else "export GLOO_SOCKET_IFNAME=eth0",
            subject=doing,
        )
    done = {rank: result for rank, result in results.items() if result is not None}
    for name in dict.fromkeys(name for r in done.values() for name in r.get("others", {})):
        at = {rank: r["others"][name] for rank, r in done.items() if name in r["others"]}
        yield rules.WRONG.finding(
            f"{name} gave wrong values on rank {', '.join(map(str, at))}",
            *((f"rank {rank}", f"{count} elements wrong") for rank, count in at.items()),
            fix="Run again with NCCL_P2P_DISABLE=1, and test the GPUs and links.",
            code="NCCL_P2P_DISABLE=1 torchrun ... -m gpuprobe doctor --distributed",
            subject=name,
        )
    wrong = {rank: r["wrong"] for rank, r in done.items() if r["wrong"]}
    if wrong:
        yield rules.WRONG.finding(
            f"an all-reduce gave wrong sums on rank {', '.join(map(str, wrong))}",
            *((f"rank {rank}", f"{count} elements wrong") for rank, count in wrong.items()),
            fix="Run again with NCCL_P2P_DISABLE=1. If the sums are then right, disable the "
            "IOMMU (ACS) or fix it in the BIOS; otherwise test the GPUs and links.",
            code="NCCL_P2P_DISABLE=1 torchrun ... -m gpuprobe doctor --distributed",
            subject="sum",
        )


def speeds(results: list[Result], world_size: int) -> tuple[TransferSpeed, ...]:
    """The latency and bandwidth of all-reduces of each size, by the slowest rank."""
    rows = []
    for row in zip(*(result["times"] for result in results), strict=True):
        size, rounds, _ = row[0]
        slowest = max(duration for _, _, duration in row)
        latency = max(1, slowest // rounds)
        factor = 2 * (world_size - 1) / world_size
        rows.append(TransferSpeed(Bytes(size), rounds, latency, factor * size / latency * 1e9))
    return tuple(rows)


# -- other collectives, and single links


def _checks(job: JobEnvironment, device: torch.device) -> dict[str, Callable[[], int]]:
    """Collectives by name whose elements are known beforehand; each returns the number of wrong
    elements on this rank.
    """
    import torch
    import torch.distributed as dist

    count, ranks, mine = 1 << 12, job.world_size, job.rank

    def block(value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=device)

    def gathered() -> int:
        found = torch.empty(ranks * count, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(found, block(mine + 1))
        return _wrong(found, torch.cat([block(rank + 1) for rank in range(ranks)]))

    def scattered() -> int:
        found = block(0)
        dist.reduce_scatter_tensor(
            found, torch.cat([block(rank * (mine + 1)) for rank in range(ranks)])
        )
        return _wrong(found, block(mine * ranks * (ranks + 1) // 2))

    def exchanged() -> int:
        found = torch.empty(ranks * count, dtype=torch.int64, device=device)
        sent = torch.cat([block(mine * ranks + rank) for rank in range(ranks)])
        dist.all_to_all_single(found, sent)
        return _wrong(found, torch.cat([block(rank * ranks + mine) for rank in range(ranks)]))

    return {"all-gather": gathered, "reduce-scatter": scattered, "all-to-all": exchanged}


def _wrong(found: Tensor, expected: Tensor) -> int:
    return int((found != expected).sum().item())


def _ring(job: JobEnvironment, device: torch.device) -> int:
    """The fastest of several transfers from the previous rank, in nanoseconds; 0 for a job of one
    rank. One link at a time, so that links do not compete for switches and buses.
    """
    import torch
    import torch.distributed as dist

    best = 0
    tensor = torch.zeros(LINK_BYTES // 4, device=device)
    ready = torch.zeros(1, device=device)
    for source in range(job.world_size if job.world_size > 1 else 0):
        target = (source + 1) % job.world_size
        dist.barrier()
        for _ in range(_LINK_ROUNDS + 1):
            if job.rank == source:
                dist.recv(ready, target)
                dist.send(tensor, target)
            elif job.rank == target:
                dist.send(ready, source)
                began = _clock(device)
                dist.recv(tensor, source)
                duration = max(1, _clock(device) - began)
                best = min(best, duration) if best else duration
    return best


def link_speeds(times: Mapping[int, int]) -> tuple[LinkSpeed, ...]:
    """The links of the ring, from ``times`` by the receiving rank."""
    ranks = len(times)
    return tuple(
        LinkSpeed((rank - 1) % ranks, rank, Bytes(LINK_BYTES), duration)
        for rank, duration in sorted(times.items())
        if duration
    )


def check_links(links: Sequence[LinkSpeed]) -> Iterator[Finding]:
    """Findings for links that are much slower than the others, and for a rank with two of them."""
    if len(links) < 3:  # with two links, either may be the slow one
        return
    middle = median_low(link.latency_ns for link in links)
    slow = [
        link
        for link in links
        if link.latency_ns > SLOW_LINK * middle and link.latency_ns - middle > LEAST_NS
    ]
    both = {link.source for link in slow} & {link.target for link in slow}
    named: set[tuple[int, int]] = set()
    for rank in sorted(both):
        mine = [link for link in slow if rank in (link.source, link.target)]
        named |= {(link.source, link.target) for link in mine}
        yield _slow_link(f"rank {rank} is slow: both of its links are", mine, middle, str(rank))
    for link in slow:
        if (link.source, link.target) not in named:
            where = f"from rank {link.source} to rank {link.target}"
            yield _slow_link(f"the link {where} is slow", [link], middle, where)


def _slow_link(what: str, slow: Sequence[LinkSpeed], middle: int, subject: str) -> Finding:
    worst = max(link.latency_ns for link in slow)
    return rules.SLOW_LINK.finding(
        f"{what}: {human_bytes(LINK_BYTES)} take {human_ns(worst)}, {worst / middle:.1f} times the "
        "median of all links",
        *(
            (f"rank {link.source} to rank {link.target}", human_ns(link.latency_ns))
            for link in slow
        ),
        ("median", human_ns(middle)),
        fix="Compare the interface, cable and switch port of these ranks' hosts with those of the "
        "others; on one host, the PCIe link and NUMA node of the GPU.",
        code="gpuprobe info -v",
        subject=subject,
    )
