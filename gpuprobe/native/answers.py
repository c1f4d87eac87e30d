"""Which function of which library does what, where the runtime in C does not answer it.

Three kinds: a function of the runtime answers it; it computes or sets something that no size or
value here depends on, so it may do nothing (`HARMLESS`, with the reason); anything else is refused
by name: it returns its library's status for "not supported", and its name is printed and kept for
the report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gpuprobe.native.elf import Export, Forward, Needed


@dataclass(frozen=True)
class Vendor:
    """One of NVIDIA's libraries: its name in file names, the prefixes of its functions, and the
    function of the runtime that refuses on its behalf.
    """

    stem: str
    prefixes: tuple[str, ...]
    refuses: str


VENDORS: Final = (
    Vendor("cudart", ("cuda", "__cuda"), "refuse_cuda"),
    Vendor("cublasLt", ("cublasLt",), "refuse_cublas"),
    Vendor("cublas", ("cublas",), "refuse_cublas"),
    Vendor("cudnn", ("cudnn",), "refuse_cudnn"),
    Vendor("cusparseLt", ("cusparseLt",), "refuse_cusparse"),
    Vendor("cusparse", ("cusparse",), "refuse_cusparse"),
    Vendor("cufft", ("cufft",), "refuse_cufft"),
    Vendor("curand", ("curand",), "refuse_curand"),
    Vendor("cusolver", ("cusolver",), "refuse_cusolver"),
    Vendor("cupti", ("cupti",), "refuse_cupti"),
    Vendor("cufile", ("cuFile",), "refuse_other"),
    Vendor("nccl", ("nccl", "pnccl"), "refuse_nccl"),
    Vendor("nvrtc", ("nvrtc",), "refuse_nvrtc"),
    Vendor("nvJitLink", ("nvJitLink", "__nvJitLink"), "refuse_nvrtc"),
    Vendor("nvToolsExt", ("nvtx",), "refuse_other"),
    Vendor("nvshmem_host", ("nvshmem",), "refuse_other"),
    Vendor("nvidia-ml", ("nvml",), "refuse_nvml"),
    Vendor("cuda", ("cu",), "refuse_cuda"),
)
"""The more specific prefixes come first."""

_COMPUTES: Final = "computes: what it writes stays as memory was, and it allocates nothing"
_SETS: Final = "sets a preference that changes no size and no value here"
_PROFILES: Final = "profiles: no kernel runs, so there is nothing to record"

HARMLESS: Final[tuple[tuple[str, str, str], ...]] = (
    # pattern, the runtime's function it forwards to, reason
    (
        r"cublas[SDCZHI]\w*(_v2)?|cublas(Gemm|Dot|Nrm2|Axpy|Scal)\w*Ex(_64)?",
        "library_kernel",
        _COMPUTES,
    ),
    (r"cublas[SG]et(Vector|Matrix)(Async)?", "library_kernel", _COMPUTES),
    (
        r"cudnn(BatchNormalization(Forward|Backward)\w*|Convolution(Forward|Backward\w*|"
        r"BiasActivationForward)|Pooling(Forward|Backward)|SpatialTf\w+|CTCLoss(_v8)?|"
        r"RNN(Forward|BackwardData_v8|BackwardWeights_v8))",
        "library_kernel",
        _COMPUTES,
    ),
    (r"cudnnSet\w+|cudnnRestoreDropoutDescriptor", "succeed", _SETS),
    (r"cupti\w*", "succeed", _PROFILES),
    (r"nvtx\w*", "succeed", _PROFILES),
)

_HARMLESS: Final = [(re.compile(pattern), target) for pattern, target, _ in HARMLESS]


def vendor_of(function: str) -> Vendor | None:
    """The library that a function belongs to, by its prefix; None for one of another maker."""
    for vendor in VENDORS:
        for prefix in vendor.prefixes:
            rest = function[len(prefix) :]
            # "cu" also begins "cur" and "custom": a function goes on with a capital.
            if function.startswith(prefix) and (prefix != "cu" or rest[:1].isupper()):
                return vendor
    return None


def stem_of(soname: str) -> str | None:
    """``"cublas"`` for ``"libcublas.so.12"``, None for a library that is not NVIDIA's."""
    stem = soname.removeprefix("lib").partition(".so")[0]
    return stem if any(stem == vendor.stem for vendor in VENDORS) else None


def export_of(needed: Needed, answered: frozenset[str], major: int) -> Export:
    """How a function that libraries need is answered, for a major version of CUDA.

    ``answered`` are the runtime's exported names, without ``gpn_``.
    """
    name = needed.name
    for own in (f"{name}__{major}", name):
        if own in answered:
            return Export(name, f"gpn_{own}", version=needed.version)
    for pattern, target in _HARMLESS:
        if pattern.fullmatch(name):
            return Export(name, f"gpn_{target}", Forward.NAMED, needed.version)
    vendor = vendor_of(name)
    refuses = vendor.refuses if vendor else "refuse_other"
    return Export(name, f"gpn_{refuses}", Forward.NAMED, needed.version)
