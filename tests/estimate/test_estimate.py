"""`gpuprobe.estimate`, and the command."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python

import gpuprobe
from gpuprobe.api.render import render
from gpuprobe.errors import ConfigError, DataError, UsageError
from gpuprobe.model.plans.estimate import FITS, NOT, RELEASING, WITHIN_MARGIN, Estimate
from gpuprobe.model.plans.request import EstimateRequest
from gpuprobe.planning.estimates import estimate_program
from gpuprobe.reporters.json.plans import ESTIMATE
from gpuprobe.reporters.sections.plans import estimate_sections
from gpuprobe.reporters.text import draw

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def build(width: int = 256, batch: int = 64) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU()).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.randn(batch, width, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


@pytest.mark.simulated
def test_every_byte_of_the_peak_has_a_place() -> None:
    found = gpuprobe.estimate(build(), gpu="a100-40gb")
    assert found.steps == 3
    assert found.attributed == found.peak_allocated
    for shares in (found.by_category, found.by_module, found.by_line):
        assert sum(share.bytes for share in shares) == found.attributed
    assert found.reserved_low <= found.peak_reserved <= found.reserved_high
    assert found.peak_allocated <= found.peak_reserved
    assert found.total_high == found.reserved_high + found.context_high
    categories = {share.name: share.bytes for share in found.by_category}
    weights = 4 * (256 * 1024 + 1024)
    assert categories["parameter"] == weights
    assert 2 * weights <= categories["optimizer_state"] <= 2 * weights + 4096
    lines = [share.name for share in found.by_line]
    assert any(Path(__file__).name in line for line in lines)


@pytest.mark.simulated
def test_it_gives_the_same_twice() -> None:
    assert gpuprobe.estimate(build()) == gpuprobe.estimate(build())


@pytest.mark.simulated
def test_values_do_not_matter_where_memory_does_not_depend_on_them() -> None:
    shapes = gpuprobe.estimate(build(), gpu="t4")
    real = gpuprobe.estimate(build(), gpu="t4", compute="real")
    assert (shapes.peak_allocated, shapes.peak_reserved) == (
        real.peak_allocated,
        real.peak_reserved,
    )


def allocate(size: int) -> Callable[[], None]:
    def step() -> None:
        torch.empty(size, dtype=torch.uint8, device="cuda")

    return step


@pytest.mark.simulated
def test_verdicts() -> None:
    small = gpuprobe.estimate(allocate(100 * MIB), gpu="t4")
    assert small.verdict == FITS
    assert small.fits
    assert gpuprobe.estimate(allocate(64 << 30), gpu="t4").verdict == NOT
    room = small.capacity - small.context_high
    close = gpuprobe.estimate(allocate(room - 4 * MIB), gpu="t4")
    assert close.verdict == WITHIN_MARGIN
    assert not close.fits


def one_after_the_other(*sizes: int) -> Callable[[], None]:
    """Tensors that do not fit into each other's cached memory; one is alive at a time."""

    def step() -> None:
        for size in sizes:
            torch.empty(size, dtype=torch.uint8, device="cuda")

    return step


@pytest.mark.simulated
def test_what_is_reserved_beyond_the_capacity_does_not_fit() -> None:
    found = gpuprobe.estimate(one_after_the_other(8 << 30, 9 << 30), gpu="t4", steps=1)
    assert found.total_low > found.capacity
    assert (found.verdict, found.fits) == (RELEASING, False)
    assert "(once in the simulation)" in found.verdict_why
    assert found.verdict_why in " ".join(drawn(found).split())
    room = found.capacity - (found.context_low + found.context_high) // 2
    first = 6 << 30
    found = gpuprobe.estimate(one_after_the_other(first, room - first), gpu="t4", steps=1)
    assert found.total_low < found.capacity < found.total_high
    assert found.verdict == WITHIN_MARGIN
    assert "the upper end of the range" in found.verdict_why


@pytest.mark.simulated
def test_each_gpu_of_a_process_has_a_row_and_the_fullest_one_counts() -> None:
    def step() -> None:
        kept = [
            torch.empty(size << 30, dtype=torch.uint8, device=f"cuda:{at}")
            for at, size in enumerate((30, 20))
        ]
        del kept

    found = gpuprobe.estimate(step, gpu="h100-80gb,t4,t4", steps=1)
    assert (found.gpu, found.verdict) == ("t4", NOT)
    rows = [(row.device, row.gpu, row.verdict, row.peak_allocated) for row in found.by_device]
    assert rows == [
        ("cuda:0", "h100-80gb", FITS, 30 << 30),
        ("cuda:1", "t4", NOT, 20 << 30),
    ]
    assert sum(share.bytes for share in found.by_device[0].by_category) == 30 << 30
    assert found.attributed == found.peak_allocated == 20 << 30
    assert "cuda:1   t4" in drawn(found)
    assert ESTIMATE.read(json.loads(json.dumps(ESTIMATE.plain(found)))) == found


def drawn(found: Estimate) -> str:
    stream = io.StringIO()
    draw.write(estimate_sections(found), stream, cwd="")
    return stream.getvalue()


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("conf", "peak"), [("", 4 * 9 * MIB), ("roundup_power2_divisions:2", 4 * 12 * MIB)]
)
def test_an_allocator_setting_is_used(conf: str, peak: int) -> None:
    def several() -> None:
        kept = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        del kept

    found = gpuprobe.estimate(several, gpu="t4", conf=conf)
    assert (found.peak_allocated, found.settings) == (peak, conf)


@pytest.mark.simulated
def test_growth_is_that_of_most_steps() -> None:
    """And not of the last one, in which the program also kept something else."""
    kept = []

    def leaks() -> None:
        kept.append(torch.empty(512 * MIB, dtype=torch.uint8, device="cuda"))
        if len(kept) == 4:
            kept.append(torch.empty(100 * MIB, dtype=torch.uint8, device="cuda"))

    assert gpuprobe.estimate(leaks, gpu="t4", steps=4).growth == 512 * MIB


@pytest.mark.simulated
def test_memory_that_goes_on_growing_is_said() -> None:
    kept = []

    def leaks() -> None:
        kept.append(torch.empty(3 << 30, dtype=torch.uint8, device="cuda"))

    found = gpuprobe.estimate(leaks, gpu="t4")  # of 14.6 GiB
    assert found.fits
    (said,) = (text for text in found.assumed if "ended with" in text)
    assert "ended with 3.0 GiB more than it began with" in said
    assert "full in about 2 more" in said
    assert found.growth == 3 << 30
    text = io.StringIO()
    render(found, "text", text, full=True)
    shown = " ".join(text.getvalue().split())
    verdict = "t4: fits for 3 steps ("
    ends = "; memory grows by 3.0 GiB a step, and the GPU is full in about 2 more"
    assert shown.startswith(verdict)
    assert shown.endswith(ends)
    assert shown.count(verdict) == shown.count(ends) == 2


@pytest.mark.simulated
def test_a_program_that_stays_on_the_cpu_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "cpu.py"
    path.write_text("import torch\ntorch.nn.Linear(4, 4)(torch.randn(2, 4))\n")
    with pytest.raises(DataError, match="nothing was allocated") as caught:
        estimate_program(EstimateRequest(str(path), gpu="t4"))
    assert "ran on the CPU" in caught.value.hint


@pytest.mark.simulated
def test_what_cannot_be_estimated() -> None:
    with pytest.raises(DataError, match="nothing was allocated on the GPU"):
        gpuprobe.estimate(lambda: None)
    with pytest.raises(UsageError):
        gpuprobe.estimate(build(), steps=0)
    with pytest.raises(ConfigError):
        gpuprobe.estimate(build(), gpu="h1000")


@pytest.mark.simulated
def test_one_rank_of_several() -> None:
    def make() -> Callable[[], None]:
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(512, 512).cuda(), device_ids=[0]
        )

        def step() -> None:
            model(torch.randn(8, 512, device="cuda")).sum().backward()

        return step

    # First the one without a process group, which keeps the buckets to the process's end.
    alone = gpuprobe.estimate(lambda: _linear_step(), gpu="h100-80gb")
    found = gpuprobe.estimate(make, ranks=8)
    assert found.ranks == 8
    assert any("8 ranks" in text for text in found.assumed)
    # The gradient bucket is as large as the gradients.
    assert found.peak_allocated - alone.peak_allocated >= 4 * 512 * 512


def _linear_step() -> Callable[[], None]:
    model = torch.nn.Linear(512, 512).cuda()
    return lambda: model(torch.randn(8, 512, device="cuda")).sum().backward()


def run(*arguments: Any, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return warm_python.gpuprobe("estimate", *arguments, cwd=cwd)


@pytest.mark.simulated
def test_the_command(tmp_path: Path) -> None:
    done = run("--gpu", "t4", "--json", ROOT / "examples" / "train_gpt.py")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "gpuprobe.estimate"
    assert document["steps"] == 3
    assert document["fits"] is True
    assert sum(row["bytes"] for row in document["by_line"]) == document["peak_allocated"]
    assert "step 0 loss" in done.stderr


def test_what_comes_after_the_last_step_is_said_not_to_have_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Linear(64, 64).cuda()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    net(torch.zeros(8, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "with torch.no_grad():\n"
        "    net(torch.zeros(4_000_000, 64, device='cuda'))\n"
    )
    stopped = json.loads(run("--gpu", "t4", "--steps", 2, "--json", script).stdout)
    whole = json.loads(run("--gpu", "t4", "--steps", 4, "--json", script).stdout)
    assert stopped["peak_allocated"] < whole["peak_allocated"]
    assert any("stopped after step 2 (--steps)" in text for text in stopped["assumed"])
    assert whole["steps"] == 3
    assert not any("stopped" in text for text in whole["assumed"])


MEAN = """\
import torch

class Mean:
    def __init__(self):
        self.sum = self.mean = self.count = 0

    def add(self, value, count):
        self.count += count
        self.sum += value * count
        self.mean = self.sum / self.count

net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
mean = Mean()
for _ in range(4):
    loss = net(torch.zeros(8, 64, device="cuda")).square().mean()
    mean.add(loss.detach(), 8)
    loss.backward()
    optimizer.step()
"""


def test_a_running_mean_on_the_gpu_is_made_from_what_is_made_from_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MEAN)
    done = run("--gpu", "t4", "--compute", "shapes", script)
    assert done.returncode == 0, done.stderr


def test_a_script_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import torch\ntorch.zeros(3, device='cuda') + 'text'\n")
    done = run(script)
    assert done.returncode == 5
    assert "bad.py" in done.stderr
    assert "TypeError" in done.stderr
    script.write_text(
        "import torch\nx = torch.zeros(2**20, device='cuda')\n"
        "torch.zeros(int(x.sum()), device='cuda')\n"
    )
    done = run("--compute", "shapes", "--json", script)
    assert done.returncode == 0, done.stderr
    assumed = f"{script}:3: a whole number that was not computed is assumed to be 1"
    assert assumed in json.loads(done.stdout)["assumed"]
    script.write_text(
        "import torch\nx = torch.zeros(2**20, device='cuda')\n"
        "y = torch.zeros(2 if float(x.sum()) > 1 else 3, device='cuda')\n"
    )
    done = run("--compute", "shapes", "--json", script)
    assert done.returncode == 0, done.stderr
    assumed = (
        f"{script}:3: a number that was not computed is 0.7357823848724365 here, a placeholder; "
        "what the program decides by it may differ"
    )
    assert assumed in json.loads(done.stdout)["assumed"]
    assert run("--gpu", "nothing", script).returncode == 2
    assert run().returncode == 2


@pytest.mark.simulated
def test_the_estimate_is_plain_data() -> None:
    found = gpuprobe.estimate(allocate(MIB))
    assert dataclasses.asdict(found)["gpu"] == "h100-80gb"
