"""The corpus on real CUDA: the verdicts of the virtual GPU. Runs only where torch has a device."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from hazard_case import Case
from hazard_corpus import CASES
from torch import nn

import gpuprobe

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs")
    name = f"<corpus {case.name}>.py"
    linecache.cache[name] = (len(case.text), None, case.text.splitlines(keepends=True), name)
    code = compile(case.text, name, "exec")
    place = {"torch": torch, "cuda": torch.cuda, "nn": nn, "F": F, "s": torch.cuda.Stream()}
    torch.cuda.synchronize()
    with gpuprobe.detect_hazards() as found:
        exec(code, place)
        torch.cuda.synchronize()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert not [text for text in found.coverage if "failure" in text]
    assert {finding.kind for finding in found.races} == set(case.kinds)
