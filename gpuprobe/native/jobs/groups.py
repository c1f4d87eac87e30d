"""Process groups of a rank that is alone: torch's own over NCCL, and gloo's without a network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from gpuprobe.native.jobs import host, traffic
from gpuprobe.native.jobs.objects import OF_OBJECTS, OF_TENSORS, Objects, PeerRanks
from gpuprobe.native.jobs.pretended_job import Checkpoints, Reductions
from gpuprobe.native.jobs.store import LoneStore
from gpuprobe.patching import Patches
from gpuprobe.torch_support.callers import place_now
from gpuprobe.torch_support.traffic import Traffic
from gpuprobe.torch_support.version import installed

_RANKS_AT: Final = 2
"""Position of the ranks in ``_new_process_group_helper``: none for the default group."""

_stores: Final[list[LoneStore]] = []
"""C++ code does not keep the Python part of a store, and reads it as long as there is a group."""


class RankOfJob(Protocol):
    """The job that this process is one rank of: `gpuprobe.planning.peers.Job`."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    @property
    def peers(self) -> PeerRanks | None:
        """How the others are reached; None where they are not simulated."""


def place_in_job() -> tuple[str, int]:
    """Where the program is, as ``file:line``, and the rank of this process; -1 outside a job."""
    import torch.distributed as dist

    return place_now(), dist.get_rank() if dist.is_available() and dist.is_initialized() else -1


def without_splits(patches: Patches, sent: Traffic) -> None:
    """Have torch create the communicator of each group, instead of splitting it from another one:
    ``ncclCommSplit`` counts the calls of the other ranks, and the simulated NCCL has no other rank.
    ``sent`` notes the groups.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    c10d = dist.distributed_c10d
    if hasattr(c10d, "_get_split_source"):
        # Of the group; since torch 2.15 also of the backend.
        patches.set(c10d, "_get_split_source", lambda *_: None)
    original = getattr(c10d, "split_group", None)
    if original is None:
        return
    # What a rank outside all groups gets, and what a device mesh compares with.
    outside = c10d.GroupMember.NON_GROUP_MEMBER if installed() >= (2, 15) else None

    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: Any = None,
        backend: Any = None,
    ) -> Any:
        members = c10d.get_process_group_ranks(parent_pg)
        groups = [[members[rank] for rank in ranks] for ranks in split_ranks or ()]
        sent.differences.groups.update(dict.fromkeys(map(tuple, groups)))
        for chosen in groups:
            if c10d.get_rank() in chosen:
                return c10d.new_group(
                    chosen,
                    timeout=timeout,
                    backend=backend,
                    pg_options=pg_options,
                    use_local_synchronization=True,
                    group_desc=group_desc,
                )
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        return outside

    patches.set_all(c10d, {"split_group": split_group}, "torch.distributed")


def install(
    job: RankOfJob, per_node: int, patches: Patches, sent: Traffic, assume: Callable[[str], None]
) -> None:
    """Make this process ``job``'s rank, with ``per_node`` GPUs on each machine. ``sent`` notes what
    it sends; ``assume`` is called with each assumption that the figures depend on.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    c10d = dist.distributed_c10d
    original = c10d.init_process_group
    checkpoints = Checkpoints(patches)

    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        checkpoints.install()
        assume(
            f"{job.ranks} ranks, of which rank {job.rank} runs: the others are assumed to hold "
            "the same data"
        )
        store = LoneStore()
        _stores.append(store)
        original(backend, None, timeout, job.ranks, job.rank, store, *args, **kwargs)
        patches.add(functools.partial(_end, c10d, c10d._get_default_group()))

    patches.set_all(c10d, {"init_process_group": init_process_group}, "torch.distributed")
    if c10d.is_gloo_available():
        patches.set_all(c10d, {"ProcessGroupGloo": _alone(c10d)}, "torch.distributed")
    helper = c10d._new_process_group_helper
    places: dict[str, tuple[int, int]] = {}
    _placed(c10d.ProcessGroup, patches, places)

    @functools.wraps(helper)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if args[_RANKS_AT]:
            sent.differences.groups[tuple(args[_RANKS_AT])] = None
        made = helper(*args, **kwargs)
        size, rank, *_ = args
        if isinstance(made[0], c10d.ProcessGroup) and made[0].size() != size:
            places[made[0].group_name] = rank, size
        return made

    patches.set(c10d, "_new_process_group_helper", new_group)
    objects = Objects(job.peers)
    carriers = {name: objects.carrying(getattr(c10d, name)) for name in OF_OBJECTS}
    carriers |= {name: objects.carried(name, getattr(c10d, name)) for name in OF_TENSORS}
    patches.set_all(c10d, carriers, "torch.distributed")
    reductions = Reductions(patches)
    kinds: Any = dist.ReduceOp.RedOpType
    host.install(patches, lambda op: str(kinds(int(reductions.kind(op))).name))
    sent.differences.install(patches)
    traffic.install(patches, sent)
    import torch.multiprocessing

    spawn = functools.partial(_as_rank, job.rank % per_node)
    patches.set_all(torch.multiprocessing, {"spawn": spawn}, "torch.multiprocessing")


def _alone(c10d: Any) -> Any:
    original = c10d.ProcessGroupGloo

    class Alone(original):  # type: ignore[misc, valid-type]
        """Gloo's group of one: it connects to no other rank. `host` answers for its collectives."""

        def __init__(self, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
            super().__init__(torch.distributed.HashStore(), 0, 1, *args, **kwargs)

    Alone.__name__ = Alone.__qualname__ = original.__name__
    return Alone


def _placed(kind: Any, patches: Patches, places: dict[str, tuple[int, int]]) -> None:
    """Set rank and size of the groups in ``places``, by name: since torch 2.15 they come from the
    backend, and each gloo group here is made with one rank.
    """
    for which, name in enumerate(("rank", "size")):
        original = getattr(kind, name)

        def place(group: Any, which: int = which, original: Any = original) -> int:
            known = places.get(group.group_name) if places else None
            return original(group) if known is None else known[which]

        patches.set(kind, name, functools.wraps(original)(place))


def _end(c10d: Any, group: Any) -> None:
    """End the simulated job that the program did not end itself, for example because it failed: the
    next session in this process may be another rank of another job.
    """
    if c10d.is_initialized() and c10d._get_default_group() is group:
        c10d.destroy_process_group()


def _as_rank(
    local_rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """``torch.multiprocessing.spawn`` in a simulated job: the rank runs in this process."""
    fn(local_rank, *args)
