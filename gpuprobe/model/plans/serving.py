"""The memory of an inference server on a GPU that this machine does not have."""

from __future__ import annotations

from dataclasses import dataclass

from gpuprobe.model.values import Bytes, Count


@dataclass(frozen=True, slots=True)
class PeakLine:
    """A line of source with the bytes that it allocated and are live at the activation peak."""

    place: str
    function: str
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class ServingRank:
    """The memory of one process of a vLLM on its GPU; None: it failed before. Unit: bytes."""

    rank: int
    weights: Bytes | None
    activation: Bytes | None
    non_torch: Bytes | None
    kv_cache: Bytes | None
    graphs: Bytes | None
    graphs_reserved: Bytes | None
    left: Bytes | None


@dataclass(frozen=True, slots=True)
class LaterStart:
    """What a start of vLLM has that finds the code which an earlier one compiled: fields as in
    `ServingEstimate`.
    """

    started: bool
    error: str
    activation: Bytes | None
    kv_cache: Bytes | None
    blocks: Count | None
    tokens: Count | None
    concurrency: float | None


@dataclass(frozen=True, slots=True)
class ServingEstimate:
    """A vLLM that was started to the end, as vLLM itself measured it. Unit: bytes.

    ``started``: its engine came up; otherwise ``error`` is vLLM's message, ``stage`` where it
    was, ``advice`` what would help, and figures of later stages are None. ``requested`` is
    ``gpu_memory_utilization`` of ``capacity``. ``weights`` is the model as loaded, ``activation``
    the peak of the profiling run above it, ``graphs`` what capturing CUDA graphs adds,
    with a constant for the driver's part. ``graphs_reserved`` is what vLLM expected for CUDA graphs
    when it sized the KV cache (versions from 0.21 on; otherwise None). ``non_torch`` is the CUDA
    context and the code of kernels: a constant, ``non_torch_low`` to ``non_torch_high`` is its
    range. ``kv_cache`` is the pool of ``blocks`` blocks of ``block_size`` tokens; it has room for
    ``tokens`` tokens, and for ``concurrency`` requests of ``max_model_len`` tokens. ``left`` is
    free afterwards. ``peak`` has the lines that allocated what is live at the activations' peak.
    With several GPUs, ``ranks`` has the figures of each, and the others are those of the rank with
    the most memory outside of the KV cache; ``capacity`` is that of one GPU. ``unquantized``: why
    the model seems to be a quantised one, if no weight was quantised.

    ``compile_cache`` is "cold" if this start compiled, "warm" if it found compiled code.
    ``compiling``: its activations' peak was in torch's compiler. A later start needs less then, and
    was measured too: ``later``.
    """

    command: str
    gpu: str
    vllm: str
    torch: str
    capacity: Bytes
    started: bool
    stage: str = ""
    error: str = ""
    advice: tuple[str, ...] = ()
    model: str = ""
    dtype: str = ""
    quantization: str = ""
    unquantized: str = ""
    kv_cache_dtype: str = ""
    compile_cache: str = ""
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    utilization: float | None = None
    requested: Bytes | None = None
    weights: Bytes | None = None
    activation: Bytes | None = None
    graphs: Bytes | None = None
    graphs_reserved: Bytes | None = None
    graphs_captured: Count | None = None
    graph_nodes: Count | None = None
    non_torch: Bytes | None = None
    non_torch_low: Bytes | None = None
    non_torch_high: Bytes | None = None
    kv_cache: Bytes | None = None
    blocks: Count | None = None
    block_size: Count | None = None
    tokens: Count | None = None
    concurrency: float | None = None
    left: Bytes | None = None
    peak: tuple[PeakLine, ...] = ()
    ranks: tuple[ServingRank, ...] = ()
    assumed: tuple[str, ...] = ()
    compiling: bool = False
    later: LaterStart | None = None


@dataclass(frozen=True, slots=True)
class ServingTrial:
    """One start of vLLM in a search, with ``options`` added to the command. ``sequences``: those
    of the searched length that its KV cache holds at one time. None: it failed before. Activations
    and KV cache are those of a later start, where that was measured.
    """

    machine: str
    gpu: str
    options: tuple[str, ...]
    started: bool
    error: str
    quantization: str
    weights: Bytes | None
    activation: Bytes | None
    kv_cache: Bytes | None
    tokens: int | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    sequences: int | None


@dataclass(frozen=True, slots=True)
class ServingFit:
    """The result of a search: ``found`` is the first start that came up, None if none did;
    ``longest`` the longest ``max_model_len`` of which its KV cache holds one sequence, or the
    model's own limit. ``tokens_each`` is the length of a sequence, 0 for ``max_model_len``.
    """

    command: str
    tokens_each: int
    found: ServingTrial | None
    longest: int | None
    trials: tuple[ServingTrial, ...]
