"""Which line a finding is laid to: the program's own, not torch's."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch

import gpuprobe

pytestmark = pytest.mark.simulated

_OPERATORS = """
import torch

def race(side):
    x = torch.ones(64, device="cuda")
    with torch.cuda.stream(side):
        return x.sum()
"""


@pytest.mark.parametrize(
    ("folder", "is_its_own"),
    [("torchvision", True), ("torchao/float8", True), ("torch_geometric", True), ("torch", False)],
)
def test_packages_next_to_torch_are_the_program(folder: str, is_its_own: bool) -> None:
    name = str(Path(torch.__file__).parent.parent / folder / "operators.py")
    linecache.cache[name] = (len(_OPERATORS), None, _OPERATORS.splitlines(keepends=True), name)
    module: dict[str, object] = {}
    exec(compile(_OPERATORS, name, "exec"), module)
    with gpuprobe.virtual_gpu("h100-80gb"), gpuprobe.detect_hazards() as found:
        race = module["race"]
        assert callable(race)
        race(torch.cuda.Stream())
    (finding,) = found.races
    assert finding.location is not None
    assert (finding.location.file == name) == is_its_own
    assert all((place.file == name) == is_its_own for place in finding.related)
