"""The words of PyTorch's caching allocator, as data.

Two traps in torch's own vocabulary are settled here. The state torch documents as
``active_awaiting_free`` is emitted as ``active_pending_free``: both are accepted. And torch's
viewer counts such blocks as free: here they have a separate bucket, *pending*, so that

    allocated + pending + cached == reserved

holds for every account this package prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gpuprobe.model.values import Address, Bytes, Index, Rank, Size, Unavailable


class Category(str, Enum):
    """What a block of memory is for. The names follow ``torch.profiler``'s memory profile."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"  # made in the forward pass, needed by the backward pass
    TEMPORARY = "temporary"  # lives and dies within one phase
    INPUT = "input"
    BUFFER = "buffer"  # a module's registered buffer, such as batch-norm statistics
    AUTOGRAD_DETAIL = "autograd_detail"  # made by the backward pass, and freed in it
    WORKSPACE = "workspace"  # library scratch memory, such as cuBLAS workspaces
    WEIGHT_CAST = "weight_cast"  # a parameter in another type, as autocast makes and keeps it
    GRADIENT_BUCKET = "gradient_bucket"  # what ranks exchange gradients in
    GATHERED_PARAMETER = "gathered_parameter"  # whole, of a parameter that ranks keep in parts
    KV_CACHE = "kv_cache"  # and other state that calls of a model keep in inference
    OTHER = "other"  # seen, but fits none of the above
    UNKNOWN = "unknown"  # no evidence either way; counted, never hidden

    __hash__ = str.__hash__  # Enum's is a function in Python

    @property
    def words(self) -> str:
        """The category as reports, screens and messages write it: ``optimizer state``."""
        return _WORDS.get(self, self.value.replace("_", " "))

    @property
    def code(self) -> int:
        """A number from 0 that is stable across versions: only ever append categories."""
        return _CATEGORY_CODES[self]

    @classmethod
    def from_code(cls, code: int) -> Category:
        return _CATEGORIES[code]


_WORDS = {
    Category.KV_CACHE: "KV cache",
    Category.AUTOGRAD_DETAIL: "backward temporary",  # torch.profiler's name is no one's word
}

# The on-disk codes of trace columns. UNKNOWN is 0, so that a zeroed column means "unknown".
_CATEGORIES = (
    Category.UNKNOWN,
    Category.PARAMETER,
    Category.GRADIENT,
    Category.OPTIMIZER_STATE,
    Category.ACTIVATION,
    Category.TEMPORARY,
    Category.INPUT,
    Category.BUFFER,
    Category.AUTOGRAD_DETAIL,
    Category.WORKSPACE,
    Category.OTHER,
    Category.WEIGHT_CAST,
    Category.GRADIENT_BUCKET,
    Category.GATHERED_PARAMETER,
    Category.KV_CACHE,
)
_CATEGORY_CODES = {category: code for code, category in enumerate(_CATEGORIES)}


class TraceAction(str, Enum):
    """The allocator's trace actions, by torch's own names."""

    ALLOC = "alloc"
    FREE_REQUESTED = "free_requested"
    FREE_COMPLETED = "free_completed"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    SNAPSHOT = "snapshot"
    OOM = "oom"

    @property
    def code(self) -> int:
        """A number from 0 that is stable across versions: only ever append actions."""
        return _ACTION_CODES[self]

    @classmethod
    def from_code(cls, code: int) -> TraceAction:
        return _ACTIONS[code]


_ACTIONS = tuple(TraceAction)
_ACTION_CODES = {action: code for code, action in enumerate(_ACTIONS)}


class BlockState(str, Enum):
    """The state of a block in a segment."""

    ALLOCATED = "active_allocated"
    PENDING_FREE = "active_pending_free"  # freed by its owner, still used by a stream
    INACTIVE = "inactive"

    @classmethod
    def parse(cls, text: str) -> BlockState:
        """Accept torch's documented spelling of the pending state as well as the emitted one.

        Raises ValueError for any other text.
        """
        return _STATES.get(text) or cls(text)


_STATES = {
    "active_awaiting_free": BlockState.PENDING_FREE,
    **{one.value: one for one in BlockState},
}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a segment: one allocation, or one hole. Sizes in bytes.

    ``size`` is what the allocator returned (rounded, with unsplit slack); ``requested_size`` is
    the size of the request, 0 for a hole. ``stack`` is an index into the stack table the block
    came with, 0 for none.
    """

    address: Address
    size: Size
    requested_size: Size
    state: BlockState
    stack: Index = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """One reservation from the driver (``cudaMalloc`` or mapped pages). Sizes in bytes."""

    device: Rank
    address: Address
    total_size: Size
    stream: Address
    segment_type: str  # "small" or "large"
    pool_id: tuple[Address, Address] = (0, 0)  # (0, 0) is the default pool; others are private
    is_expandable: bool = False
    blocks: tuple[Block, ...] = ()
    stack: Index = 0

    @property
    def allocated_size(self) -> int:
        return sum(b.size for b in self.blocks if b.state is BlockState.ALLOCATED)

    @property
    def pending_size(self) -> int:
        return sum(b.size for b in self.blocks if b.state is BlockState.PENDING_FREE)

    @property
    def cached_size(self) -> int:
        return sum(b.size for b in self.blocks if b.state is BlockState.INACTIVE)


_NO_STATISTICS = Unavailable("not read")


@dataclass(frozen=True, slots=True)
class AllocatorCounts:
    """One device's allocator counters at one instant. Unit: bytes.

    ``allocated``: blocks owned by live tensors, with rounding and unsplit slack; ``active``: also
    blocks freed by their owner that a stream still uses; ``reserved``: all segments held from the
    driver; ``requested``: before rounding. On the CPU ``allocated`` and ``active`` are the bytes of
    live storages at level ``trace``; everything else is `Unavailable`.
    """

    allocated: Bytes | Unavailable = field(default=_NO_STATISTICS)
    active: Bytes | Unavailable = field(default=_NO_STATISTICS)
    reserved: Bytes | Unavailable = field(default=_NO_STATISTICS)
    requested: Bytes | Unavailable = field(default=_NO_STATISTICS)

    @property
    def pending(self) -> Bytes | Unavailable:
        """Freed by its owner, still used by a stream."""
        if isinstance(self.active, Unavailable):
            return self.active
        if isinstance(self.allocated, Unavailable):
            return self.allocated
        return Bytes(self.active - self.allocated)

    @property
    def cached(self) -> Bytes | Unavailable:
        """Reserved from the driver and free for reuse by this process."""
        if isinstance(self.reserved, Unavailable):
            return self.reserved
        if isinstance(self.active, Unavailable):
            return self.active
        return Bytes(self.reserved - self.active)
