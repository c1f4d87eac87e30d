"""Collectives other than all-reduce, checked; and each link of a ring of ranks, timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, Final

from gpuprobe.model.findings import Finding
from gpuprobe.model.machine.diagnosis import LinkSpeed
from gpuprobe.model.text import human_bytes, human_ns
from gpuprobe.model.values import Bytes
from gpuprobe.probes.distributed import rules
from gpuprobe.probes.distributed.rules import JobEnvironment

LINK_BYTES: Final = 4 << 20
"""What is sent over a link at a time: enough that bandwidth decides, not latency."""

_LINK_ROUNDS: Final = 8

SLOW_LINK: Final = 3.0
"""A link is slow if the fastest of its rounds takes this many times the median of all links."""

LEAST_NS: Final = 2_000_000
"""And that much longer: what the scheduler of a busy machine delays a process by."""


def checks(job: JobEnvironment, place: Any) -> dict[str, Callable[[], int]]:
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


def ring(job: JobEnvironment, place: Any, settled: Callable[[], int]) -> int:
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
        yield _finding(f"rank {rank} is slow: both of its links are", mine, middle, str(rank))
    for link in slow:
        if (link.source, link.target) not in named:
            where = f"from rank {link.source} to rank {link.target}"
            yield _finding(f"the link {where} is slow", [link], middle, where)


def _finding(what: str, slow: Sequence[LinkSpeed], middle: int, subject: str) -> Finding:
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
