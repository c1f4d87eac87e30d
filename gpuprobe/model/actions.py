"""The codes of torch's trace actions, as the columns of a trace have them."""

from __future__ import annotations

from typing import Final

from gpuprobe.model.memory import TraceAction

ALLOC: Final = TraceAction.ALLOC.code
FREE_REQUESTED: Final = TraceAction.FREE_REQUESTED.code
FREE_COMPLETED: Final = TraceAction.FREE_COMPLETED.code
SEGMENT_ALLOC: Final = TraceAction.SEGMENT_ALLOC.code
SEGMENT_FREE: Final = TraceAction.SEGMENT_FREE.code
SEGMENT_MAP: Final = TraceAction.SEGMENT_MAP.code
SEGMENT_UNMAP: Final = TraceAction.SEGMENT_UNMAP.code
SNAPSHOT: Final = TraceAction.SNAPSHOT.code
OOM: Final = TraceAction.OOM.code
