"""The pretended job that an estimate is one rank of."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from gpuprobe.errors import UsageError
from gpuprobe.planning.peers import Peers


@dataclass(frozen=True, slots=True)
class Job:
    """``rank`` of ``ranks``, and how it reaches the others. Raises UsageError for a rank that the
    job does not have.
    """

    rank: int
    ranks: int
    peers: Peers | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise UsageError(
                f"there is no rank {self.rank} of {self.ranks}",
                hint=f"ranks are counted from 0: the last one is {self.ranks - 1}",
            )

    def environment(self, per_node: int) -> dict[str, object]:
        """What else ``torchrun`` sets, with so many ranks on each machine."""
        nodes = -(-self.ranks // per_node)
        return {
            "GROUP_RANK": self.rank // per_node,
            "GROUP_WORLD_SIZE": nodes,
            "LOCAL_WORLD_SIZE": min(per_node, self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.ranks,
        }

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.peers is not None:
            self.peers.failed("" if error is None else str(error).partition("\n")[0])
            self.peers.close()
