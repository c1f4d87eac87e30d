"""A baseline of another environment is refused, or compared with a caution: never silently."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import warm_python
from check_programs import KEPT_WORKSPACES, PROGRAM, measured

from gpuprobe.analysis.baseline.check import check_baseline
from gpuprobe.analysis.baseline.model import Baseline, CheckResult
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.peak.peaks import Share
from gpuprobe.api.check import compare
from gpuprobe.api.check import recorded as recorded_baseline
from gpuprobe.reporters.json import check as check_json

ENVIRONMENT = {
    "allocator": "",
    "device": "simulated a100-40gb",
    "level": "trace",
    "precision": "float32 parameters, no autocast",
    "torch": "2.13",
}


def baseline(**environment: str) -> Baseline:
    line = LineShare("train.py:3 in main", 1024, 1, (("activation", 1024),))
    peak = Account(1024, (line,), (Share("activation", 1024, 1),), (Share("Net", 1024, 1),))
    return Baseline(
        environment={**ENVIRONMENT, **environment},
        steps=4,
        metrics={"peak_allocated": 1024},
        phases={"phase forward": 1024},
        accounts={"peak": peak, "phase forward": replace(peak, categories=(), modules=())},
    )


def against(**environment: str) -> CheckResult:
    return check_baseline(baseline(), baseline(**environment))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "simulated h100-80gb"),
        ("device", "NVIDIA A100-SXM4-40GB"),
        ("device", "cpu"),
        ("torch", "2.12"),
        ("allocator", "expandable_segments:True"),
    ],
)
def test_another_one_is_refused(key: str, value: str) -> None:
    result = against(**{key: value})
    assert not result.ok
    (text,) = result.mismatches
    assert text == f"{key}: {ENVIRONMENT[key]!r} in the baseline, {value!r} now"
    (finding,) = check_json.findings(result)
    assert finding.rule == "GPM-environment"
    # It is compared where that was asked for, and the result says so.
    one, two = baseline(), baseline(**{key: value})
    accepted = check_baseline(one, two, accept_environment=True)
    assert accepted.ok
    assert f"{text}; compared anyway" in accepted.cautions
    assert text in finding.message


def test_a_recording_that_does_not_say_its_gpu_is_compared_with_a_caution() -> None:
    result = against(device="cuda")
    assert result.ok
    (text,) = result.cautions
    assert text.startswith("device: the recording has no GPU name")
    assert "simulated a100-40gb" in text
    (text,) = check_baseline(baseline(device="cuda"), baseline()).cautions
    assert text.startswith("device: the baseline has no GPU name")


@pytest.mark.parametrize("value", ["bfloat16 parameters, no autocast", ""])
def test_another_precision_is_compared_with_a_caution(value: str) -> None:
    result = against(precision=value)
    assert result.ok
    (text,) = result.cautions
    assert "float32 parameters, no autocast in the baseline" in text
    assert (value or "unknown") in text


def test_other_steps_metrics_phases_and_levels_are_said() -> None:
    one = baseline()
    two = replace(
        one,
        steps=9,
        metrics={**one.metrics, "races": 0},
        phases={"phase evaluation": 1},
        accounts={},
    )
    assert set(check_baseline(two, one).cautions) == {
        "9 steps in the baseline, 4 now",
        "races is in the baseline but was not measured in this run",
        "skipped, because they did not occur in this run: phase evaluation",
        "one side has no trace, so the cause is unknown (use level trace)",
    }
    for pair in ((one, replace(one, phases={})), (replace(one, phases={}), one)):
        (text,) = check_baseline(*pair).cautions
        assert text.startswith("phases were not compared: some steps have no trace")
    assert against().cautions == ()


def test_what_is_noted_of_a_run(tmp_path: Path) -> None:
    """Precision, device, steps; and what a recording of the same run tells."""
    half = (
        (
            "    loss = model(x)",
            "    with torch.autocast('cuda', torch.float16):\n        loss = model(x)",
        ),
        ("model = nn.Sequential(*layers)", "model = nn.Sequential(*layers).bfloat16().float()"),
    )
    found = measured(tmp_path / "half", *half)
    assert found.environment["precision"] == "float32 parameters, autocast to float16"
    assert found.environment["device"] == "simulated a100-40gb"
    assert found.steps == 6
    assert found.stopped_after is None

    plain = measured(tmp_path / "plain")
    assert plain.environment["precision"] == "float32 parameters, no autocast"
    caution, fell = compare(plain, found).cautions
    assert caution.startswith("precision: ")
    assert re.match(r"memory fell \(.*\): gpuprobe baseline update locks this in", fell)

    stopped = measured(tmp_path / "stopped", options=["--stop-after", "3"])
    assert (stopped.steps, stopped.stopped_after) == (3, 3)
    # The evaluation comes after the loop, and growth takes more steps to show.
    told = compare(plain, stopped).cautions
    gone = "after the last step, phase evaluation"
    assert f"skipped, because they did not occur in this run: {gone}" in told
    assert "growth_per_step is in the baseline but was not measured in this run" in told
    assert "6 steps in the baseline, 3 now" in told

    traced = ("--level", "trace", "--trace-steps", "all")
    run = ("run", "--gpu", "a100-40gb", "-o", "run.gpuprobe", *traced, "train.py")
    done = warm_python.gpuprobe(*run, cwd=tmp_path / "plain", environment=KEPT_WORKSPACES)
    assert done.returncode == 0, done.stderr
    recorded = recorded_baseline(tmp_path / "plain" / "run.gpuprobe")
    assert recorded.environment["device"] == "cuda"
    assert recorded.metrics == plain.metrics
    assert recorded.phases == plain.phases
    result = compare(plain, recorded)
    assert result.ok
    assert {text.partition(":")[0] for text in result.cautions} == {"device", "precision"}

    exits = tmp_path / "exits.py"
    exits.write_text(PROGRAM + "raise SystemExit(7)\n", encoding="utf-8")
    update = ("baseline", "update", exits.name, "--gpu", "a100-40gb", "--baseline", "b.json")
    done = warm_python.gpuprobe(*update, cwd=tmp_path)
    assert (done.returncode, "exit code 7" in done.stderr) == (5, True), done.stderr
