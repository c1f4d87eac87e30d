"""``--assume``: what is done where a run without values needs one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import gpuprobe
from gpuprobe.cli.parser import dispatch
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.assumptions import Assumptions, parse

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20


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


@pytest.mark.simulated
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


@pytest.mark.simulated
def test_assumptions_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    given = ["estimate", "train.py", "--gpu", "t4", "--compute", "shapes", "--assume"]
    assert dispatch([*given, "train.py:10=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compute"] == "shapes"
    assert (tmp_path / "log").read_text() == "x"
    assert dispatch([*given, "train.py=10"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[0] == "gpuprobe: error: not FILE:LINE=VALUE: 'train.py=10'"
    assert (tmp_path / "log").read_text() == "x"
