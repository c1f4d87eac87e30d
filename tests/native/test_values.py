"""Values on the native engine equal the CPU's: forward, backward and optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from native_commands import python

PROGRAMS = Path(__file__).parent / "values_programs.py"

ROUNDED = {
    # Kernels of the CPU keep statistics in bfloat16 where CUDA's, and ours, have float32.
    "sdpa_bfloat16": 0.02,
    # Autocasting has other lists of operators for CUDA than for the CPU.
    "autocast_and_scaler": 0.1,
}
CLOSE = 2e-5
"""Other formulas in float32 (fused cells, root mean square norms, capturable optimizers)."""
EXACT = {
    "mlp_adamw_foreach", "mlp_adamw_fused", "mlp_sgd_momentum", "mlp_sgd_fused", "mlp_adafactor",
    "mlp_rmsprop_adagrad", "clip_grad_norm", "gradient_accumulation", "cnn",
    "resnet_channels_last", "transposed_and_1d_convolutions", "sdpa_causal", "sdpa_mask",
    "transformer_encoder", "embedding_bag", "checkpointing", "functional_gradients",
    "custom_function_and_double_backward", "custom_operator", "model_parallel",
    "side_streams_and_pinned_copies", "cuda_graph", "indexing", "counting", "sorting",
    "narrow_types", "views_and_out_arguments", "huggingface_gpt2", "subclass_with_dispatch",
}  # fmt: skip
"""Equal to every digit: the same kernels run on the same values."""
NAMES = [
    line.split("(")[0].removeprefix("def ")
    for before, line in zip(
        PROGRAMS.read_text().splitlines(), PROGRAMS.read_text().splitlines()[1:], strict=False
    )
    if before == "@program"
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """What each program gave: all run in one process, which loads the engine before torch."""
    done = python(PROGRAMS, cwd=PROGRAMS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["program"]: line for line in lines}


@pytest.mark.xdist_group("programs in one process")
@pytest.mark.parametrize("name", NAMES)
def test_values_equal_the_cpus(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    assert "error" not in outcome, outcome["error"]
    assert outcome["moving"] > 0  # not all zeros
    allowed = 0.0 if name in EXACT else ROUNDED.get(name, CLOSE)
    assert outcome["difference"] <= allowed
    assert outcome["rng"], "the program's CPU generator was advanced"


CASES = {
    "real_refuses_by_name": "NotModelled aten",
    "half_products": "True",
    "triton_kernels": "[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0]",
    "triton_refused": "NotModelled identity",
    "unknown_scalar": "text nan nan nan nan\ntext nan 1 nan\n" * 2
    + "text nan nan [nan nan] nan\ntext nan of 2\nValueNeeded",
    "swallowed": "True",
    "budget": "it needs more than 5e+09 floating-point operations\n"
    "its tensors need more than 1.0 GiB",
    "measured": "5.0 GiB, and about a minute of computing for its first step\nsmall\n"
    "its tensors take",
    "at_once": "all values were computed",
    "arrays": "(1, 2) float64\nnan [1. 1.]",
    "assumed": "0.25",
    "nan": "nan noted False",
    "conditions": "none; numbers that were not computed are finite; the check passes; the "
    "assertion holds",
    "healthy": "[False, False, True, False, True, False, True, 0] ['numbers that were not computed "
    "are finite']",
    "conditions_that_both_work": "assumed to be False, up to 20 times in a row\nwithout a report:",
    "loops": "72 3",
    "made_of_unknown": "['nan', 'nan', 'nan', 'nan', 'nan', 'nan'] 3.0",
    "whole_numbers_counted": "[0, 2, 0, 1]",
    "kernels_without_operators": "[2.0, 2.0, 2.0]",
    "count": "ValueNeeded",
    "known": "[4, 5]",
    "host": "ValueNeeded",
    "scaler": "131072.0",
    "random": "reproducible, undisturbed",
    "thread": "6.0",
    "dropout": "same mask",
    "sparse_products": "real 2.0\nreal 2.0\nFalse\n[]\nauto 2.0\nauto 2.0\nFalse\n[]\n"
    "shapes nan\nshapes nan\nTrue\n['all indices differ, which is the most that can be']\n",
    "big": "small",
}


@pytest.mark.parametrize("case", CASES)
def test_rules(case: str) -> None:
    program = Path(__file__).parent / "values_cases.py"
    done = python(program, case, cwd=program.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert CASES[case] in done.stdout
