"""The rules: the id, title and general remedy of each kind of finding.

A race is an entry of `Engine.races`. A rule about one line alone, such as `IMPLICIT_SYNC`, has its
entries in the check's `LineLedger`.
"""

from __future__ import annotations

from typing import Final

from gpuprobe.model.findings import Level
from gpuprobe.model.rules import define

READ_AFTER_WRITE: Final = define(
    "GP201",
    "read-after-write",
    Level.ERROR,
    "read on one stream while another may still be writing it",
    remedy="make the reading stream wait for the writing one before it reads",
)
WRITE_AFTER_READ: Final = define(
    "GP202",
    "write-after-read",
    Level.ERROR,
    "written on one stream while another may still be reading it",
    remedy="make the writing stream wait for the reading one before it writes",
)
WRITE_AFTER_WRITE: Final = define(
    "GP203",
    "write-after-write",
    Level.ERROR,
    "written on two streams without synchronisation",
    remedy="make one stream wait for the other before it writes",
)
USE_AFTER_FREE: Final = define(
    "GP204",
    "use-after-free",
    Level.ERROR,
    "its memory was freed and given to another tensor while a stream may still be using it",
    remedy="call record_stream on the tensor for the stream that uses it, or wait before it is "
    "dropped",
)
HOST_READ: Final = define(
    "GP205",
    "host-race",
    Level.ERROR,
    "read by the host while a copy from the device may still be in progress",
    remedy="synchronize the stream, or an event recorded after the copy, before the host reads",
)
HOST_WRITE: Final = define(
    "GP206",
    "host-race",
    Level.ERROR,
    "pinned memory written by the host while a copy to the device may still be reading it",
    remedy="synchronize an event recorded after the copy before the buffer is filled again",
)
HOST_ALIAS: Final = define(
    "GP207",
    "host-race",
    Level.ERROR,
    "a NumPy array over pinned memory is used while a copy may still be in progress",
    remedy="synchronize an event recorded after the copy before the array is used",
)
GRAPH: Final = define(
    "GP208",
    "read-after-write",
    Level.ERROR,
    "a CUDA graph's memory is used without synchronisation with its replay",
    remedy="make the stream that uses the memory wait for the stream that replays the graph",
)
GRADIENT: Final = define(
    "GP209",
    "read-after-write",
    Level.ERROR,
    "a gradient is used on a different stream than backward() was called on",
    remedy="wait for the stream that backward() was called on before gradients are used",
)
SELF_WAIT: Final = define(
    "GP210",
    "read-after-write",
    Level.WARNING,
    "a stream waits for itself, which has no effect",
    remedy="save torch.cuda.current_stream() before entering `with torch.cuda.stream(...)`, and "
    "wait for that stream",
)
LATENT: Final = define(
    "GP213",
    "use-after-free",
    Level.WARNING,
    "freed while another stream may still be using it: its memory could have been given to "
    "another tensor, which did not happen in this run",
    remedy="call record_stream on the tensor for the stream that uses it, or wait before it is "
    "dropped",
)
GRAPH_FREED: Final = define(
    "GP211",
    "use-after-free",
    Level.ERROR,
    "a CUDA graph is replayed over the memory of a tensor that was freed after its capture",
    remedy="keep references to all tensors that the graph was captured with while it is replayed",
)
SHARED: Final = define(
    "GP212",
    "write-after-read",
    Level.ERROR,
    "a tensor that was sent to another process is written while that process may still be "
    "reading it",
    remedy="send a clone, or write only after the other process has answered",
)
IMPLICIT_SYNC: Final = define(
    "GP220",
    "implicit-sync",
    Level.WARNING,
    "the host waits for the GPU here",
    remedy="keep the value on the device, or read it less often",
)

RULES: Final = (
    READ_AFTER_WRITE,
    WRITE_AFTER_READ,
    WRITE_AFTER_WRITE,
    USE_AFTER_FREE,
    HOST_READ,
    HOST_WRITE,
    HOST_ALIAS,
    GRAPH,
    GRADIENT,
    SELF_WAIT,
    GRAPH_FREED,
    SHARED,
    LATENT,
    IMPLICIT_SYNC,
)
KINDS: Final = tuple(dict.fromkeys(rule.kind for rule in RULES))

ALSO_WRITTEN: Final = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "batch_norm_gather_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "allreduce_": ("tensors",),
    "allreduce_coalesced_": ("tensors",),
    "broadcast_": ("tensors",),
    "reduce_": ("tensors",),
    "allgather_": ("output_tensors",),
    "_allgather_base_": ("output_tensor",),
    "allgather_coalesced_": ("output_lists",),
    "allgather_into_tensor_coalesced_": ("outputs",),
    "reduce_scatter_": ("output_tensors",),
    "_reduce_scatter_base_": ("output_tensor",),
    "reduce_scatter_tensor_coalesced_": ("outputs",),
    "alltoall_": ("output_tensors",),
    "alltoall_base_": ("output",),
    "recv_": ("tensors",),
    "recv_any_source_": ("tensors",),
    "scatter_": ("output_tensors",),
    "gather_": ("output_tensors",),
}
"""Arguments that an operator writes though its schema does not show it. Source: the operators'
definitions in ``native_functions.yaml`` (running statistics are updated in training) and
``torch/csrc/distributed/c10d/Ops.cpp``."""

SYNCS: Final = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "mask",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "unique_dim_consecutive": "unique",
    "equal": "equal",
    "bincount": "unique",
    "allclose": "equal",
    "_linalg_check_errors": "check of a matrix",
    "_to_sparse": "nonzero",
    "_coalesce": "unique",
}
"""Operators whose results the host waits for, and their reason in a finding."""
