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
        # Results go to device memory only. The ones with a result on the host are in `cublas.c`.
        r"cublas([SDCZH]gemm(Batched|StridedBatched)?|[SDCZ](axpy|copy|dgmm|geam"
        r"|gemv(Batched|StridedBatched)?|rot|rotm|scal|swap"
        r"|symm|symv|syr|syr2|syr2k|syrk|syrkx|trmm|trmv|trsm|trsmBatched|trsv"
        r"|ger|gerc|geru)|[CZ](hemm|hemv|her|her2|her2k|herk|herkx)|Csrot|Zdrot|Csscal|Zdscal"
        r"|[SC]gemmEx|Cgemm3m(Ex)?|(Gemm|GemmBatched|GemmStridedBatched|Axpy|Scal|Rot)Ex"
        r")(_v2)?(_64)?",
        "library_kernel",
        _COMPUTES,
    ),
    (
        r"cudnn(BatchNormalization(ForwardInference|ForwardTraining(Ex)?|Backward(Ex)?)"
        r"|Convolution(Forward|BackwardData|BackwardFilter|BackwardBias|BiasActivationForward)"
        r"|(Activation|Pooling|Softmax)(Forward|Backward)|AddTensor|ScaleTensor|TransformTensor"
        r"|OpTensor|SpatialTf(GridGenerator|Sampler)(Forward|Backward)|CTCLoss(_v8)?"
        r"|RNN(Forward|BackwardData_v8|BackwardWeights_v8))",
        "library_kernel",
        _COMPUTES,
    ),
    (
        r"cudnnSet(CTCLossDescriptor(Ex|_v8|_v9)?|ActivationDescriptor"
        r"|Convolution(GroupCount|MathType|ReorderType|(Nd|2d)Descriptor)|Pooling(Nd|2d)Descriptor"
        r"|SpatialTransformerNdDescriptor)",
        "succeed",
        _SETS,
    ),
    (
        r"cusolverDnX(gesvdj|syevj)Set(Tolerance|MaxSweeps|SortEig)",
        "succeed",
        _SETS,
    ),
    (
        r"cupti(Activity(Enable|Disable|EnableContext|DisableContext|EnableLatencyTimestamps"
        r"|EnableDriverApi|EnableRuntimeApi|EnableCudaEventDeviceTimestamps|FlushAll|FlushPeriod"
        r"|RegisterCallbacks|RegisterTimestampCallback|SetAttribute)"
        r"|EnableCallback|EnableDomain|EnableAllDomains|Finalize)",
        "succeed",
        _PROFILES,
    ),
    (
        r"cudaMemPrefetch(Async|BatchAsync)|cudaMemAdvise",
        "succeed",
        "hints: memory is in one place here",
    ),
    (
        r"nvtx(Mark|Range(Push|Pop|Start|End)|Domain|Name|Initialize|StringRegister)\w*",
        "succeed",
        "marks: NVTX's documentation promises 0 for handles and levels where no tool is attached",
    ),
)

MODELS: Final[tuple[tuple[str, str], ...]] = (
    # pattern, what is assumed where a program calls it
    (
        r"cublasLtMatmulAlgoGetHeuristic",
        "that cuBLASLt needs no workspace (before torch 2.15, none beyond the one that torch keeps "
        "for cuBLAS): NVIDIA does not document which kernel it picks",
    ),
    (
        r"cudnnBackend(GetAttribute|Execute)",
        "that cuDNN's convolutions need the workspaces of a model of an H200: the peaks of random "
        "ones there were within 1% in 65% and within 5% in 77%",
    ),
    (
        r"cudnn(Get|Find)Convolution\w+",
        "that cuDNN's convolutions need no workspaces: TORCH_CUDNN_V8_API_DISABLED is set",
    ),
    (
        r"cudnnGetBatchNormalization\w+Size",
        "that cuDNN's batch normalisation needs no workspace and no reserve",
    ),
    (
        r"cudnnGetRNNTempSpaceSizes",
        "that cuDNN's recurrent networks need the workspaces of formulas: equal in 359 of 360 "
        "networks on an H200",
    ),
    (
        r"cudnnGetCTCLossWorkspaceSize(_v8)?",
        "that cuDNN's CTC loss needs two numbers for each probability",
    ),
    (
        r"cusolverDn\w+_bufferSize",
        "that cuSOLVER needs the workspaces of formulas: within 1.5 KiB on an H200",
    ),
    (
        r"cufftXtMakePlanMany|cufftGetSize|cufftXtExec",
        "that cuFFT needs the workspaces of formulas: within 0.2% on an H200",
    ),
    (
        r"cusparse\w+_bufferSize(Ext)?|cusparseSpGEMM_(workEstimation|compute)",
        "that cuSPARSE needs a few bytes for each row and nonzero: its documentation has "
        "proportions, no factors",
    ),
    (r"cusparseLtMatmulGetWorkspace", "that cuSPARSELt needs no workspace"),
    (
        r"cudaMallocAsync|cudaMallocFromPoolAsync|cudaMemPool\w+",
        "that a pool of cudaMallocAsync reserves what is used, in whole blocks of 32 MiB, and "
        "keeps it up to its threshold",
    ),
)
"""Answers that NVIDIA documents no rule for, in the order of ``enum model`` in ``native.h``. The
figures are those of docs/verification/on-a-gpu.md. Two answers that all programs get are not here:
a dropout state of 24 bytes for each thread that fits on the GPU (measured on an H200), and 32
registers a thread and no static shared memory in each kernel.
"""

_POINTERS: Final = (
    (
        re.compile(r"(?!cu[A-Z])\w+(GetError|GetStatus)(Name|String)|p?ncclGetLastError"),
        "refuse_text",
    ),
    (re.compile(r"nvshmem_(malloc|calloc|align|ptr)|nvshmemx_\w*(malloc|ptr)"), "refuse_memory"),
)
"""Functions that return a pointer, where a status would be read as one."""

_HARMLESS: Final = [(re.compile(pattern), target) for pattern, target, _ in HARMLESS]


def vendor_of(function: str) -> Vendor | None:
    """The library that a function belongs to, by its prefix; None for one of another maker."""
    for vendor in VENDORS:
        for prefix in vendor.prefixes:
            rest = function[len(prefix) :]
            # "cu" also begins "cur" and "custom": a function continues with a capital.
            if function.startswith(prefix) and (prefix != "cu" or rest[:1].isupper()):
                return vendor
    return None


def stem_of(soname: str) -> str | None:
    """``"cublas"`` for ``"libcublas.so.12"``, None for a library that is not NVIDIA's. A copy in a
    wheel has a hash in its name: ``"libcudart.3eda8113.so.13"``.
    """
    stem = re.sub(r"[.-][0-9a-f]{8}$", "", soname.removeprefix("lib").partition(".so")[0])
    return stem if any(stem == vendor.stem for vendor in VENDORS) else None


def export_of(needed: Needed, answered: frozenset[str], major: int) -> Export:
    """How a function that libraries need is answered, for a major version of CUDA.

    ``answered`` are the runtime's exported names, without ``gpn_``.
    """
    name = needed.name
    # NCCL exports each function under a second name, for profilers that replace the first.
    plain = name.removeprefix("p") if name.startswith("pnccl") else name
    for own in (f"{plain}__{major}", plain):
        if own in answered:
            return Export(name, f"gpn_{own}", version=needed.version)
    for pattern, target in _HARMLESS:
        if pattern.fullmatch(name):
            return Export(name, f"gpn_{target}", Forward.NAMED, needed.version)
    for pattern, target in _POINTERS:
        if pattern.fullmatch(name):
            return Export(name, f"gpn_{target}", Forward.NAMED, needed.version)
    vendor = vendor_of(name)
    refuses = vendor.refuses if vendor else "refuse_other"
    return Export(name, f"gpn_{refuses}", Forward.NAMED, needed.version)
