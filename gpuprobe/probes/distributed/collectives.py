"""The collectives that every rank of a job runs: whether they work, give right values, how fast."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median_low
from typing import Any, Final

from gpuprobe.model.findings import Finding
from gpuprobe.model.machine.diagnosis import LinkSpeed, TransferSpeed
from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Bytes
from gpuprobe.probes.distributed import rules
from gpuprobe.probes.distributed.rules import JobEnvironment

# (bytes, rounds) of the all-reduces that are timed; the last one on GPUs only.
_SIZES = ((1 << 10, 20), (64 << 10, 20), (1 << 20, 10), (16 << 20, 3), (256 << 20, 3))
_GPU_ONLY = 64 << 20

LINK_BYTES: Final = 4 << 20
"""What is sent over a link at a time: enough that bandwidth decides, not latency."""

_LINK_ROUNDS: Final = 8

SLOW_LINK: Final = 3.0
"""A link is slow if the fastest of its rounds takes this many times the median of all links."""

LEAST_NS: Final = 2_000_000
"""And that much longer: what the scheduler of a busy machine delays a process by."""


def ordinal(job: JobEnvironment) -> int:
    """The GPU of this rank: that of its local rank, or the only one its launcher lets it see."""
    import torch

    count: int = torch.cuda.device_count()
    return job.local_rank % count


def run_collectives(
    store: Any, job: JobEnvironment, backend: str, timeout: float, device: str
) -> dict[str, Any]:
    """Set up a process group and use it. Never raises for what a collective does wrong."""
    result: dict[str, Any] = {"steps": [], "error": "", "doing": "", "wrong": 0, "times": []}
    result |= {"others": {}, "link": 0}

    def step(name: str, action: Callable[[], Any]) -> Any:
        result["doing"] = name
        value = action()
        result["steps"].append(name)
        result["doing"] = ""
        return value

    try:
        with _group(store, job, backend, timeout, step) as place:
            step("barrier", lambda: _barrier(backend, timeout, place))
            result["wrong"] = step("all-reduce", lambda: _wrong_sums(job, place))
            if result["wrong"]:
                result["steps"].remove("all-reduce")
            for name, check in _checks(job, place).items():
                _checked(result, name, check, step)
            result["times"] = step("speed measured", lambda: _times(job, place, backend))
            if not result["times"]:
                result["steps"].remove("speed measured")
            else:
                result["link"] = step("links measured", lambda: _ring(job, place, _clock(place)))
    except (RuntimeError, ValueError, TimeoutError) as error:
        words = str(error).strip().splitlines()
        result["error"] = f"{type(error).__name__}: {words[0] if words else ''}"
    return result


def _checked(
    result: dict[str, Any], name: str, check: Callable[[], int], step: Callable[..., Any]
) -> None:
    """Run a check; a backend that does not have the collective is not at fault."""
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
"""What torch raises if a backend lacks a collective (torch/csrc/distributed/c10d/Backend.hpp)."""


def _clock(place: Any) -> Callable[[], int]:
    """A clock that is read when the device has done what it was given."""
    import torch

    def settled() -> int:
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter_ns()

    return settled


@contextmanager
def _group(
    store: Any, job: JobEnvironment, backend: str, timeout: float, step: Callable[..., Any]
) -> Iterator[Any]:
    """A process group of all ranks; gives the device its tensors belong on."""
    import torch
    import torch.distributed as dist

    place = torch.device("cpu")
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(variable)
    if backend == "nccl":
        place = torch.device("cuda", ordinal(job))
        torch.cuda.set_device(place)
        # A timeout is to be an exception here; by default NCCL's watchdog ends the process.
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
        yield place
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if backend == "nccl":
            if before is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = before


def _barrier(backend: str, timeout: float, place: Any) -> None:
    import torch.distributed as dist

    if backend == "gloo":  # the one that names who is missing
        dist.monitored_barrier(timeout=timedelta(seconds=timeout), wait_all_ranks=True)
    else:
        dist.barrier(device_ids=[place.index])


def _wrong_sums(job: JobEnvironment, place: Any) -> int:
    """How many elements of two all-reduces are not what they must be, on this rank."""
    import torch
    import torch.distributed as dist

    count = 1 << 16
    total = job.world_size * (job.world_size + 1) // 2
    # Sums below 2^24 are exact in float32 in any order.
    pattern = torch.arange(count, device=place) % max(1, min(1009, (1 << 24) // total))
    wrong = 0
    for dtype in (torch.int64, torch.float32):
        tensor = (pattern * (job.rank + 1)).to(dtype)
        dist.all_reduce(tensor)
        wrong += int((tensor != (pattern * total).to(dtype)).sum().item())
    return wrong


def _times(job: JobEnvironment, place: Any, backend: str) -> list[tuple[int, int, int]]:
    """(bytes, rounds, nanoseconds for all of them) of this rank. Nothing where it is alone."""
    import torch
    import torch.distributed as dist

    def settled() -> int:
        if backend == "nccl":
            torch.cuda.synchronize(place)
        return time.perf_counter_ns()

    rows = []
    for size, rounds in _SIZES if job.world_size > 1 else ():
        if backend == "gloo" and size > _GPU_ONLY:
            continue
        tensor = torch.zeros(size // 4, device=place)
        dist.all_reduce(tensor)  # connections and buffers are made at first use
        _barrier(backend, 60.0, place)
        begin = settled()
        for _ in range(rounds):
            dist.all_reduce(tensor)
        rows.append((size, rounds, settled() - begin))
    return rows


def check_results(results: Mapping[int, Any], backend: str) -> Iterator[Finding]:
    """What is wrong with what the ranks found."""
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


def speeds(results: list[Any], world_size: int) -> tuple[TransferSpeed, ...]:
    rows = []
    for row in zip(*(result["times"] for result in results), strict=True):
        size, rounds, _ = row[0]
        slowest = max(duration for _, _, duration in row)
        latency = max(1, slowest // rounds)
        factor = 2 * (world_size - 1) / world_size
        rows.append(TransferSpeed(Bytes(size), rounds, latency, factor * size / latency * 1e9))
    return tuple(rows)


# -- other collectives, and single links


def _checks(job: JobEnvironment, place: Any) -> dict[str, Callable[[], int]]:
    """By name, collectives of which each element is known beforehand; each returns how many
    elements are wrong on this rank.
    """
    import torch
    import torch.distributed as dist

    count, ranks, mine = 1 << 12, job.world_size, job.rank

    def block(value: int) -> Any:
        return torch.full((count,), value, dtype=torch.int64, device=place)

    def gathered() -> int:
        found = torch.empty(ranks * count, dtype=torch.int64, device=place)
        dist.all_gather_into_tensor(found, block(mine + 1))
        return _wrong(found, torch.cat([block(rank + 1) for rank in range(ranks)]))

    def scattered() -> int:
        found = block(0)
        dist.reduce_scatter_tensor(
            found, torch.cat([block(rank * (mine + 1)) for rank in range(ranks)])
        )
        return _wrong(found, block(mine * ranks * (ranks + 1) // 2))

    def exchanged() -> int:
        found = torch.empty(ranks * count, dtype=torch.int64, device=place)
        given = torch.cat([block(mine * ranks + rank) for rank in range(ranks)])
        dist.all_to_all_single(found, given)
        return _wrong(found, torch.cat([block(rank * ranks + mine) for rank in range(ranks)]))

    return {"all-gather": gathered, "reduce-scatter": scattered, "all-to-all": exchanged}


def _wrong(found: Any, wanted: Any) -> int:
    return int((found != wanted).sum().item())


def _ring(job: JobEnvironment, place: Any, settled: Callable[[], int]) -> int:
    """The fastest of some transfers from the rank before this one, in nanoseconds; 0 for a rank
    that is alone. One link at a time, so that links do not share what they go through.
    """
    import torch
    import torch.distributed as dist

    best = 0
    tensor = torch.zeros(LINK_BYTES // 4, device=place)
    word = torch.zeros(1, device=place)
    for source in range(job.world_size if job.world_size > 1 else 0):
        target = (source + 1) % job.world_size
        dist.barrier()
        for _ in range(_LINK_ROUNDS + 1):
            if job.rank == source:
                dist.recv(word, target)  # the other is ready
                dist.send(tensor, target)
            elif job.rank == target:
                dist.send(word, source)
                began = settled()
                dist.recv(tensor, source)
                spent = max(1, settled() - began)
                best = min(best, spent) if best else spent
    return best


def link_speeds(times: Mapping[int, int]) -> tuple[LinkSpeed, ...]:
    """``times`` by the rank that receives."""
    ranks = len(times)
    return tuple(
        LinkSpeed((rank - 1) % ranks, rank, Bytes(LINK_BYTES), spent)
        for rank, spent in sorted(times.items())
        if spent
    )


def check_links(links: Sequence[LinkSpeed]) -> Iterator[Finding]:
    """Links that are far slower than the others, and a rank whose links both are."""
    if len(links) < 3:  # of two, either may be the slow one
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
