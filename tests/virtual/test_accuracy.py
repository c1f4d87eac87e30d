"""How far the figures of a virtual GPU may be off."""

from __future__ import annotations

import pytest
import torch
from gpuprobe.virtual import accuracy
from gpuprobe.virtual.accuracy import CalledOperators, Difference
from gpuprobe.virtual.lowering.cudnn_recurrent import RecurrentCall

import gpuprobe
from gpuprobe.model.plans.estimate import Margin

MIB = 1 << 20


def test_operators_that_are_equal_give_no_range() -> None:
    def step() -> None:
        x = torch.ones(512, 512, device="cuda", requires_grad=True)
        torch.nn.functional.gelu(x @ x).sum().backward()

    found = gpuprobe.estimate(step, gpu="h100-80gb", engine="virtual")
    assert found.allocated_low == found.peak_allocated == found.allocated_high
    assert not [text for text in found.assumed if "so the estimate is a range" in text]


def test_operators_that_make_nothing_new_give_no_range() -> None:
    """Neither `_fused_adam_`, `_foreach_zero_` nor `silu_` was compared."""
    equal, differences, _ = accuracy.compared()
    assert not {"aten._fused_adam_.default", "aten.silu_.default"} & (equal | set(differences))

    def step() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.SiLU(inplace=True)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        model(torch.ones(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    found = gpuprobe.estimate(step, gpu="h100-80gb", engine="virtual")
    assert found.allocated_low == found.peak_allocated == found.allocated_high


def test_a_dtype_that_was_not_compared_gives_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_compared_types", lambda: frozenset({torch.float32}))

    def step(dtype: torch.dtype) -> None:
        torch.nn.functional.gelu(torch.empty(512, 512, device="cuda", dtype=dtype))

    found = gpuprobe.estimate(lambda: step(torch.float32), gpu="h100-80gb", engine="virtual")
    assert found.allocated_high == found.peak_allocated
    found = gpuprobe.estimate(lambda: step(torch.bfloat16), gpu="h100-80gb", engine="virtual")
    assert found.allocated_high > found.peak_allocated
    (reason,) = [text for text in found.assumed if "so the estimate is a range" in text]
    assert "off for gelu" in reason


def test_dtypes_that_were_compared() -> None:
    half, tiny = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.float8_e5m2)
    assert accuracy.in_compared_types((half, 1.0), (half, torch.empty(1, dtype=torch.int32)))
    assert not accuracy.in_compared_types((half,), tiny)
    assert not accuracy.in_compared_types(([tiny],), None)


def test_views_and_results_in_place_of_any_dtype_give_no_range() -> None:
    def step() -> None:
        x = torch.empty(512, 512, device="cuda", dtype=torch.float8_e5m2)
        x.copy_(torch.empty_like(x)).view(-1)

    found = gpuprobe.estimate(step, gpu="h100-80gb", engine="virtual")
    reasons = [text for text in found.assumed if "so the estimate is a range" in text]
    assert not any("copy_" in text or "view" in text for text in reasons)


def test_an_operator_that_differs_gives_a_range_with_its_name() -> None:
    def step() -> None:
        torch.fft.rfft(torch.ones(64, 1 << 15, device="cuda"))

    found = gpuprobe.estimate(step, gpu="h100-80gb", engine="virtual")
    _, differences, _ = accuracy.compared()
    size = 64 * (1 << 15) * 4 + 64 * ((1 << 14) + 1) * 8
    above, below = differences["aten._fft_r2c.default"].bytes(size)
    assert above > 8 * MIB
    assert found.allocated_high == found.peak_allocated + above
    assert found.allocated_low == found.peak_allocated - below
    assert found.reserved_high >= found.allocated_high
    assert found.total_high >= found.allocated_high
    (reason,) = [text for text in found.assumed if "so the estimate is a range" in text]
    assert reason.startswith("that the virtual GPU is off for _fft_r2c by no more than")


def test_one_call_counts_the_one_that_may_differ_most(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "aten.a.default": Difference((0, 0.5), (32768, 0.0)),
        "aten.b.default": Difference((1 * MIB, 0.0), (0, 0.0)),
        "aten.small.default": Difference((16384, 0.0), (0, 0.0)),
    }
    unknown = Difference((3 * MIB, 0.0), (0, 0.0))
    monkeypatch.setattr(accuracy, "compared", lambda: (frozenset(), table, unknown))
    called = CalledOperators()
    assert called.margin(64 * MIB) == Margin()
    called.note("aten.small.default", MIB)
    assert called.margin(64 * MIB) == Margin()
    called.note("aten.a.default", 4 * MIB)
    called.note("aten.a.default", 2 * MIB)
    called.note("aten.b.default", 64 * MIB)
    found = called.margin(64 * MIB)
    assert (found.above, found.below, found.why) == (2 * MIB, 32768, "a, b")
    called.note("library.never_compared.default", 1)
    assert called.margin(64 * MIB).above == 3 * MIB
    called.cause("recurrent networks", 0.5)
    found = called.margin(64 * MIB)
    assert (found.above, found.below) == (35 * MIB, 32 * MIB + 32768)
    assert found.why == "recurrent networks, never_compared, a and 1 more"


def test_the_table_names_operators_of_torch() -> None:
    equal, differences, unknown = accuracy.compared()
    assert "aten.addmm.default" in equal
    assert "aten._fft_r2c.default" in differences
    assert not equal & set(differences)
    assert unknown.above > (0, 0.0)


@pytest.mark.parametrize(
    ("call", "workspace", "reserve"),
    [
        # A program of benchmarks/oracle_programs.py with torch 2.13.0+cu130.
        (
            RecurrentCall(
                "lstm", 2, 1, False, False, 4, 64, 16, 256, 512, 512,
                4 * (2048 * 256 + 3 * 2048 * 512),
            ),
            43_647_360,
            23_068_928,
        ),
    ],
)  # fmt: skip
def test_memory_of_recurrent_networks(call: RecurrentCall, workspace: int, reserve: int) -> None:
    assert call.workspace(forward=True) == workspace
    assert call.workspace(forward=False) == workspace
    assert call.reserve == reserve
