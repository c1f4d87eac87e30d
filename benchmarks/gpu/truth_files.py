"""What was measured of one case on a GPU, as a small JSON file and a trace next to the file.

The trace is a gpuprobe trace chunk (see docs/reference/recording-format.md) that is compressed
as a whole: ``CASE.trace.xz``. No pickle, no times, no names of machines or people.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpuprobe.errors import DataError, UnsupportedSchema
from gpuprobe.model.io.codec import from_plain, to_plain
from gpuprobe.model.trace import MemoryTrace
from gpuprobe.model.values import Unavailable
from gpuprobe.recording.chunks import decode_chunk, encode_chunk

__all__ = [
    "NO_GPU",
    "NO_LOSS",
    "SCHEMA_VERSION",
    "Gpu",
    "StepTruth",
    "Truth",
    "read_trace",
    "read_truth",
    "truth_files",
    "write_truth",
]

SCHEMA_VERSION = 1
"""1: first. A file of a newer version is refused."""

NO_GPU = Unavailable("not on a CUDA device")
NO_LOSS = Unavailable("no step was made")
_SUFFIX = ".truth.json"
_TRACE = ".trace.xz"


@dataclass(frozen=True)
class StepTruth:
    """Bytes, read from ``torch.cuda.memory_stats``. Peaks belong to this step alone."""

    peak_allocated: int | Unavailable = NO_GPU
    peak_reserved: int | Unavailable = NO_GPU
    peak_requested: int | Unavailable = NO_GPU
    allocated: int | Unavailable = NO_GPU  # at its end
    reserved: int | Unavailable = NO_GPU
    loss: float | Unavailable = NO_LOSS


@dataclass(frozen=True)
class Gpu:
    """``title`` as torch prints it; ``properties`` are the whole numbers torch reports."""

    title: str
    capability: tuple[int, int]
    properties: dict[str, int]


@dataclass(frozen=True)
class Truth:
    """One case on one GPU with one torch.

    ``outcome``: ``ok``, or ``out of memory`` (then the peaks are those up to it). ``built`` is
    the time from the start of the process until the model and optimizer exist, ``steps``
    follow. ``beside`` is what was in use on the GPU at the end, without what torch had reserved
    and what was in use before the process began: the CUDA context with the libraries' code.
    """

    case: str
    about: str
    device: str
    tiny: bool
    outcome: str
    torch: str
    python: str
    cuda: str | Unavailable
    cudnn: str | Unavailable
    driver: str | Unavailable
    gpu: Gpu | Unavailable
    built: StepTruth
    steps: tuple[StepTruth, ...]
    peak_allocated: int | Unavailable
    peak_reserved: int | Unavailable
    beside: int | Unavailable
    allocator_conf: str = ""
    flags: dict[str, str] = field(default_factory=dict)


def write_truth(folder: Path, truth: Truth, trace: MemoryTrace | None) -> Path:
    """Write both files, the JSON last: where it exists, the case was recorded whole."""
    folder.mkdir(parents=True, exist_ok=True)
    if trace is not None:
        packed = lzma.compress(encode_chunk(trace, level=0), preset=9)
        _replace(folder / f"{truth.case}{_TRACE}", packed)
    path = folder / f"{truth.case}{_SUFFIX}"
    document = {"schema_version": SCHEMA_VERSION, **to_plain(truth)}
    _replace(path, json.dumps(document, indent=1).encode() + b"\n")
    return path


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def read_truth(path: Path) -> Truth:
    """Read a truth file. Raises DataError, or UnsupportedSchema for a newer version."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    version = document.pop("schema_version", None) if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise DataError(f"{path} is not a truth file")
    if version > SCHEMA_VERSION:
        raise UnsupportedSchema(f"{path} was written by a newer version ({version})")
    return from_plain(Truth, document)


def read_trace(path: Path) -> MemoryTrace | None:
    """The trace next to a truth file, None if there is none. Raises DataError."""
    beside = path.with_name(path.name.removesuffix(_SUFFIX) + _TRACE)
    if not beside.exists():
        return None
    try:
        data = lzma.decompress(beside.read_bytes())
    except lzma.LZMAError as error:
        raise DataError(f"{beside} is damaged: {error}") from error
    return decode_chunk(data, beside.name)


def truth_files(root: Path) -> Iterator[Path]:
    """Every truth file below a folder, in order; or the file itself."""
    if root.is_file():
        yield root
    else:
        yield from sorted(root.rglob(f"*{_SUFFIX}"))
