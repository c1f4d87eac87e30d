"""The corpus on a virtual GPU: what races is found, what does not is left alone."""

from __future__ import annotations

import gc
import linecache
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hazard_corpus import CASES, Case
from torch import nn

import gpuprobe

pytestmark = pytest.mark.filterwarnings("ignore")

SAFE = [case for case in CASES if not case.kinds]


@pytest.fixture(scope="module", autouse=True)
def gpus() -> Iterator[None]:
    """One machine for all: to enter one takes longer than most programs."""
    with gpuprobe.virtual_gpu("2xh100-80gb"):
        gc.collect()
        gc.freeze()  # what is there now: collecting after each program is quick then
        try:
            yield
        finally:
            gc.unfreeze()


def judge(case: Case, text: str) -> Any:
    name = f"<corpus {case.name}>.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    code = compile(text, name, "exec")
    stream = torch.cuda.Stream()
    # Another one than ``stream``: of a device's 32, a kept one comes round again.
    graphs: Any = torch.cuda.graph
    graphs.default_capture_stream = None
    place = {"torch": torch, "cuda": torch.cuda, "nn": nn, "F": F, "s": stream}
    try:
        with gpuprobe.detect_hazards() as found:
            exec(code, place)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.cuda.set_stream(torch.cuda.default_stream())
        torch.cuda.set_device(0)
        place.clear()
        gc.collect()
        torch.cuda.empty_cache()
    return found


def test_the_corpus_is_large_enough() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.source for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    races = judge(case, case.text).races
    kinds = {finding.kind for finding in races}
    assert kinds == set(case.kinds), [finding.message for finding in races]
    for finding in races:
        assert finding.location is not None
        assert finding.location.file == f"<corpus {case.name}>.py"
        assert dict(finding.evidence)["fix verified"].startswith("yes")


def _mutants() -> list[tuple[Case, int]]:
    return [
        (case, number)
        for case in SAFE
        for number, line in enumerate(case.text.splitlines())
        if "#needed" in line
    ]


@pytest.mark.parametrize(
    ("case", "number"), _mutants(), ids=lambda value: getattr(value, "name", value)
)
def test_a_missing_synchronisation_is_found(case: Case, number: int) -> None:
    lines = case.text.splitlines()
    indent = re.match(r" *", lines[number])
    lines[number] = (indent[0] if indent else "") + "pass"
    races = judge(case, "\n".join(lines) + "\n").races
    assert races, f"without line {number + 1} of {case.name} nothing was found"
