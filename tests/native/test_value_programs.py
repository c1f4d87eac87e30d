"""Programs whose path depends on values: as on the CPU, or with the decision named. The benchmark
``native_values.py --programs`` runs all of them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import warm_python
from native_commands import environment, gpuprobe

from gpuprobe.native.libraries import torch_build

BUILD = torch_build()
pytestmark = pytest.mark.skipif(
    BUILD is None or not BUILD.cuda,
    reason="torch is a CPU build: the native engine needs a CUDA build",
)
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "native_values.py"
PROGRAMS = Path(__file__).parent / "value_programs"
SAME = ("guard_isnan_continue", "guard_clip_error", "grad_scaler", "early_stopping", "cuda_graph")
"""In auto: these cost little."""
NAMED = ("curriculum_length", "converge_while", "sample_until_end", "mean_of_losses", "nms_boxes")
"""In shapes: these decide by values that are not computed."""


def test_there_are_enough() -> None:
    assert len(list(PROGRAMS.glob("*.py"))) >= 40


@pytest.mark.parametrize(
    ("compute", "names", "expected"),
    [("auto", SAME, "same"), ("shapes", NAMED, "named"), ("shapes", SAME[:3], "same")],
)
def test_a_sample(compute: str, names: tuple[str, ...], expected: str) -> None:
    done = subprocess.run(
        [warm_python.shared().python, str(BENCHMARK), "--programs", "--compute", compute, *names],
        env=environment(**warm_python.NESTED),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{compute}: {len(names)} {expected}", done.stdout


STOPS = """\
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    if loss.item() < 0.9:
        continue
    loss.backward()
    optimizer.step()
"""


SKIPS = """\
import torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
skipped = 0
for _ in range(2):
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    if loss.item() > 5.0:
        skipped += 1
    else:
        loss.backward()
        optimizer.step()
"""


def test_a_run_without_a_training_step_is_no_estimate(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SKIPS)
    skipped = gpuprobe("estimate", "--compute", "shapes", script, cwd=tmp_path)
    assert skipped.returncode == 5
    assert f"no training step was made, after {script}:7 decided by a value" in skipped.stderr
    trained = gpuprobe("estimate", "--json", script, cwd=tmp_path)
    assert json.loads(trained.stdout)["steps"] == 2


def test_a_failure_after_a_decision_names_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "big = torch.ones(1 << 20, device='cuda')\n"
        "print({4: 'four'}[int(big[:4].sum())])\n"
    )
    command = ("run", "--gpu", "t4", "-o", tmp_path / "run.gpuprobe", "--force")
    done = gpuprobe(*command, "--compute", "shapes", script, cwd=tmp_path)
    note = f"by a value that was not computed: {script}:3 decided by one; --compute real computes"
    assert done.returncode == 5
    assert note in " ".join(done.stderr.split())
    script.write_text(
        "import torch\n"
        "right = 0\n"
        "right += (torch.ones(1 << 20, device='cuda') == 1).sum().item()\n"
        "raise ValueError\n"
    )
    done = gpuprobe(*command, "--compute", "shapes", script, cwd=tmp_path)
    assert done.returncode == 5
    assert "assumed to be" in done.stderr  # what is done with the sum is followed
    assert "decided by one" not in " ".join(done.stderr.split())


def test_decisions_are_in_the_summary_the_report_and_its_json(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "run.gpuprobe"
    script.write_text(STOPS)
    done = gpuprobe("run", "--gpu", "t4", "--compute", "shapes", "-o", output, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train.py:6: `loss.item() < 0.9` was not computed: assumed to be False" in done.stderr
    report = " ".join(gpuprobe("report", output, "-v", cwd=tmp_path).stdout.split())
    assert "`loss.item() < 0.9` was not computed: assumed to be False" in report
    document = json.loads(gpuprobe("report", "--json", output, cwd=tmp_path).stdout)
    spots = document["blind_spots"]
    (spot,) = [spot for spot in spots if "train.py:6" in json.dumps(spot)]
    assert spot["what"].startswith("assumed: "), spots
