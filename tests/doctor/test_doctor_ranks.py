"""``doctor --distributed``: the rules on plain data, and real ranks on gloo over loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import warm_python

from gpuprobe.model.findings import Level
from gpuprobe.model.machine.diagnosis import ClockSkew, RankDiagnosis
from gpuprobe.probes.distributed.collectives import check_links, link_speeds
from gpuprobe.probes.distributed.rules import (
    JobEnvironment,
    Member,
    check_members,
    check_skews,
    missing_ranks,
    read_job,
)
from gpuprobe.reporters.json.schemas import schema
from gpuprobe.reporters.sections.doctor import rank_doctor_sections
from gpuprobe.reporters.terminal import Style
from gpuprobe.reporters.text import draw

GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
JOB = JobEnvironment(0, 2, 0, "127.0.0.1", 29500, False, "-/-")
A = Member(0, 2, 0, "n1", 10, "GPU-a", "2.13.0")
B = Member(1, 2, 1, "n1", 11, "GPU-b", "2.13.0")


# -- the environment


def test_a_good_environment() -> None:
    assert read_job(GOOD) == JobEnvironment(1, 2, 1, "127.0.0.1", 29500, False, "-/-")
    torchrun = {**GOOD, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
    assert read_job(torchrun) == JobEnvironment(1, 2, 1, "127.0.0.1", 29500, True, "x/-")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    found = read_job({k: v for k, v in GOOD.items() if k != name})
    assert not isinstance(found, JobEnvironment)
    assert [f.rule for f in found] == ["GP180"]
    assert name in found[0].message
    assert found[0].fix is not None
    assert "torchrun" in found[0].fix.code


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "two"}, "RANK=two is not an integer"),
        ({"RANK": "-1"}, "RANK=-1 is not an integer"),
        ({"RANK": "2"}, "RANK=2 does not exist with WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, "LOCAL_RANK=2 is above RANK=1"),
        ({"LOCAL_WORLD_SIZE": "1"}, "does not exist with LOCAL_WORLD_SIZE=1"),
        ({"MASTER_PORT": "70000"}, "is not a port"),
    ],
)
def test_variables_that_do_not_fit(changes: dict[str, str], says: str) -> None:
    found = read_job({**GOOD, **changes})
    assert not isinstance(found, JobEnvironment)
    assert any(says in f.message for f in found), found


# -- who joined


def judged(*members: Member, job: JobEnvironment = JOB) -> list[tuple[str, Level, str]]:
    return [(f.rule, f.level, f.message) for f in check_members(job, members, 30.0)]


def test_a_complete_job() -> None:
    assert judged(A, B) == []
    assert judged(replace(A, device="cpu"), replace(B, device="cpu")) == []


def test_missing_ranks_are_named() -> None:
    assert missing_ranks(4, [A, replace(B, rank=2)]) == (1, 3)
    job = replace(JOB, world_size=4)
    members = (replace(A, world_size=4), replace(B, rank=2, world_size=4, local_rank=2))
    assert judged(*members, job=job) == [
        ("GP184", Level.ERROR, "ranks 1, 3 of 4 did not join within 30 s")
    ]


def test_disagreements() -> None:
    assert judged(A, replace(B, world_size=3))[0][2] == "rank 1 has WORLD_SIZE=3, rank 0 has 2"
    twice = [rule for rule, _, _ in judged(A, B, replace(B, pid=12, host="n2"))]
    assert twice == ["GP181"]
    local = judged(A, replace(B, local_rank=0, device="GPU-a"))
    assert local[0][2] == "2 processes claim to be LOCAL_RANK 0 on n1"
    # Two nodes of a job on one host.
    assert judged(A, replace(B, local_rank=0)) == []
    cpu = (replace(A, device="cpu"), replace(B, device="cpu", local_rank=0))
    assert judged(*cpu) == []
    versions = judged(A, replace(B, torch="2.6.0"))
    assert versions[0][:2] == ("GP181", Level.WARNING)


def test_devices_of_the_ranks() -> None:
    shared = judged(A, replace(B, device="GPU-a"))
    assert shared[0][:2] == ("GP187", Level.ERROR)
    # The same index on another machine is another GPU.
    assert judged(A, replace(B, device="GPU-a", host="n2")) == []
    mixed = judged(A, replace(B, device="cpu"))
    assert mixed[0][:2] == ("GP187", Level.WARNING)


@pytest.mark.parametrize(
    ("ahead_ms", "error_ms", "level"),
    [
        (0, 1, None),
        (40, 1, None),
        (-100, 1, Level.NOTE),
        (2_000, 1, Level.WARNING),
        (-2_000, 1, Level.WARNING),
        (2_000, 1_990, None),  # the measurement itself explains it
    ],
)
def test_clock_skew(ahead_ms: int, error_ms: int, level: Level | None) -> None:
    skew = ClockSkew(1, ahead_ms * 1_000_000, error_ms * 1_000_000)
    assert [f.level for f in check_skews([skew])] == ([] if level is None else [level])


def test_what_the_ranks_report_is_judged() -> None:
    from gpuprobe.probes.distributed.collectives import check_results, speeds

    good = {"steps": ["barrier"], "error": "", "doing": "", "wrong": 0, "times": [(1024, 10, 5000)]}
    assert list(check_results({0: good, 1: good}, "gloo")) == []
    wrong = list(check_results({0: good, 1: {**good, "wrong": 7}}, "nccl"))
    assert [(f.rule, f.message) for f in wrong] == [
        ("GP186", "an all-reduce gave wrong sums on rank 1")
    ]
    failed = {**good, "error": "RuntimeError: Connection closed by peer", "doing": "barrier"}
    silent = list(check_results({0: failed, 1: None}, "gloo"))
    assert [f.rule for f in silent] == ["GP185"]
    assert silent[0].message == "barrier failed (gloo)"
    assert ("rank 1", "no answer in time") in silent[0].evidence
    slow = {**good, "times": [(1024, 10, 20000)]}
    (speed,) = speeds([good, slow], 2)
    assert speed.latency_ns == 2000  # the slowest rank's
    assert speed.bus_bandwidth == pytest.approx(1024 / 2000e-9)


def test_other_collectives_are_checked() -> None:
    from gpuprobe.probes.distributed.collectives import _checked, check_results

    good: dict[str, Any] = {"steps": [], "error": "", "doing": "", "wrong": 0, "others": {}}
    bad = {**good, "others": {"all-to-all": 3}}
    (found,) = check_results({0: good, 1: bad}, "nccl")
    assert (found.rule, found.message) == ("GP186", "all-to-all gave wrong values on rank 1")

    def step(name: str, action: Callable[[], int]) -> int:
        value = action()
        good["steps"].append(name)
        return value

    def lacks() -> int:
        raise RuntimeError("Backend gloo does not support reduce_scatter")

    def fails() -> int:
        raise RuntimeError("Connection closed by peer")

    _checked(good, "reduce-scatter", lacks, step)
    _checked(good, "all-gather", lambda: 0, step)
    _checked(good, "all-to-all", lambda: 5, step)
    assert (good["steps"], good["others"]) == (["all-gather"], {"all-to-all": 5})
    with pytest.raises(RuntimeError, match="Connection closed"):
        _checked(good, "all-gather", fails, step)


@pytest.mark.parametrize(
    ("times", "messages"),
    [
        ([5, 5, 5, 5], []),
        ([5, 5, 30, 5], ["the link from rank 1 to rank 2 is slow: 4.0 MiB take 30.00 ms"]),
        ([5, 5, 30, 40], ["rank 2 is slow: both of its links are: 4.0 MiB take 40.00 ms"]),
        ([5, 12, 5, 5], []),  # not three times as long
        ([0.1, 1, 0.1, 0.1], []),  # the scheduler's
        ([5, 100], []),  # of two links, either may be the slow one
    ],
)
def test_slow_links_and_ranks_are_named(times: list[float], messages: list[str]) -> None:
    """``times``: milliseconds of the link that leads to each rank."""
    links = link_speeds({rank: int(ms * 1_000_000) for rank, ms in enumerate(times)})
    found = list(check_links(links))
    assert [finding.rule for finding in found] == ["GP189"] * len(messages)
    for finding, message in zip(found, messages, strict=True):
        assert finding.message.startswith(message.partition(" take ")[0])
        assert all(finding.level is Level.WARNING for finding in found)


# -- real ranks


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environ(**changes: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
    for name in (*GOOD, "GROUP_RANK", "LOCAL_WORLD_SIZE"):
        keep.pop(name, None)
    return {**keep, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **changes}


def _rank(
    rank: int, world_size: int, port: int, timeout: str, *more: str, python: str = ""
) -> subprocess.Popen[str]:
    environ = _environ(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return subprocess.Popen(
        [
            *(python or warm_python.shared().python, "-m", "gpuprobe", "doctor", "--distributed"),
            *("--timeout", timeout, *more),
        ],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _document(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(schema("doctor-2")).validate(document)
    return document


@pytest.mark.slow
def test_two_ranks_under_torchrun() -> None:
    pytest.importorskip("torch")
    options = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port"]
    command = ["-m", "gpuprobe", "doctor", "--distributed", "--json", "--timeout", "60"]
    done = subprocess.run(
        [warm_python.shared().folder / "torchrun", *options, str(_free_port()), *command],
        env=_environ(**warm_python.ranks()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = _document(done.stdout)  # one document: only rank 0 prints
    assert document["findings"] == []
    assert document["backend"] == "gloo"
    assert [place["rank"] for place in document["joined"]] == [0, 1]
    for step in (
        "every rank joined", "process group", "barrier", "all-reduce", "all-gather",
        "reduce-scatter", "all-to-all", "speed measured", "links measured",
    ):  # fmt: skip
        assert step in document["steps"]
    assert [(link["source"], link["target"]) for link in document["links"]] == [(1, 0), (0, 1)]
    assert [speed["size"] for speed in document["speeds"]] == [1024, 65536, 1 << 20, 16 << 20]
    assert all(speed["bus_bandwidth"] > 0 for speed in document["speeds"])
    (skew,) = document["skews"]  # one machine, one clock: zero within the error
    assert abs(skew["ahead_ns"]) <= skew["error_ns"] + 50_000_000


@pytest.mark.slow
def test_a_rank_that_never_starts_is_named() -> None:
    pytest.importorskip("torch")
    process = _rank(0, 2, _free_port(), "2", "--json")
    out, err = process.communicate()
    assert process.returncode == 1, err
    document = _document(out)
    assert document["missing"] == [1]
    assert [f["rule"] for f in document["findings"]] == ["GP184"]
    assert "rank 1 of 2 did not join" in document["findings"][0]["message"]
    assert {entry["id"] for entry in document["not_checked"]} >= {"GP185", "GP186"}


@pytest.mark.slow
def test_ranks_with_different_world_sizes_all_fail_alike() -> None:
    pytest.importorskip("torch")
    port = _free_port()
    ranks = [_rank(0, 2, port, "60"), _rank(1, 3, port, "60")]
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], outputs
    assert "rank 1 has WORLD_SIZE=3, rank 0 has 2" in outputs[0][0]
    assert outputs[1][0] == ""  # rank 0 reports for all


@pytest.mark.slow
def test_without_rank_0_the_others_say_so_on_stderr() -> None:
    """In a new process: torch reads at its import which of its messages are printed."""
    pytest.importorskip("torch")
    process = _rank(1, 2, _free_port(), "1", python=sys.executable)
    out, err = process.communicate()
    assert process.returncode == 1
    assert out == ""
    assert "GP182" in err
    assert "frame #" not in err  # torch's C++ stacks


@pytest.mark.slow
def test_a_meeting_point_that_goes_away() -> None:
    pytest.importorskip("torch")
    port = _free_port()
    serve = (
        "import sys; from torch.distributed import TCPStore; "
        "s = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False); "
        "s.wait(['gpuprobe-doctor/-/-/claim/1'])"
    )
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", serve, str(port)]):
        process = _rank(1, 2, port, "60")
        out, err = process.communicate()
    assert process.returncode == 1
    assert out == ""
    assert "GP184" in err or "GP185" in err, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_port_that_is_taken() -> None:
    pytest.importorskip("torch")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        process = _rank(0, 1, other.getsockname()[1], "5", "--json")
        out, err = process.communicate()
    assert process.returncode == 1, err
    assert [f["rule"] for f in _document(out)["findings"]] == ["GP183"]


def test_outside_of_a_job_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuprobe.cli import main

    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--distributed"]) == 1
    assert "MASTER_ADDR" in capsys.readouterr().out


def test_the_text_report() -> None:
    from gpuprobe.model.machine.diagnosis import RankPlace, TransferSpeed
    from gpuprobe.model.values import Bytes

    report = RankDiagnosis(
        0,
        2,
        "nccl",
        (RankPlace(0, 0, "n1", 1, "GPU-a"), RankPlace(1, 1, "n\x1b[2J", 2, "GPU-b")),
        steps=("barrier",),
        speeds=(TransferSpeed(Bytes(1 << 20), 5, 100_000, 1e10),),
        skews=(ClockSkew(1, -1_500_000, 20_000),),
    )
    text = "\n".join(draw.lines(rank_doctor_sections(report), Style()))
    assert text.startswith("Nothing found (2 of 2 ranks, nccl)")
    assert "-1.5 ms ± 20.0 µs" in text
    assert "9.3 GiB/s" in text
    assert "\x1b" not in text
    assert "\\x1b" in text
