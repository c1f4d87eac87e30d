"""Ordinary programs, watched at both levels: they compute the same, and everything adds up."""

from __future__ import annotations

import pytest
import torch
from conservation import check_steps
from programs import ORDINARY, no_hooks_left
from sinks import KeepingSink

from gpuprobe.sampler.recorder import Recorder


# Forking beside threads, which Python 3.12 warns of; and torch.jit, which torch 2.13 does, and 2.15
# in another category.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_program(name: str) -> None:
    program = ORDINARY[name]
    torch.manual_seed(5)
    expected = program()
    for level in ("counters", "trace"):
        sink = KeepingSink()
        warnings: list[str] = []
        torch.manual_seed(5)
        with no_hooks_left(), Recorder(sink, level=level, warn=warnings.append):
            losses = program()
        assert losses == expected
        assert warnings == []
        assert sink.ends[0].gpuprobe_faults == ()
        assert sink.steps
        check_steps(sink.steps, sink.traces)
        if level == "trace":
            assert all(step.traces for step in sink.steps[:3])
            elsewhere = [spot for spot in sink.blind_spots if "other threads" in spot.what]
            assert len(elsewhere) == (name == "two_threads")
