"""The largest value that fits: the search, how a value reaches a script, changes to the run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python
from default_sigint import default_sigint
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuprobe
from examples import examples
from gpuprobe.errors import UsageError
from gpuprobe.model.plans.fit import Trial
from gpuprobe.model.plans.request import ParameterSource
from gpuprobe.model.values import Bytes
from gpuprobe.planning.fit import search
from gpuprobe.planning.program import parameter_source, with_constant, with_option

pytestmark = pytest.mark.simulated

SCRIPT = """
import argparse
import torch
from torch import nn

WIDTH = 256
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(args.batch_size, WIDTH, device="cuda")).pow(2).mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fit") / "train.py"
    path.write_text(SCRIPT)
    return path


# -- the search


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(1, 50),
    st.integers(0, 5000),
    st.integers(0, 10_000),
    st.integers(1, 100),
    st.sampled_from([0, 100]),
    st.integers(0, 6000),
    st.booleans(),
)
def test_the_search_finds_the_border(
    least: int, span: int, limit: int, slope: int, coarse: int, start: int, near: bool
) -> None:
    most = least + span

    def trial(value: int) -> Trial:
        need = 1000 + slope * value
        fits = value <= limit
        verdict = "fits" if fits else "does not fit"
        return Trial(value, verdict, Bytes(need), Bytes(need), Bytes(1000 + slope * limit))

    found = search(trial, least, most, coarse=coarse, start=start, near=near)
    assert all(least <= value <= most for value in found)
    fitting = [value for value, item in found.items() if item.fits]
    largest = min(limit, most)
    if limit < least:
        assert not fitting
    elif coarse:
        assert largest - max(fitting) <= max(1, max(fitting) // coarse)
    else:
        assert max(fitting) == largest
        assert largest == most or largest + 1 in found


def test_the_search_ends_where_runs_fail() -> None:
    def trial(value: int) -> Trial:
        failed = "" if value <= 37 else "the program failed"
        return Trial(value, "fits" if not failed else "", Bytes(1), Bytes(1), Bytes(2), failed)

    found = search(trial, 1, 1000)
    assert max(value for value, item in found.items() if item.fits) == 37


def test_what_is_known_when_a_search_is_interrupted() -> None:
    tried: dict[int, Trial] = {}

    def trial(value: int) -> Trial:
        if value > 16:
            raise KeyboardInterrupt
        return Trial(value, "fits", Bytes(value), Bytes(value), Bytes(1000))

    with pytest.raises(KeyboardInterrupt):
        search(trial, 1, 1000, tried, start=4)
    assert sorted(tried) == [4, 8]


def test_larger_values_are_taken_up_to_eight_times_the_last() -> None:
    def trial(value: int) -> Trial:
        return Trial(value, "fits", Bytes(value), Bytes(value), Bytes(1 << 20))

    tried = search(trial, 1, 1 << 16)
    assert sorted(tried) == [1, 2, 16, 128, 1024, 8192, 65536]

    def square(value: int) -> Trial:
        verdict = "fits" if value * value <= 10_000 else "does not fit"
        return Trial(value, verdict, Bytes(value**2), Bytes(value**2), Bytes(10_000))

    tried = search(square, 1, 1 << 16)
    assert max(value for value, item in tried.items() if item.fits) == 100
    assert len(tried) < 16


def test_a_function() -> None:
    import torch

    def build(value: int) -> Any:
        weight = torch.zeros(value, 1 << 28, device="cuda")  # 1 GiB each

        def step() -> None:
            weight.add_(1)

        return step

    found = gpuprobe.fit(build, gpu="t4", most=100, steps=1)
    assert found.largest == 14  # of 14.6 GiB, with the context
    assert found.beyond is not None
    assert found.beyond.value == 15


# -- how a value reaches the script


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("batch_size", ParameterSource(option="--batch-size", value=8)),
        ("--batch-size", ParameterSource(option="--batch-size", value=8)),
        ("batch-size", ParameterSource(option="--batch-size", value=8)),
        ("width", ParameterSource(constant="WIDTH", value=256)),
        ("WIDTH", ParameterSource(constant="WIDTH", value=256)),
    ],
)
def test_where_a_value_goes(script: Path, argument: str, expected: ParameterSource) -> None:
    assert parameter_source(str(script), argument) == expected


@pytest.mark.parametrize(
    ("arguments", "value"),
    [(["--batch-size", "32"], 32), (["--batch-size=64"], 64), (["--batch-size"], 8), (["x"], 8)],
)
def test_the_search_starts_from_the_value_that_the_script_is_given(
    script: Path, arguments: list[str], value: int
) -> None:
    assert parameter_source(str(script), "batch_size", arguments).value == value


def test_what_the_script_does_not_have(script: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parameter_source(str(script), "batchsize")
    assert "--batch-size" in caught.value.hint


def test_an_option_is_replaced() -> None:
    assert with_option(["--n", "4", "x", "--n=5"], "--n", 7) == ["x", "--n", "7"]


def test_a_constant_is_replaced() -> None:
    tree = with_constant("N: int = 4\nM = N * 2\n", "N", 10)
    names: dict[str, Any] = {}
    exec(compile(tree, "x.py", "exec"), names)
    assert names["M"] == 20


# -- the command


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return warm_python.gpuprobe("fit", *words)


def test_changes_are_estimated_on_the_unchanged_script(script: Path) -> None:
    done = run(
        str(script),
        *("--gpu", "t4", "--arg", "batch_size", "--steps", "1", "--json"),
        *("--min", "8192", "--max", "8192", "--suggest"),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["largest"] == 8192
    assert answer["applied"] == "as the option --batch-size"
    rows = {row["name"]: row for row in answer["suggestions"]}
    assert set(rows) == {
        *("bf16 autocast", "activation checkpointing", "gradient accumulation"),
        *("expandable segments", "fused optimizer", "8-bit optimizer", "optimizer on the CPU"),
    }
    for name in rows.keys() - {"expandable segments", "fused optimizer"}:
        assert rows[name]["saved"] > 0, name
    # No value is tried beyond the limit, or reported as a different one.
    assert rows["gradient accumulation"]["largest"] == 8192
    assert "batch_size 8192 with gradient accumulation: fits" in done.stderr
    assert "accumulate:" not in done.stderr
    # Six blocks keep two inner activations each; checkpointing keeps none of them.
    assert rows["activation checkpointing"]["saved"] > 8192 * 256 * 4 * 2 * 5 * 4 * 0.8


def test_nothing_fits(script: Path, tmp_path: Path) -> None:
    words = ("--gpu", "t4", "--arg", "WIDTH", "--min", "60000")
    on_gpu = tmp_path / "on_gpu.py"
    created = "with torch.device('cuda'):\n    model = Net()\n"
    on_gpu.write_text(SCRIPT.replace("model = Net().cuda()\n", created))
    done = run(str(on_gpu), *words)
    assert done.returncode == 1, done.stderr
    assert "not even WIDTH 60000 fits" in done.stdout
    # 54 GiB on the CPU are about this machine, not about the GPU.
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (32 << 30,) * 2)\n"
    script_with_limit = tmp_path / "limited.py"
    script_with_limit.write_text(limited + SCRIPT)
    done = run(str(script_with_limit), *words)
    assert done.returncode == 5, done.stdout
    assert done.stdout == ""
    assert "does not have enough memory for a tensor that the program creates on" in done.stderr


def test_ctrl_c_prints_the_best_so_far(script: Path) -> None:
    command = ["gpuprobe", "fit", str(script), "--gpu", "t4", "--arg", "batch_size"]
    with default_sigint():
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if "batch_size 16: fits" in line:
                process.send_signal(signal.SIGINT)
                break
        out, words = process.communicate()
    assert process.returncode == 130, words
    assert re.search(r"interrupted; largest batch_size that fits so far: \d+, not yet tried: ", out)


def test_a_run_that_dies_is_an_answer_too(tmp_path: Path) -> None:
    path = tmp_path / "dies.py"
    path.write_text("import os\nN = 3\nos.kill(os.getpid(), 9)\n")
    done = run(str(path), "--arg", "n")
    assert done.returncode == 5
    assert "with n 1: the estimate ended by SIGKILL" in done.stderr


def test_a_failing_script(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("N = 3\nraise ValueError('planted')\n")
    done = run(str(path), "--arg", "n")
    assert done.returncode == 5
    assert "planted" in done.stderr


def test_a_script_that_uses_no_gpu_ends_as_in_other_commands(tmp_path: Path) -> None:
    script = tmp_path / "cpu.py"
    script.write_text("import torch\nN = 2\ntorch.nn.Linear(N, 4)(torch.randn(2, N))\n")
    done = run(str(script), "--arg", "N")
    assert done.returncode == 4
    assert "error: with N 1: nothing was allocated on the GPU" in done.stderr
    assert "hint: the program ran on the CPU" in done.stderr


def test_an_unknown_gpu_is_said_at_once(script: Path) -> None:
    done = run(str(script), "--arg", "batch_size", "--gpu", "h1000")
    assert done.returncode == 2
    assert "unknown GPU" in done.stderr
    assert "batch_size 1" not in done.stderr
