"""Programs that run out of GPU memory: what the user sees of it, and what the program sees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_run_command import gpuprobe, script

from gpuprobe.analysis.peak.peaks import device_peaks
from gpuprobe.causes.recorded import growth_cause
from gpuprobe.model.place import Place
from gpuprobe.model.report import LeakRow
from gpuprobe.recording.load import load

FILLS = """\
import sys, traceback, torch
model = torch.nn.Linear(64, 64).cuda()
kept = []
def fill():
    while True:
        kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
model(torch.ones(4, 64, device="cuda")).sum().backward()
if sys.argv[1:] == ["--catch"]:
    try:
        fill()
    except torch.OutOfMemoryError as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        print(len(kept), any("gpuprobe" in name for name in files))
else:
    fill()
"""


@pytest.mark.parametrize("level", ["trace", "counters"])
def test_the_verdict_comes_before_the_figures(tmp_path: Path, level: str) -> None:
    script(tmp_path, FILLS)
    options = ["--gpu", "t4", "--compute", "shapes", "--level", level]
    done = gpuprobe("run", *options, "script.py", cwd=tmp_path)
    assert done.returncode == 5
    before, error, summary = done.stderr.partition("torch.OutOfMemoryError: CUDA out of memory. ")
    assert error
    assert re.findall(r'File "(.*?)", line (\d+)', before) == [
        (str(tmp_path / "script.py"), "15"),
        (str(tmp_path / "script.py"), "6"),
    ]
    lines = [line for line in summary.splitlines() if line.startswith("gpuprobe: ")]
    assert lines[0].startswith("gpuprobe: Out of memory in step 0")
    text = " ".join(line.removeprefix("gpuprobe:").strip() for line in lines)
    assert 0 < text.index(" peak: ") < text.index("recording: ")
    assert lines[-1] == "gpuprobe:   gpuprobe estimate --gpu t4 script.py"
    shown = gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout
    assert shown.startswith("  verdict out of memory in step 0")
    assert "script.gpuprobe · out of memory\n" in shown
    assert "expandable_segments" not in shown  # of no use on a full GPU
    assert shown.index("Why it ran out of memory") < shown.index("\nPeak\n")
    assert ("Out of memory: the GPU is full." in shown) == (level == "trace")


def test_a_program_that_catches_the_error_sees_it_unchanged(tmp_path: Path) -> None:
    script(tmp_path, FILLS)
    options = ["--gpu", "t4", "--compute", "shapes", "--level", "trace"]
    done = gpuprobe("run", *options, "script.py", "--catch", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "14 True\n")
    assert "Out of memory" not in done.stderr  # the run did not fail
    shown = gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout
    causes = "complete; 1 allocation failed for lack of memory, and the program went on."
    assert causes in " ".join(shown.split())
    assert "Why it ran out of memory" not in shown
    assert "Allocations that failed, and were caught" in shown
    assert "gpuprobe estimate" not in shown


LEAKS = """\
import torch
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.SGD(model.parameters())
history = []
for step in range(60):
    loss = model(torch.ones(4096, 4096, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(torch.zeros(2048, 1 << 16, device="cuda"))
"""


def test_memory_that_grew_is_the_verdict(tmp_path: Path) -> None:
    script(tmp_path, LEAKS)
    simulated = ["--gpu", "t4", "--compute", "shapes"]
    done = gpuprobe("run", *simulated, "--level", "trace", "script.py", cwd=tmp_path)
    assert done.returncode == 5
    lines = [line.removeprefix("gpuprobe:").strip() for line in done.stderr.splitlines()]
    text = " ".join(lines)
    assert re.search(r"Out of memory in step \d\d: .* requested at script\.py:\d+ in", text)
    cause = re.search(r"cause: (1\d\.\d GiB) from script\.py:10 in <module> are never used", text)
    assert cause is not None, text
    assert re.search(r"and kept by history \(a list of \d\d\) fix: drop what is not needed", text)
    assert f"saves: at most {cause[1]}: " in text
    command = r"gpuprobe estimate --gpu t4 --steps=\d\d script.py"  # as far as the run came
    assert re.fullmatch(command, lines[-1])
    shown = gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout
    assert "cuda:0 (Tesla T4)" in shown
    why = shown.partition("Why it ran out of memory\n")[2]
    assert why.startswith("  The allocation that failed: ")
    assert f"$ {lines[-1]}" in why


KEEPS_GRAPHS = """\
import torch
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(4096, 4096), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters())
history = []
for step in range(60):
    batch = torch.ones(8192, 4096, device="cuda")
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(model(batch).square().mean())
"""


def test_activations_of_earlier_steps_are_no_reason_for_checkpointing(tmp_path: Path) -> None:
    script(tmp_path, KEEPS_GRAPHS)
    options = ["--gpu", "t4", "--compute", "shapes", "--level", "trace"]
    assert gpuprobe("run", *options, "script.py", cwd=tmp_path).returncode == 5
    shown = " ".join(gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout.split())
    assert "history (a list of " in shown
    needed = re.search(r"because activations are ([\d.]+) (MiB|GiB) of the peak", shown)
    assert needed is None or needed[2] == "MiB" or float(needed[1]) < 2, needed


def test_memory_that_grew_without_a_trace_names_the_command_that_finds_its_holder(
    tmp_path: Path,
) -> None:
    script(tmp_path, LEAKS)
    done = gpuprobe("run", "--gpu", "t4", "--compute", "shapes", "script.py", cwd=tmp_path)
    assert done.returncode == 5
    lines = [line.removeprefix("gpuprobe:").strip() for line in done.stderr.splitlines()]
    assert "cause: memory grows by 512.0 MiB a step" in " ".join(lines)
    command = "gpuprobe explain --gpu t4 script.py"
    assert lines[lines.index("what holds the memory:") + 1] == command
    assert lines[-1].startswith("gpuprobe estimate --gpu t4 --steps=")
    head = gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout.partition("\n\n")[0]
    assert f"{command}   (searches for what holds it)" in head


TWO_GPUS = """
import torch

model = torch.nn.Linear(256, 256).to("cuda:1")
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(2):
    model(torch.randn(8, 256, device="cuda:1")).sum().backward()
    optimizer.step()
"""


def test_the_next_command_has_all_gpus_of_the_program(tmp_path: Path) -> None:
    script(tmp_path, TWO_GPUS)
    for level, gpus, command in (
        ("counters", "2xt4", "gpuprobe run --level trace --gpu 2xt4 script.py"),
        ("trace", "2xt4", "gpuprobe explain --gpu 2xt4 script.py"),
        ("trace", "l4,t4", "gpuprobe explain --gpu l4,t4 script.py"),
    ):
        options = ["--gpu", gpus, "--level", level, "--force"]
        assert gpuprobe("run", *options, "script.py", cwd=tmp_path).returncode == 0
        head = gpuprobe("report", "script.gpuprobe", cwd=tmp_path).stdout.partition("\n\n")[0]
        assert command in head


def test_an_estimate_of_memory_that_grows_names_the_line_first(tmp_path: Path) -> None:
    script(tmp_path, LEAKS)
    simulated = ["--gpu", "t4", "--compute", "shapes", "--verbose"]
    for steps, options in (("5", ["--steps", "5"]), ("4", [])):  # one more than without growth
        shown = gpuprobe("estimate", *simulated, *options, "script.py", cwd=tmp_path).stdout
        assert f"fits for {steps} steps" in shown
        advice = shown.partition("Memory grows from step to step\n")[2]
        assert "script.py:10 in <module>" in " ".join(advice.partition("\n\n")[0].split())
    options = [*simulated, "--steps", "60", "--no-suggestions"]
    done = gpuprobe("estimate", *options, "script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "Memory grows from step to step: change this first" in done.stdout


EVALUATES = """\
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(6):
    loss = model(torch.ones(512, 4096, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
results = []
for batch in range(400):
    results.append(model(torch.ones(512, 4096, device="cuda")))
"""


def test_an_evaluation_with_gradients_is_the_verdict(tmp_path: Path) -> None:
    script(tmp_path, EVALUATES)
    simulated = ["--gpu", "t4", "--compute", "shapes"]
    done = gpuprobe("run", *simulated, "--level", "trace", "script.py", cwd=tmp_path)
    assert done.returncode == 5
    lines = [line.removeprefix("gpuprobe:").strip() for line in done.stderr.splitlines()]
    text = " ".join(lines)
    assert re.search(r"cause: after step 5, 1\d\.\d GiB were allocated without a backward", text)
    assert "pass, as in an evaluation without no_grad; the training" in text
    assert "fix: if these forward passes train nothing, run them without gradients" in text
    # An estimate of the default number of steps would end before the evaluation.
    assert lines[-1] == "gpuprobe estimate --gpu t4 --steps=7 script.py"
    shown = gpuprobe("report", "script.gpuprobe", "--json", cwd=tmp_path).stdout
    report = json.loads(shown)
    assert report["causes"][0]["rule"] == "evaluation"
    assert report["causes"][0]["code"] == "with torch.no_grad():"
    assert report["categories"]["rows"][0]["key"] == "activation"  # though they die by the failure
    assert "checkpoint" not in [one["id"] for one in report["advice"]]
    # The failed step has a trace, although only the first steps are written.
    assert report["out_of_memory"][0]["line"] == 11
    written = sorted((tmp_path / "script.gpuprobe").glob("*.cols"))
    assert len(written) < 6
    fixed = EVALUATES.replace("results = []", "results = []\ntorch.set_grad_enabled(False)")
    script(tmp_path, fixed)
    options = [*simulated, "--steps", "7", "--no-suggestions"]
    assert gpuprobe("estimate", *options, "script.py", cwd=tmp_path).returncode == 0


def test_what_the_first_steps_leave_is_no_growth(tmp_path: Path) -> None:
    """The steps with a trace are the first ones, and few: the ends of all steps contradict them."""
    program = """\
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
kept = []
def keep():
    kept.append(torch.zeros(1 << 20, device="cuda"))
for step in range(16):
    if step < LEFT:
        keep()
    model(torch.ones(256 if step != 8 else 8192, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    causes = {}
    for left in (2, 16):
        script(tmp_path, program.replace("LEFT", str(left)))
        options = ["--gpu", "t4", "--compute", "shapes", "--level", "trace", "--force", "script.py"]
        assert gpuprobe("run", *options, cwd=tmp_path).returncode == 0
        (site,) = device_peaks(load(tmp_path / "script.gpuprobe"))
        line = LeakRow(Place("script.py", 6, "keep"), 8 << 20, 2, 4 << 20, (0, 1))
        causes[left] = len(list(growth_cause(site, None, line)))
    assert causes == {2: 0, 16: 1}


IN_THE_FIRST_FORWARD_PASS = """\
import torch
from torch import nn

layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
model = nn.TransformerEncoder(layer, 12).cuda()
optimizer = torch.optim.AdamW(model.parameters())
with torch.autocast("cuda", dtype=torch.float16):
    loss = model(torch.ones(512, 197, 768, device="cuda")).square().mean()
loss.backward()
optimizer.step()
"""


def test_no_setting_is_a_fix_where_activations_fill_the_gpu(tmp_path: Path) -> None:
    """Though the allocation that failed would have fitted with one: the next would not."""
    script(tmp_path, IN_THE_FIRST_FORWARD_PASS)
    simulated = ["--gpu", "t4", "--compute", "shapes", "--level", "trace"]
    done = gpuprobe("run", *simulated, "script.py", cwd=tmp_path)
    assert done.returncode == 5
    fix = done.stderr.partition("gpuprobe: fix: ")[2].partition("gpuprobe: saves")[0]
    assert "activation checkpointing" in " ".join(fix.split())
    assert "PYTORCH_CUDA_ALLOC_CONF" not in fix
