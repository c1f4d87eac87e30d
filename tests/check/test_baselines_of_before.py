"""Baselines that earlier versions wrote, on either of their two engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuprobe.analysis.baseline import Baseline, check_baseline, dumps, loads
from gpuprobe.api.check import refuse_modelled
from gpuprobe.errors import UsageError
from gpuprobe.gate.plan import plan

NOW = Baseline(
    environment={"device": "simulated t4", "torch": "2.13", "allocator": ""},
    steps=3,
    metrics={"peak_allocated": 1 << 20},
    phases={},
    command=("train.py",),
)


def written(**environment: str) -> Baseline:
    """A baseline as an earlier version wrote it, read now."""
    document = json.loads(dumps(NOW))
    document["environment"].update(environment)
    return loads(json.dumps(document), "memory.json")


@pytest.mark.parametrize(
    "environment",
    [{"device": "native t4"}, {"device": "virtual t4", "engine": "native"}],
    ids=["of a test", "of a check"],
)
def test_those_of_torchs_own_code_stay(environment: dict[str, str]) -> None:
    before = written(**environment)
    assert before.environment == NOW.environment
    assert check_baseline(before, NOW).ok
    refuse_modelled(before, plan((), before=before), "memory.json")


def test_those_of_the_model_are_refused_with_the_command_that_renews_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = written(device="virtual t4")
    made = plan((), before=before)
    assert made.gpu == "t4"
    with pytest.raises(UsageError, match="model of a GPU") as met:
        refuse_modelled(before, made, "memory.json")
    assert met.value.hint == "renew it: gpuprobe baseline update --baseline memory.json"
    refuse_modelled(before, replace(made, accept_environment=True), "memory.json")
    (text,) = check_baseline(before, NOW).mismatches
    assert "'virtual t4' in the baseline is a model of that GPU" in text
