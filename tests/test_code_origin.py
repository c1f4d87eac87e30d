"""Telling the program's frames from gpuprobe's and torch's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import gpuprobe
from gpuprobe.code_origin import PACKAGE, folder_of, line_of

BESIDE_TORCH = Path(torch.__file__).parent.parent / "torchvision" / "ops.py"


def ops() -> ModuleType:
    """A module that lies where torchvision would: next to torch, with a name that begins alike."""
    made = ModuleType("torchvision.ops")
    source = """
def race(torch):
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 16, device="cuda")
    with torch.cuda.stream(side):
        y = x + 1
    return x.mul_(2)

def needs_a_value(tensor):
    return bool(tensor.sum() > 0)
"""
    exec(compile(source, str(BESIDE_TORCH), "exec"), vars(made))
    return made


def test_folders_end() -> None:
    assert torch.nn.__file__.startswith(folder_of(torch))
    assert not str(BESIDE_TORCH).startswith(folder_of(torch))
    assert gpuprobe.__file__.startswith(PACKAGE)
    assert not f"{PACKAGE[:-1]}_extra/x.py".startswith(PACKAGE)


def test_lines_of_instructions() -> None:
    code = ops().race.__code__
    assert line_of(code, 0) == code.co_firstlineno
    assert line_of(code, len(code.co_code) - 2) == code.co_firstlineno + 5
    assert line_of(code, 1 << 20) == code.co_firstlineno


@pytest.mark.simulated
def test_a_value_is_needed_in_torchvision_not_in_its_caller() -> None:
    with (
        pytest.raises(gpuprobe.errors.ValueNeeded, match=r"torchvision/ops\.py:10 \(called at "),
        gpuprobe.virtual_gpu("t4", "shapes"),
    ):
        ops().needs_a_value(torch.zeros(1024, 1024, device="cuda"))  # more than is computed


@pytest.mark.simulated
def test_a_race_is_torchvisions() -> None:
    with gpuprobe.detect_hazards(gpu="t4") as found:
        ops().race(torch)
    assert {item.location.file for item in found.findings} == {str(BESIDE_TORCH)}
