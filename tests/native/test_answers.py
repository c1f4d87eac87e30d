"""What an unanswered function may do: nothing, if it has no result; otherwise it is refused."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from gpuprobe import native
from gpuprobe.native.answers import HARMLESS, MODELS, export_of, stem_of, vendor_of
from gpuprobe.native.elf import Forward, Needed

_NOTHING: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    "name",
    # All output a size, a handle or a value.
    [
        "cublasSdot_v2_64",
        "cublasSrotg_v2",
        "cublasSgetrfBatched_64",
        "cublasCreate_v2",
        "cublasGetVector_64",
        "cudnnSetupSize",
        "cudnnGetRNNWeightSpaceSize",
        "cudnnSetTensorNdDescriptor",
        "cusolverDnSfoo_bufferSize",
        "cusolverDnXgesvdjGetSweeps",
        "cuptiGetVersion",
        "cuptiEventGetAttribute",
        "cuptiActivityGetNextRecord",
        "nvJitLinkGetLinkedCubinSize",
        "nvshmem_malloc",
    ],
)
def test_what_outputs_something_is_refused_by_name(name: str) -> None:
    export = export_of(Needed(name), _NOTHING, 13)
    assert export.forward is Forward.NAMED
    assert export.target.startswith("gpn_refuse_")


@pytest.mark.parametrize(
    ("name", "target"),
    # A status in place of a pointer would be read as an address.
    [
        ("cublasLtGetStatusString", "refuse_text"),
        ("cusparseLtGetErrorName", "refuse_text"),
        ("nvvmGetErrorString", "refuse_text"),
        ("ncclGetLastError", "refuse_text"),
        ("nvshmem_malloc", "refuse_memory"),
        ("nvshmem_ptr", "refuse_memory"),
        ("cuGetErrorString", "refuse_cuda"),  # a status; the text is an output
    ],
)
def test_what_returns_a_pointer_returns_one(name: str, target: str) -> None:
    assert export_of(Needed(name), _NOTHING, 13).target == f"gpn_{target}"


def test_the_second_names_of_nccls_functions_have_the_same_answers() -> None:
    answered = frozenset({"ncclGetErrorString"})
    assert export_of(Needed("pncclGetErrorString"), answered, 13).target == "gpn_ncclGetErrorString"
    assert export_of(Needed("pncclAllReduce"), answered, 13).target == "gpn_refuse_nccl"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("cublasSgemm_v2", "library_kernel"),
        ("cublasZgemmStridedBatched", "library_kernel"),
        ("cublasGemmStridedBatchedEx_64", "library_kernel"),
        ("cudnnRNNForward", "library_kernel"),
        ("cudnnSetActivationDescriptor", "succeed"),
        ("cuptiActivityEnable", "succeed"),
        ("nvtxRangePushA", "succeed"),
        ("cudaMemPrefetchAsync", "succeed"),
    ],
)
def test_what_computes_or_sets_is_harmless(name: str, target: str) -> None:
    assert export_of(Needed(name), _NOTHING, 13).target == f"gpn_{target}"


@pytest.mark.parametrize(
    ("soname", "stem"),
    [
        ("libcudart.so.13", "cudart"),
        ("libcudart.3eda8113.so.13", "cudart"),
        ("libcudart-9335f6a2.so.12.4.127", "cudart"),
        ("libpng16.86585de4.so.16", None),
    ],
)
def test_a_copy_that_a_wheel_carries_is_nvidias_too(soname: str, stem: str | None) -> None:
    assert stem_of(soname) == stem


def test_an_answer_comes_before_the_list_and_the_major_version_before_both() -> None:
    answered = frozenset({"cublasSgemm_v2", "cublasSgemm_v2__12"})
    assert export_of(Needed("cublasSgemm_v2"), answered, 13).target == "gpn_cublasSgemm_v2"
    assert export_of(Needed("cublasSgemm_v2"), answered, 12).target == "gpn_cublasSgemm_v2__12"


def test_models_are_in_the_order_of_the_runtimes_numbers() -> None:
    header = (files(native) / "runtime" / "native.h").read_text(encoding="utf-8")
    (numbers,) = re.findall(r"enum model \{([^}]+)\}", header)
    names = [name.strip() for name in numbers.split(",")]
    assert len(names) == len(MODELS)
    assert MODELS[names.index("MODEL_CONVOLUTION")][0].startswith("cudnnBackend")
    assert MODELS[names.index("MODEL_POOL")][0].startswith("cudaMallocAsync")


def test_each_pattern_and_model_names_functions_of_a_library() -> None:
    for pattern, *_, reason in [*HARMLESS, *MODELS]:
        assert reason
        begin = re.match(r"[a-zA-Z]+", pattern)
        assert begin
        assert vendor_of(begin[0] + "X"), pattern
