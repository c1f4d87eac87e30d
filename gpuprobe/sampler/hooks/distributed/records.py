"""Each operation with other ranks, of the first steps: group, bytes, line, module and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from gpuprobe.model.place import NoPlace, Place, SourceLine
from gpuprobe.model.run.communication import (
    MOST_OPERATIONS,
    CollectiveRecord,
    group_text,
    wire_bytes,
)
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.torch_support.callers import TORCH, module_at_work, program_line
from gpuprobe.torch_support.tensors import tensors_in

_NOT_BLOCKING: Final = Unavailable("the call does not wait for it", ReadStatus.NOT_COLLECTED)
_MESH: Final = "mesh_"
"""How ``DeviceMesh`` begins the description of a group: the name of the dimension follows."""


class Records:
    """The records since the last `take`; made in all threads. ``on``: whether any are wanted.
    ``virtual``: GPUs are in software, and a call returns when its operation is over.
    """

    def __init__(
        self, started_ns: Callable[[], int], on_fault: Callable[[Exception], None]
    ) -> None:
        """``started_ns``: when the session began, by ``time.perf_counter_ns``. ``on_fault`` gets
        what goes wrong here: it is not the program's.
        """
        self.on = True
        self.virtual = False
        self.left_out = False  # an operation, as a step had too many
        self._on_fault = on_fault
        self._started_ns = started_ns
        self._sequence: Counter[str] = Counter()
        self._records: list[CollectiveRecord] = []
        self._buckets: tuple[Any, list[int]] | None = None

    def called(
        self,
        op: str,
        payload: int,
        group: Any,
        tensor: Any,
        peer: int | None,
        span: tuple[int, int],
        blocks: bool,
    ) -> None:
        """A call has returned. ``group`` is what its caller names a group; ``tensor`` is what it is
        about, or a list of that; ``span`` when it began and ended; ``blocks``: it returned no
        handle.
        """
        try:
            found = group_of(group)
            if found is None:
                return
            first = next(tensors_in(tensor), None)
            on_gpu = first is not None and first.device.type != "cpu"
            over = blocks and (self.virtual or not on_gpu)
            dtype = "" if first is None else _name(first.dtype)
            self._add(op, payload, found, dtype, _place(), module_at_work(), peer, span, over)
        except Exception as error:  # noqa: BLE001 - it is not the program's
            self.on = False
            self._on_fault(error)

    def expect(self, module: Any, sizes: list[int]) -> None:
        """The next backward pass exchanges the buckets of a DistributedDataParallel."""
        self._buckets = (module, sizes)

    def backward_done(self, computed: int | None, over: int) -> None:
        """The pass is over; its gradients were ``computed`` then, if that is known."""
        expected, self._buckets = self._buckets, None
        if expected is None:
            return
        module, sizes = expected
        kinds = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
        dtype = _name(kinds.pop()) if len(kinds) == 1 else ""
        place, name = _place(), type(module).__name__
        for size in sizes:
            span = (computed or 0, over)
            self._add(
                "all_reduce",
                size,
                module.process_group,
                dtype,
                place,
                name,
                None,
                span,
                bool(computed),
            )

    def _add(
        self,
        op: str,
        payload: int,
        group: Any,
        dtype: str,
        place: SourceLine,
        module: str,
        peer: int | None,
        span: tuple[int, int],
        over: bool,
    ) -> None:
        label, ranks = str(group.group_name), group.size()
        self._sequence[label] += 1
        if len(self._records) >= MOST_OPERATIONS:
            self.left_out = True
            return
        started = self._started_ns()
        described = str(group.group_desc)
        unknown = Unavailable("unknown", ReadStatus.NOT_COLLECTED)
        self._records.append(
            CollectiveRecord(
                group=label,
                axis=described.removeprefix(_MESH) if described.startswith(_MESH) else "",
                ranks=ranks,
                sequence=self._sequence[label],
                op=op,
                dtype=dtype,
                payload=Bytes(payload),
                wire=wire_bytes(op, payload, ranks),
                place=place,
                module=module,
                arrival_ns=span[0] - started if span[0] else unknown,
                completion_ns=span[1] - started if over else _NOT_BLOCKING,
                members=group_text(dist.get_process_group_ranks(group)),
                peer=unknown if peer is None else peer,
            )
        )

    def take(self) -> list[CollectiveRecord]:
        """What was recorded since the last time."""
        found, self._records = self._records, []
        return found


def group_of(group: Any) -> Any:
    """The process group that a caller names: itself, its name, a mesh and one of its dimensions, or
    none for all ranks. None for a list of ranks.
    """
    if group is None:
        return dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)
    if isinstance(group, tuple):
        return group[0].get_group(group[1])
    if isinstance(group, list):
        return None
    return group if hasattr(group, "group_name") else group.get_group()


def _place() -> SourceLine:
    """The program's line; in a thread of the autograd engine there is none."""
    file, line = program_line()
    if file.startswith((TORCH, "<frozen", "<unknown>")) or "threading.py" in file:
        return NoPlace.AUTOGRAD_ENGINE
    return Place(file, line)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
