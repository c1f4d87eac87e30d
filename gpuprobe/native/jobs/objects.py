"""Python objects that ranks send to each other: a program acts on them (a stage of a pipeline is
sent the shapes of its inputs), so they come from the rank that sends them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from gpuprobe.errors import UsageError

OF_OBJECTS: Final = (
    "broadcast_object_list",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
OF_TENSORS: Final = ("batch_isend_irecv", "broadcast", "recv", "scatter", "send")
"""What the functions of objects call."""


class PeerRanks(Protocol):
    """The other ranks of the job, each of which is a process once a rank waits for it."""

    def post(self, name: str, content: bytes) -> None:
        """Have ``content`` ready for whoever takes what has that name."""
        ...

    def take(self, name: str, rank: int) -> bytes:
        """What ``rank`` posts under a name, once it has. Raises ProgramFailed if it never does."""
        ...


class Objects:
    """Carries the bytes of objects from rank to rank, during calls of `OF_OBJECTS`.
    ``peers``: None where the other ranks are not run.
    """

    def __init__(self, peers: PeerRanks | None) -> None:
        self._peers = peers
        self._calls = threading.local()
        self._counts: Counter[str] = Counter()

    def carrying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """One of `OF_OBJECTS`."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.depth = getattr(self._calls, "depth", 0) + 1
            try:
                return original(*args, **kwargs)
            finally:
                self._calls.depth -= 1

        return call

    def carried(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """One of `OF_TENSORS`: torch does what it does, and what is received is written then."""
        of = getattr(self, f"_{name}")
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if getattr(self._calls, "depth", 0):
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                of(given.arguments)
            return found

        return call

    def _send(self, given: dict[str, Any]) -> None:
        group = _group(given)
        self._post(group, dist.get_rank(), str(_rank(given, "dst")), given["tensor"])

    def _recv(self, given: dict[str, Any]) -> None:
        self._take(_group(given), _rank(given, "src"), str(dist.get_rank()), given["tensor"])

    def _batch_isend_irecv(self, given: dict[str, Any]) -> None:
        for one in given["p2p_op_list"]:
            group = one.group or dist.distributed_c10d._get_default_group()
            if one.op.__name__ == "isend":
                self._post(group, dist.get_rank(), str(one.peer), one.tensor)
            else:
                self._take(group, one.peer, str(dist.get_rank()), one.tensor)

    def _broadcast(self, given: dict[str, Any]) -> None:
        source = _rank(given, "src")
        if source == dist.get_rank():
            self._post(_group(given), source, "all", given["tensor"])
        else:
            self._take(_group(given), source, "all", given["tensor"])

    def _scatter(self, given: dict[str, Any]) -> None:
        group, source = _group(given), _rank(given, "src")
        if source == dist.get_rank():
            for rank, part in zip(_ranks(group), given["scatter_list"], strict=True):
                self._post(group, source, str(rank), part)
        else:
            self._take(group, source, str(dist.get_rank()), given["tensor"])

    def _name(self, group: Any, source: int, target: str) -> str:
        """The name of a message. It identifies ranks by their number in the whole job, in any
        group."""
        name = f"{'.'.join(map(str, _ranks(group)))}-{source}-{target}"
        digest = hashlib.sha256(name.encode()).hexdigest()[:24]
        self._counts[digest] += 1
        return f"{digest}-{self._counts[digest]}"

    def _post(self, group: Any, source: int, target: str, tensor: torch.Tensor) -> None:
        if self._peers is not None:
            whole = tensor.detach().contiguous()
            content = ctypes.string_at(whole.data_ptr(), whole.nbytes)
            self._peers.post(self._name(group, source, target), content)

    def _take(self, group: Any, source: int, target: str, tensor: torch.Tensor) -> None:
        if self._peers is None:
            raise UsageError(
                f"rank {dist.get_rank()} waits for Python objects from rank {source}, which does "
                "not run: a function is estimated as one rank alone",
                hint="estimate a script: gpuprobe estimate --ranks N train.py",
            )
        content = self._peers.take(self._name(group, source, target), source)
        # Memory of the device is memory of the host, and torch sends contiguous tensors here.
        ctypes.memmove(tensor.data_ptr(), content, min(len(content), tensor.nbytes))


def _group(given: dict[str, Any]) -> Any:
    return given.get("group") or dist.distributed_c10d._get_default_group()


def _ranks(group: Any) -> Sequence[int]:
    return list(dist.get_process_group_ranks(group))


def _rank(given: dict[str, Any], name: str) -> int:
    """The number in the whole job of the rank that an argument names."""
    rank = given.get(name)
    if rank is None:
        rank = dist.get_global_rank(_group(given), given[f"group_{name}"])
    return int(rank)
