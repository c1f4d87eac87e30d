"""Estimates on the native engine: what ``--compute auto`` does, and several in one process."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import native_commands
import pytest

pytestmark = pytest.mark.slow

STEP = """\
import json
import gpuprobe
from gpuprobe.errors import UsageError

def estimate(build, **options):
    found = gpuprobe.estimate(build, **options)
    figures = [found.peak_allocated, found.peak_reserved, found.context_bytes]
    return figures, found.compute, found.compute_why, list(found.assumed)

def training(decides=False):
    def build():
        import torch
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Flatten()).cuda()
        head = torch.nn.Linear(32 * 30 * 30, 64).cuda()
        opt = torch.optim.AdamW([*net.parameters(), *head.parameters()])
        side = torch.cuda.Stream()
        def step():
            out = head(net(torch.randn(32, 3, 32, 32, device="cuda")))
            out.square().mean().backward()
            with torch.cuda.stream(side):
                torch.randn(3_000_000, device="cuda") * 2
            large = torch.ones(1024, 1024, device="cuda").exp()
            if decides:  # more than is computed on the way
                torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
            if decides and large.sum() > 0:
                torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
            opt.step()
            opt.zero_grad()
        return step
    return build
"""


def python(text: str, cwd: Path) -> Any:
    """What a program printed last, as JSON."""
    (cwd / "program.py").write_text(STEP + text, encoding="utf-8")
    done = native_commands.python("program.py", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def estimated(script: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = ("estimate", "--json", script.name, *options)
    return native_commands.gpuprobe(*command, cwd=script.parent, **more)


def test_equal_estimates_of_one_process_have_equal_figures(tmp_path: Path) -> None:
    text = """
found = [estimate(training(), compute=how) for how in ("shapes", "real", "shapes")]
auto = [estimate(training(decides=True)) for _ in range(2)]
print(json.dumps([found, auto]))
"""
    found, auto = python(text, tmp_path)
    figures = [figures for figures, *_ in found]
    assert figures[0] == figures[1] == figures[2]
    # A first attempt, too large to be computed on the way, leaves nothing for the one with values.
    assert auto[0] == auto[1]
    (allocated, _, _), compute, why, assumed = auto[0]
    assert compute == "real"
    line = 1 + STEP.splitlines().index("            if decides and large.sum() > 0:")
    assert f"program.py:{line} decides by a value, and the run is small enough" in why
    assert allocated > figures[0][0] + (300 << 20)
    assert not any("from before" in text for text in assumed)


def test_what_was_there_before_and_the_models_that_were_used_are_reported(
    tmp_path: Path,
) -> None:
    text = """
kept = []
def keeps():
    import torch
    kept.append(torch.empty(3 << 20, dtype=torch.uint8, device="cuda"))
trained = estimate(training(), steps=1, compute="shapes")
first = estimate(keeps, steps=1)
print(json.dumps([trained, first, estimate(keeps, steps=1)]))
"""
    trained, first, second = python(text, tmp_path)
    models = ("cuBLASLt needs no workspace", "the workspaces of a model of an H200")
    for model in models:  # of a linear layer, and of a convolution
        assert [model in text for text in trained[3]].count(True) == 1
        assert not any(model in text for text in first[3])
    assert second[0][0] == first[0][0] + (3 << 20)
    assert (
        "tensors of 3.0 MiB from before were on the GPUs at the start, and are counted" in second[3]
    )


def test_a_process_keeps_the_settings_of_its_allocator(tmp_path: Path) -> None:
    text = """
step = training()
first = estimate(step, compute="shapes", conf="expandable_segments:True")
same = estimate(step, compute="shapes", conf="expandable_segments:True")
try:
    estimate(step, compute="shapes")
except UsageError as error:
    print(json.dumps([first, same, str(error)]))
"""
    first, same, error = python(text, tmp_path)
    assert first == same
    assert "other settings of the allocator" in error


def test_a_run_that_is_too_large_ends_where_it_is(tmp_path: Path) -> None:
    text = """
from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native.process import load
load(parse_spec("h100-80gb"), endless=True)
from gpuprobe.native.values import budget  # it imports torch

def why(build):
    return estimate(build, steps=1)[1:]

def large():
    import torch
    square = torch.ones(100_000, 100_000, device="cuda")  # 37 GiB
    if square[:1000].sum() > 0:
        torch.empty(1, device="cuda")

def slow():
    import torch
    left = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    (left @ left).sum().backward()
    if left.exp().sum() > 0:
        torch.empty(1, device="cuda")

memory = why(large)
from gpuprobe.native.values import shapes
shapes.AT_ONCE_OPERATIONS = 1e9
budget.OPERATIONS = 5e9  # of 6e9, the last of them in the backward pass
print(json.dumps([memory, why(slow)]))
"""
    memory, operations = python(text, tmp_path)
    for compute, why, assumed in (memory, operations):
        assert compute == "shapes"
        assert re.search(r"program.py:\d+ decides by one", why)
        assert any("what is done only then is done" in text for text in assumed)
    assert re.search(r"tensors need 37.3 GiB, and this machine computes at most .* GiB", memory[1])
    assert "floating-point operations, about a minute" in operations[1]


def test_a_script_is_run_again_with_values_where_it_needs_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""\
import sys
import torch
print("run", sys.argv[1:])
unused = torch.ones(300 << 18, device="cuda")  # more than is computed on the way
net = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    out = net(torch.randn(512, 1024, device="cuda"))
    loss = out.square().mean()
    value = out.exp().cumsum(0)[-1].sum().item()
    if "fail" in sys.argv:
        [0.0, 0.0][2 - int(value > 100)]  # the sum is about 600,000
    if "select" in sys.argv:
        torch.unique(out[out > 0].repeat(16)).numel()
    loss.backward()
    optimizer.step()
""")
    done = estimated(script, "--", "select")
    assert done.returncode == 0, done.stderr
    exact = json.loads(done.stdout)
    assert done.stderr.count("run ['select']") == 2
    assert "running the program a second time" in done.stderr
    assert f"{script}:14 decides by a value, and the run" in exact["compute_why"]
    bound = json.loads(estimated(script, "--compute", "shapes", "--", "select").stdout)
    assert bound["peak_allocated"] > exact["peak_allocated"]
    assert any("train.py:14: all elements differ" in text for text in bound["assumed"])

    again = estimated(script, "--", "fail")
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["compute"] == "real"
    assert f"{script}:12 needs a value" in found["compute_why"]  # it was assumed, and failed


def test_kernels_that_nothing_computes_are_named(tmp_path: Path) -> None:
    text = """
import ctypes

class Size(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]

def launches(libraries):
    step = training()()
    runtime = ctypes.CDLL(None)
    symbol = ctypes.create_string_buffer(256)  # of no kernel that torch has
    def launching():
        step()
        for _ in range(libraries):
            one = Size(1, 1, 1)
            assert not runtime.cudaLaunchKernel(symbol, one, one, None, ctypes.c_size_t(0), None)
    return lambda: launching

print(json.dumps([estimate(lambda: launches(n)(), compute="real")[3] for n in (0, 1, 0)]))
"""
    noted = [
        [line for line in assumed if "launched the kernel" in line]
        for assumed in python(text, tmp_path)
    ]
    assert [len(lines) for lines in noted] == [0, 1, 0]
    assert "whose values are not computed" in noted[1][0]


@pytest.mark.parametrize(
    ("before", "within", "expected"),
    [("", "", "t4,a100"), ("1", "", "a100"), ("", "1", "a100"), ("GPU-0", "", "t4,a100")],
)
def test_visible_devices(tmp_path: Path, before: str, within: str, expected: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"""\
import os
if {within!r}:
    os.environ["CUDA_VISIBLE_DEVICES"] = {within!r}
import torch
for device in range(torch.cuda.device_count()):
    torch.ones(1 << 20, device=f"cuda:{{device}}")
""")
    done = estimated(script, "--gpu=t4,a100-40gb", CUDA_VISIBLE_DEVICES=before)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gpus = [row["gpu"] for row in found["by_device"]] or [found["gpu"]]
    assert [gpu.split("-")[0] for gpu in gpus] == expected.split(",")
    assert found["devices"] == len(gpus)


WAITS = """\
import sys, time
import torch

net = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    if step == int(sys.argv[1]):
        time.sleep(600)
    net(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
"""


def test_a_program_that_takes_too_long_is_estimated_by_the_steps_that_it_has_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    command = ("estimate", "--json", "--gpu", "t4", "--max-seconds", "8", "train.py")
    done = native_commands.gpuprobe(*command, "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 2
    assert "stopped after 8 s (--max-seconds), 2 of 3 steps: later code" in " ".join(
        found["assumed"]
    )
    whole = json.loads(estimated(tmp_path / "train.py", "--gpu", "t4", "--", "3").stdout)
    assert found["peak_allocated"] == whole["peak_allocated"]

    done = native_commands.gpuprobe(*command, "1", cwd=tmp_path)
    assert done.returncode not in (0, 1)
    error = json.loads(done.stdout)["error"]
    assert error["message"].startswith("the program made 1 training steps in 8 s, of the 2")
    assert "--max-seconds" in error["hint"]
