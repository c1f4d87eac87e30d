"""The command, its JSON and text, the bundle, and what is redacted in it."""

from __future__ import annotations

import io
import json
import re
import string
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from doctor_machine import Machine, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from gpuprobe.api.doctor import _write_bundle, diagnose, doctor, redactor_for
from gpuprobe.cli import main
from gpuprobe.errors import EnvironmentUnavailable, UsageError
from gpuprobe.model.machine.devices import GpuProcess
from gpuprobe.model.machine.diagnosis import Diagnosis
from gpuprobe.model.values import Bytes, Reading, Unavailable
from gpuprobe.probes.health.base import KernelMessage
from gpuprobe.reporters import support_bundle as doctor_bundle
from gpuprobe.reporters.json import doctor as doctor_json
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.doctor import doctor_sections
from gpuprobe.reporters.support_bundle import Redactor
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
def test_this_machine_for_real(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuprobe", "doctor", "--json", "--bundle", tmp_path / "b.zip"],
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
    assert zipfile.ZipFile(tmp_path / "b.zip").testzip() is None


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


# -- the bundle


def _bundle(path: Path, machine: Machine, environ: Mapping[str, str]) -> dict[str, str]:
    facts = replace(machine.facts, environ=dict(environ))
    result = outcome(facts)
    report = Diagnosis(0.0, "570.1", "2.13", 7, result.findings, result.passed)
    _write_bundle(path, report, facts, environ)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_what_is_in_a_bundle(tmp_path: Path, machine: Machine) -> None:
    xid = KernelMessage(5.0, "NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.")
    machine.facts = machine.but(
        kernel_log=(xid,),
        packages={"torch": "2.13.0+cu126", "nvidia-cublas-cu12": "12.6.4.1"},
    )
    environ = {"CUDA_VISIBLE_DEVICES": "0", "EDITOR": "vi", "NCCL_DEBUG": "INFO"}
    files = _bundle(tmp_path / "out.zip", machine, environ)
    assert set(files) == {
        "README.txt",
        "doctor.json",
        "info.json",
        "environment.json",
        "packages.json",
        "kernel.log",
    }
    doctor_document = json.loads(files["doctor.json"])
    valid(doctor_document)
    assert doctor_document["findings"][0]["rule"] == "GP124"
    assert json.loads(files["environment.json"]) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "INFO",
    }
    # A version of four numbers is not an address.
    assert json.loads(files["packages.json"])["nvidia-cublas-cu12"] == "12.6.4.1"
    assert "fallen off the bus" in files["kernel.log"]
    assert json.loads(files["info.json"])["devices"][0]["identity"]["uuid"].startswith("GPU-")
    assert (tmp_path / "out.zip").stat().st_mode & 0o077 == 0


def test_a_bundle_never_overwrites(
    tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.zip"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        _bundle(out, machine, {})
    assert main(["doctor", "--demo", "empty", "--bundle", str(out)]) == 2
    assert out.read_text() == "mine"
    assert "exists already" in capsys.readouterr().err


def test_a_bundle_that_cannot_be_written(tmp_path: Path, machine: Machine) -> None:
    with pytest.raises(EnvironmentUnavailable, match="cannot write"):
        _bundle(tmp_path / "no" / "out.zip", machine, {})


_SECRETS = st.text(string.ascii_letters + string.digits + "+/=_-", min_size=8, max_size=40).map(
    lambda text: "Zq9" + text
)
_NAMES = st.text(string.ascii_lowercase, min_size=4, max_size=12).map(lambda text: "zq" + text)
_SHELTERED = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_PAT")


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(secret=_SECRETS, user=_NAMES, host=_NAMES, holder=st.sampled_from(_SHELTERED))
def test_planted_secrets_and_names_are_nowhere_in_a_bundle(
    tmp_path_factory: pytest.TempPathFactory,
    machine: Machine,
    secret: str,
    user: str,
    host: str,
    holder: str,
) -> None:
    environ = {
        holder: secret,
        "USER": user,
        "HOME": f"/home/{user}",
        "HOSTNAME": f"{host}.example.org",
        "TORCH_HOME": f"/home/{user}/cache/{secret}",
        "NCCL_SOCKET_IFNAME": host,
        "MASTER_ADDR": "10.11.12.13",
        "PYTHONPATH": f"/home/{user}/src:/data/{user}/lib",
        "CUDA_CACHE_PATH": f"https://{user}:{secret}@{host}.example.org/x?token={secret}",
        "TORCH_LOGS": secret,  # appears in a finding of GP143
    }
    first = machine.first
    process = GpuProcess(
        77,
        first.key,
        ("compute",),
        memory=Reading(Bytes(1), "nvml"),
        user=Reading(f"{user}x", "host"),
        uid=Reading(4711, "host"),
        name=Reading("python", "host"),
        command=Reading(f"/home/{user}/env/bin/python train.py --api-key {secret}", "host"),
    )
    found = machine.facts.inventory
    assert not isinstance(found, Unavailable)
    machine.facts = machine.but(
        inventory=replace(
            found, processes=(process,), host=replace(found.host, hostname=f"{host}-gpu")
        ),
        kernel_log=(
            KernelMessage(1.0, f"NVRM: Xid (PCI:0000:18:00): 31, name={user}, {secret} on {host}"),
            KernelMessage(2.0, f"nvidia: loaded by {user}@{host}.example.org from 192.168.7.9"),
        ),
    )
    path = tmp_path_factory.mktemp("bundle") / "out.zip"
    files = _bundle(path, machine, environ)
    text = "\n".join([*files, *files.values()]).lower()
    for planted in (secret, user, host, "10.11.12.13", "192.168.7.9", "train.py"):
        assert planted.lower() not in text, planted


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://ada:pw@host/x", "https://<secret>@host/x"),
        ("use hf_abcdefghijklmnopqrst now", "use <secret> now"),
        ("--password hunter2 --epochs 3", "--password <secret> --epochs 3"),
        ('{"api_key": "abc123"}', '{"api_key": "<secret>"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer <secret>"),
        ("GET /?sig=abc&n=1", "GET /?sig=<secret>&n=1"),
        ("mail ada.l@example.org", "mail <mail>"),
        ("/home/grace/x and /Users/grace/y", "/home/<user>/x and /Users/<user>/y"),
        ("addr 10.0.0.1:29500", "addr <ip>:29500"),
        ("addr fe80::1ff:fe23:4567:890a", "addr <ip>"),
        ("hw 3e:fe:28:dd:ec:e5", "hw <mac>"),
        ("Xid (PCI:0000:18:00): 79", "Xid (PCI:0000:18:00): 79"),
        ("vbios 96.00.89.00.01", "vbios 96.00.89.00.01"),
        ("GPU-3ebf1335-d9db-a275-96b3-7a723d058eed", "GPU-3ebf1335-d9db-a275-96b3-7a723d058eed"),
        ("total 12", "total 12"),  # "al" is a user, and a part of this word
        ("al's host vm1", "<user>'s host <host>"),
        ("TOKENIZERS_PARALLELISM=true", "TOKENIZERS_PARALLELISM=<secret>"),
        ("is true", "is true"),
    ],
)
def test_what_is_redacted_and_what_is_left(text: str, left: str) -> None:
    environ = {"TOKENIZERS_PARALLELISM": "true"}
    assert Redactor(environ, users=["al"], hosts=["vm1"]).text(text) == left


def test_this_machines_names_are_known(machine: Machine) -> None:
    import socket

    redactor = redactor_for(machine.facts, {"USER": "zqperson"})
    assert redactor.text(f"zqperson on {socket.gethostname()}") == "<user> on <host>"


def test_commands_are_cut_to_the_program() -> None:
    info = {"processes": [{"command": {"value": "/opt/x/python a --b", "source": "host"}}]}
    cut = doctor_bundle._without_commands(info)
    assert cut["processes"][0]["command"]["value"] == "python"
