"""A truth file's content, made up."""

from __future__ import annotations

from dataclasses import replace

from truth_files import Gpu, StepTruth, Truth

GPU = Gpu("NVIDIA H100 80GB HBM3", (9, 0), {"total_memory": 85028896768})


def truth(**changes: object) -> Truth:
    made = Truth(
        case="mlp-at-1mib",
        about="a test",
        device="cuda",
        tiny=False,
        outcome="ok",
        torch="2.13.0",
        python="3.11.7",
        cuda="12.8",
        cudnn="91002",
        driver="570.1",
        gpu=GPU,
        built=StepTruth(1, 2, 1, 1, 2),
        steps=(StepTruth(3, 4, 3, 1, 4, 0.5),),
        peak_allocated=3,
        peak_reserved=4,
        beside=500 << 20,
    )
    return replace(made, **changes)
