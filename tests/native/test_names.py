"""Readable names of kernels, from the names that the compiler gave their symbols."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.native.names import LONGEST, demangled, readable, shortened

ADD = (
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEv"
    "iT0_T1_"
)


@pytest.mark.skipif(sys.platform != "linux", reason="demangling is the C++ library's of Linux")
def test_a_mangled_name_is_readable() -> None:
    assert demangled(ADD).startswith("void at::native::vectorized_elementwise_kernel<4, ")
    assert readable(ADD) == "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"


@pytest.mark.parametrize(
    "name", ["triton_poi_fused_gelu_0", "cublasSgemm_v2", "_add_kernel", "_Zno symbol", ""]
)
def test_other_names_stay(name: str) -> None:
    assert readable(name) == name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::tanh_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda()#2}::operator()"
            "() const::{lambda(float)#1}, std::array<char*, 2ul> >(int, X, std::array<char*, 2ul>)",
            "vectorized_elementwise_kernel<4, tanh_kernel_cuda(float)>",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::"
            "(anonymous namespace)::TensorListMetadata<1>, std::multiplies<float>, float>(X)",
            "multi_tensor_apply_kernel<TensorListMetadata<1>, multiplies<float>, float>",
        ),
        (
            "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::"
            "func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()("
            "at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(X)",
            "reduce_kernel<128, 4, ReduceOp<float, func_wrapper_t<float, sum_functor<float, float, "
            "float>>, unsigned int, float, 4, 4>>",
        ),
        (
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float,"
            " cutlass::arch::Sm80, true>::Params)",
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
        ),
        ("void f<(at::Kind)2, -1, true>(int)", "f<2, -1, true>"),
        ("unbalanced<(", "unbalanced<("),
    ],
)
def test_what_only_addresses_is_left_out(name: str, short: str) -> None:
    assert shortened(name) == short


@given(st.text(alphabet="ab:<>(){}, 1#&*", max_size=60))
def test_any_name_has_a_short_one(name: str) -> None:
    shortened(name)
    assert len(readable("x" * 150 + name)) <= max(LONGEST, 0)
