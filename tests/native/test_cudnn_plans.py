"""Workspaces of convolutions on the native engine are those of cuDNN 9.19 on an H200.

The calls are of `benchmarks/oracle_sizes.py` of commit `b31fc386`, recorded with torch 2.11,
among those of odd number: the model was found in the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from native_commands import python

pytestmark = pytest.mark.slow

PROGRAM = """\
import json, sys
import gpuprobe

def bytes_of(call, result_of):
    "The most that a call requested beside its result."
    call()  # libraries' own workspaces
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    kept = [each for each in result_of(kept) if each is not None]
    return peak - before - sum(each.numel() * each.element_size() for each in kept)

def workspaces(dtype, last, x, w, stride, padding, search=False):
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.benchmark = search
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    layout = torch.channels_last if last else torch.contiguous_format
    x, w = (torch.empty(s, dtype=kind, device="cuda").to(memory_format=layout) for s in (x, w))
    dims = len(x.shape) - 2
    options = ([stride] * dims, [padding] * dims, [1] * dims, False, [0] * dims, 1)
    aten = torch.ops.aten
    y = aten.convolution(x, w, None, *options)
    found = [bytes_of(lambda: aten.convolution(x, w, None, *options), lambda out: [out])]
    for mask in ([True, False, False], [False, True, False]):
        found.append(
            bytes_of(lambda: aten.convolution_backward(y, x, w, None, *options, mask), list)
        )
    return found

with gpuprobe.virtual_gpu("h200", compute="shapes"):
    import torch
    print(json.dumps([workspaces(*case) for case in json.loads(sys.argv[1])]))
"""

MEASURED = {
    # dtype, channels last, input, filter, stride, padding: forward, gradient of input, of filter
    ("bfloat16", False, (32, 512, 18, 18), (16, 512, 3, 3), 1, 0): [11026448] * 3,
    ("float16", False, (3, 64, 62, 62), (1024, 64, 1, 1), 4, 0): [3048976] * 3,
    ("tf32", False, (1, 32, 42, 42, 42), (32, 32, 3, 3, 3), 1, 0): [17785872, 17786003, None],
    ("tf32", False, (4, 64, 152, 152), (64, 64, 3, 3), 1, 1): [47464595, 47464595, None],
    ("tf32", False, (16, 256, 76, 76), (32, 256, 1, 1), 1, 0): [0, None, 524288],
    ("float32", False, (64, 256, 5, 5), (256, 256, 3, 3), 1, 1): [0, 0, 28311552],
    ("float32", True, (8, 256, 19, 19), (32, 256, 3, 3), 1, 0): [3548176, 3548176, 13022224],
    ("float32", True, (16, 1024, 41, 41), (64, 1024, 3, 3), 2, 0): [114163728, 114163728, 0],
}


def found(cases: list[tuple[object, ...]]) -> list[list[int]]:
    done = python("-c", PROGRAM, json.dumps(cases), cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_was_measured() -> None:
    for (case, expected), workspaces in zip(MEASURED.items(), found(list(MEASURED)), strict=True):
        for wanted, bytes_ in zip(expected, workspaces, strict=True):
            assert wanted is None or bytes_ == wanted, (case, expected, workspaces)


def test_partial_sums_of_a_filters_gradient_are_near() -> None:
    case = ("tf32", False, (4, 64, 152, 152), (64, 64, 3, 3), 1, 1)
    near, unknown = found([case, ("float64", *case[1:])])
    assert near[2] == pytest.approx(49529511, rel=0.01)
    assert unknown == [0, 0, 0]  # not modelled


def test_a_search_takes_the_largest_once_and_keeps_the_same_plan() -> None:
    cases = [case for case in MEASURED if len(case[2]) == 4]
    assert found([(*case, True) for case in cases]) == found(cases)
