"""No program's estimate changes when values become known: random programs over torch's operators.

Each is run with all values (``compute="real"``), and without with different limits of what is
computed. The same memory must be allocated and freed in the same order.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import random
import sys
import types
import unittest
from typing import Any

import pytest
import torch

import gpuprobe

if importlib.util.find_spec("expecttest") is None:  # for torch's own tests, which are not run here
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    vars(sys.modules["expecttest"])["TestCase"] = unittest.TestCase

from torch.testing._internal.common_methods_invocations import op_db

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about the host it runs on

# Of one tensor and numbers, or two tensors of one shape; in place and as views where there is
# such a form. Their results' shapes do not depend on values.
OPERATORS = (
    *("abs", "add", "argmax", "clamp", "clone", "cos", "cumsum", "div", "eq", "exp", "fill"),
    *("flip", "isnan", "logical_not", "lt", "maximum", "mean", "mul", "neg", "permute", "relu"),
    *("reshape", "roll", "round", "sigmoid", "softmax", "sort", "squeeze", "sub", "sum", "tanh"),
    *("transpose", "tril", "unsqueeze", "where", "zeros_like", "masked_fill", "select", "expand"),
)
_BY_NAME = {info.name: info for info in op_db if not info.variant_test_name}
LIMITS = ((0, 0), (2**20, 2**28), (math.inf, math.inf))


def chosen(choose: random.Random) -> list[Any]:
    """Eight operators, each with one of the samples of torch's own tests for it."""
    found = []
    for name in choose.choices([name for name in OPERATORS if name in _BY_NAME], k=8):
        samples = _BY_NAME[name].sample_inputs("cuda", torch.float32, requires_grad=False)
        found.append((_BY_NAME[name], choose.choice(list(samples))))
    return found


def run(choose: random.Random, program: list[Any]) -> None:
    """Call the operators on their samples, or on an earlier result in place of the first tensor,
    where that has the same shape and dtype.
    """
    kept: list[torch.Tensor] = []
    for info, sample in program:
        first = sample.input
        alike = [item for item in kept if item.shape == first.shape and item.dtype == first.dtype]
        if alike:
            first = choose.choice(alike)
        call: Any = info.op
        if info.inplace_variant is not None and choose.random() < 0.3:
            first, call = first.clone(), info.inplace_variant
        try:
            result = call(first, *sample.args, **sample.kwargs)
        except RuntimeError:  # a shape or dtype that this form does not take
            continue
        results = result if isinstance(result, (tuple, list)) else (result,)
        kept.extend(item for item in results if isinstance(item, torch.Tensor))
        if len(kept) > 4:
            del kept[choose.randrange(len(kept))]


def stream(seed: int, compute: str, limits: tuple[float, float] | None = None) -> Any:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    gc.collect()
    gc.disable()
    try:
        with gpuprobe.virtual_gpu("h100-80gb", compute) as session:
            if limits is not None:
                session.machine.limits.floating, session.machine.limits.others = limits
            program = chosen(choose)
            torch.cuda.memory._record_memory_history()
            run(choose, program)
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
            return [(event["action"], event["size"]) for event in trace]
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(4))
def test_what_is_known_changes_nothing(seed: int) -> None:
    expected = stream(seed, "real")
    assert expected
    for limits in LIMITS:
        assert stream(seed, "shapes", limits) == expected, limits
