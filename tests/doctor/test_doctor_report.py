"""The command, its JSON and text."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from doctor_machine import Machine, outcome

from gpuprobe.api.doctor import diagnose, doctor
from gpuprobe.cli import main
from gpuprobe.model.machine.diagnosis import Diagnosis
from gpuprobe.reporters.json import doctor as doctor_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.doctor import doctor_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw
from gpuprobe.testing import fleets

ROOT = Path(__file__).resolve().parents[2]


def valid(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema("doctor-2")).validate(document)


# -- the command


@pytest.mark.parametrize("fleet", sorted(fleets()))
def test_every_fleet_gives_a_valid_document(
    fleet: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = main(["doctor", "--json", "--demo", fleet])
    document = json.loads(capsys.readouterr().out)
    valid(document)
    assert document["demo"] == fleet
    if fleet == "no-driver":
        assert code == 3
        assert [f["rule"] for f in document["findings"]] == ["GP101"]
    else:
        assert code == (0 if document["healthy"] else 1)
        found = document["findings"]
        assert document["healthy"] is all(f["level"] == "note" for f in found)


def test_exit_codes_of_the_three_outcomes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["doctor", "--demo", "empty"]) == 0
    assert main(["doctor", "--demo", "ecc"]) == 1
    assert main(["doctor", "--demo", "no-driver"]) == 3
    assert main(["doctor", "--demo", "no-such-fleet"]) == 2
    assert "no such fleet" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_for_real() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(done.stdout)
    valid(document)
    without_driver = isinstance(document["driver"], dict)
    assert done.returncode == (3 if without_driver else 0 if document["healthy"] else 1)
    rules = {r["id"] for r in document["passed"]} | {f["rule"] for f in document["findings"]}
    rules |= {r["id"] for r in document["not_checked"]}
    from gpuprobe.probes.health import RULES

    assert rules == {rule.id for rule in RULES}


def test_the_public_name_gives_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    import gpuprobe

    assert gpuprobe.doctor is doctor
    assert "GP143" in [finding.rule for finding in gpuprobe.doctor()]


def test_options_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--distributed", "--demo", "ecc"]) == 2
    assert main(["doctor", "--distributed", "--timeout", "0"]) == 2
    assert "above 0" in capsys.readouterr().err


# -- text


def _text(diagnosis: Diagnosis) -> str:
    return "\n".join(draw.lines(doctor_sections(diagnosis), Style()))


def test_text_begins_with_what_is_wrong_and_ends_with_what_was_not_seen() -> None:
    text = _text(diagnose("ecc", environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    lines = text.splitlines()
    assert re.match(r"2 errors, \d warnings, 1 note \(demo fleet ecc, driver 535.161.08", lines[0])
    first, second = [i + 1 for i, line in enumerate(lines) if not line][:2]
    assert lines[first : first + 5] == [
        "GPU                            verdict   findings",
        "GPU 0 (NVIDIA A100-SXM4-80GB)  error     GP122, GP123",
        "GPU 1 (NVIDIA A100-SXM4-80GB)  error     GP123, GP122",
        "GPU 2 (Tesla P100-PCIE-16GB)   warning   GP122, GP123",
        "GPU 3 (NVIDIA A100-SXM4-80GB)  note      GP122",
    ]
    assert lines[second].startswith("error GP122: GPU 0 (NVIDIA A100-SXM4-80GB) lost data: 2")
    order = [text.index(part) for part in ("error GP123", "warning GP122", "note GP122", "Passed")]
    assert order == sorted(order)
    assert text.index("Passed") < text.index("\n15 checks could not run:\n")
    assert "       nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT" in lines


def test_text_of_a_healthy_machine(machine: Machine) -> None:
    result = outcome(machine.facts)
    text = _text(Diagnosis(0.0, "570.1", "2.13.0", 7, result.findings, result.passed))
    assert text.startswith("Nothing found (driver 570.1, torch 2.13.0, 7 GPUs)\n\nPassed (")
    assert "PCIe links run at their maximum" in text.replace("\n  ", " ")
    assert "could not run" not in text


def test_a_verdict_counts_what_could_not_be_read_of_its_gpu() -> None:
    found = diagnose("denied", environ={})
    assert [(one.level, one.not_checked) for one in found.verdicts] == [(None, 2), (None, 0)]
    lines = _text(found).splitlines()
    assert "GPU 0 (NVIDIA H100 80GB HBM3)  ok        2 checks could not run" in lines
    assert "GPU 1 (NVIDIA H100 80GB HBM3)  ok" in lines
    assert doctor_json.MACHINE.plain(found)["verdicts"][0] == {
        "name": "GPU 0 (NVIDIA H100 80GB HBM3)",
        "level": None,
        "rules": [],
        "not_checked": 2,
    }


def test_a_verdict_is_about_one_gpu_of_several_in_a_finding() -> None:
    found = diagnose("8xh100", environ={})
    rules = {one.name[:5]: [found.rule for found in one.findings] for one in found.verdicts}
    busy = {f"GPU {n}": ["GP131"] for n in (0, 1, 2, 3, 5)}
    assert {name: ids for name, ids in rules.items() if ids} == {**busy, "GPU 7": rules["GPU 7"]}
    assert "GP111" in rules["GPU 7"]


def test_a_heading_that_wraps_is_bold_in_all_its_lines() -> None:
    style = Style(colour=True)
    lines = list(draw.lines(doctor_sections(diagnose("ecc", environ={})), style))
    first = next(i for i, line in enumerate(lines) if "GP122" in line and "\x1b[1m" in line)
    assert "errors since the driver was loaded" in lines[first + 1]
    assert "\x1b[1m" in lines[first + 1]


def test_hostile_names_are_shown_not_executed() -> None:
    text = _text(diagnose("hostile", environ={}))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b" in text
    ascii_stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    draw.write(doctor_sections(diagnose("hostile", environ={})), ascii_stream)
    ascii_stream.flush()
