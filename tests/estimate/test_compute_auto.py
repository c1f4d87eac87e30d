"""``--compute auto`` and ``--assume``: what is done where a run needs a value."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python

import gpuprobe
from gpuprobe.cli.parser import dispatch
from gpuprobe.errors import ProgramFailed, UsageError, ValueNeeded
from gpuprobe.model.plans.assumptions import Assumptions, parse
from gpuprobe.reporters.json.estimate import document, estimate_of
from gpuprobe.reporters.sections.plans import estimate_sections
from gpuprobe.reporters.text import draw

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20


def decides(size: int = 1024, calls: list[int] | None = None) -> Callable[[], None]:
    """A step whose memory depends on a value."""

    def step() -> None:
        if calls is not None:
            calls.append(1)
        values = torch.ones(size, size, device="cuda").exp()
        count = MIB if values.sum() > 0 else 2 * MIB
        torch.empty(count, dtype=torch.uint8, device="cuda")

    return step


LINE = f"{Path(__file__).name}:{decides.__code__.co_firstlineno + 7}"


@pytest.mark.simulated
def test_all_values_are_computed_where_one_is_needed() -> None:
    calls: list[int] = []
    found = gpuprobe.estimate(decides(calls=calls), gpu="t4", steps=1)
    assert len(calls) == 2
    assert found.compute == "real"
    assert re.search(rf"{LINE} needs a value", found.compute_why)
    asked = gpuprobe.estimate(decides(), gpu="t4", steps=1, compute="real")
    assert asked.compute_why == "as requested"
    assert (found.peak_allocated, found.peak_reserved) == (
        asked.peak_allocated,
        asked.peak_reserved,
    )
    stream = io.StringIO()
    draw.write(estimate_sections(found), stream)
    text = " ".join(stream.getvalue().split())
    assert "values of large tensors: computed" in text
    assert "needs a value" in text


@pytest.mark.simulated
def test_shapes_are_enough_where_nothing_decides() -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        torch.ones(1024, 1024, device="cuda").exp()

    found = gpuprobe.estimate(step, gpu="t4", steps=1)
    assert len(calls) == 1
    assert (found.compute, found.compute_why) == ("shapes", "the script does not need them")
    assert estimate_of(document(found)) == found


@pytest.mark.simulated
def test_a_run_that_is_too_large_says_so_and_needs_to_be_told() -> None:
    size = 70_000  # squares of 19.6 GB
    with pytest.raises(ValueNeeded, match=rf"{LINE} needs the value.*more than .* GiB") as caught:
        gpuprobe.estimate(decides(size), gpu="h100-80gb", steps=1)
    told = re.search(r"--assume (\S+=false)", caught.value.hint)
    assert told is not None
    found = gpuprobe.estimate(decides(size), gpu="h100-80gb", steps=1, assume=[told[1]])
    assert found.compute == "shapes"
    assert any(f"{LINE}: false, as --assume has it" in text for text in found.assumed)
    other = gpuprobe.estimate(
        lambda: torch.empty(8, device="cuda"), gpu="t4", steps=1, assume=["train.py:3=1"]
    )
    assert "--assume train.py:3=1 was not used: that line needs no value" in other.assumed


@pytest.mark.simulated
def test_what_is_assumed_decides() -> None:

    def step() -> None:
        values = torch.ones(1024, 1024, device="cuda").exp()
        torch.empty(int(values.sum()), dtype=torch.uint8, device="cuda")

    line = f"{Path(__file__).name}:{step.__code__.co_firstlineno + 2}"
    small, large = (
        gpuprobe.estimate(step, gpu="t4", steps=1, compute="shapes", assume=[f"{line}={count}"])
        for count in (100 * MIB, 200 * MIB)
    )
    assert large.peak_allocated - small.peak_allocated == 100 * MIB


@pytest.mark.parametrize(
    "text", ["train.py", "train.py:3", "train.py=1", "train.py:3=", "train.py:x=1", "a:3=perhaps"]
)
def test_what_is_no_assumption_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        gpuprobe.estimate(lambda: None, assume=[text])


def test_assumptions_are_found_by_the_end_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert parse("C:/a b/train.py:12=False").value is False
    assert parse("train.py:12= 3 ").value == 3
    assert parse("train.py:12=-2.5").value == -2.5
    here = str(tmp_path / "train.py")
    given = Assumptions(["train.py:1=1", "lib/model.py:2=2", "./train.py:3=3"])
    assert given.at(here, 1) is not None
    assert given.at(here, 2) is None
    assert given.at("/elsewhere/train.py", 1) is None  # there is one here
    assert given.at("/site-packages/lib/model.py", 2) is not None
    assert given.at("/site-packages/other/model.py", 2) is None
    assert given.unused == ("./train.py:3=3",)
    with pytest.raises(UsageError, match="two values for one line"):
        Assumptions(["train.py:1=1", "./train.py:1=2"])


SCRIPT = """\
import sys
import torch
print("run", sys.argv[1:])
with open("log", "a") as log:
    log.write("x")
net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    loss = net(torch.randn(64, 1024, device="cuda")).square().mean()
    width = 10 if loss < 1e9 else 20
    if "fail" in sys.argv and not loss.is_meta and loss.item() < 1e9:
        open("nothing here")
    loss.backward()
    optimizer.step()
"""


def estimate(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm_python.gpuprobe("estimate", "--gpu", "t4", *arguments, cwd=cwd)


def test_a_script_is_run_again_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = estimate("train.py", "--json", "--", "a", "b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compute"] == "real"
    assert f"{tmp_path / 'train.py'}:10 needs a value" in found["compute_why"]
    assert done.stderr.count("run ['a', 'b']") == 2
    assert "running the program a second time" in done.stderr
    assert (tmp_path / "log").read_text() == "xx"


@pytest.mark.simulated
def test_what_a_second_run_fails_with_is_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the script writes there
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    from gpuprobe.api import watch
    from gpuprobe.api.estimates import estimate_program

    program = watch.program(str(script), ["fail"], module=False)
    with pytest.raises(ProgramFailed, match=r"FileNotFoundError.*in a second run") as caught:
        estimate_program(program, gpu="t4")
    assert not isinstance(caught.value, ValueNeeded)


@pytest.mark.simulated
def test_assumptions_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    given = ["estimate", "train.py", "--gpu", "t4", "--assume"]
    assert dispatch([*given, "train.py:10=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compute"] == "shapes"
    assert (tmp_path / "log").read_text() == "x"
    assert dispatch([*given, "train.py=10"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[0] == "gpuprobe: error: not FILE:LINE=VALUE: 'train.py=10'"
    assert (tmp_path / "log").read_text() == "x"
