"""An estimate of an ordinary script fits on a screen; ``--verbose`` adds the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from native_commands import gpuprobe

SCREEN = 40  # lines

SCRIPT = """\
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--keep", action="store_true")
options = parser.parse_args()
layers = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
net = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(net.parameters())
losses = []
for step in range(12):
    loss = net(torch.randn(options.batch, 512, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if options.keep:
        losses.append(net(torch.randn(options.batch, 512, device="cuda")).mean())
"""

RANKS = SCRIPT.replace(
    "optimizer = torch",
    'torch.distributed.init_process_group("nccl")\n'
    "net = nn.parallel.DistributedDataParallel(net)\noptimizer = torch",
)


@pytest.mark.parametrize(
    ("script", "options", "code"),
    [
        (SCRIPT, ("--",), 0),
        (SCRIPT, ("--", "--batch", "300000"), 1),
        (SCRIPT, ("--", "--keep", "--batch", "4096"), 0),
        (RANKS, ("--ranks", "4", "--"), 0),
    ],
    ids=["fits", "does not fit", "grows", "ranks"],
)
def test_an_estimate_fits_on_a_screen(
    tmp_path: Path, script: str, options: tuple[str, ...], code: int
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = ("estimate", "--gpu", "t4", "--compute", "shapes", "train.py", *options)
    done = gpuprobe(*command, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= SCREEN, done.stdout
    assert "Lines at the peak" in lines
    later = "later code, such as an evaluation or a checkpoint, was not run and may need more"
    assert later in " ".join(done.stdout.split())
    assert lines[-1].startswith("more with -v: modules, phases")
    whole = gpuprobe(*command[:1], "--verbose", *command[1:], cwd=tmp_path).stdout
    assert {"Modules at the peak", "Peak of each phase", "Not modelled"} <= {*whole.splitlines()}


def test_a_short_estimate_names_the_decisions_that_it_assumes(tmp_path: Path) -> None:
    decides = "if loss > 3:\n    losses = torch.empty(1 << 20, device='cuda')\n"
    (tmp_path / "train.py").write_text(SCRIPT + decides)
    command = ("estimate", "--gpu", "t4", "--compute", "shapes", "--steps", "99", "train.py")
    done = gpuprobe(*command, cwd=tmp_path)
    assert re.search(r"^  - train.py:20: .*`loss > 3`", done.stdout, re.MULTILINE), done.stdout


def test_a_short_estimate_names_the_values_that_a_library_made_up(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages" / "pooled"
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text("def pooled(loss): return loss.cpu().numpy().mean()\n")
    (tmp_path / "train.py").write_text(
        f"import sys\nsys.path.append({str(packages.parent)!r})\nfrom pooled import pooled\n"
        f"{SCRIPT}    print(pooled(loss.detach()))\n"
    )
    done = gpuprobe("estimate", "--gpu", "t4", "--compute", "shapes", "train.py", cwd=tmp_path)
    assumed = re.sub(r"\s+", " ", done.stdout.partition("\nAssumed\n")[2])
    assert "pooled/__init__.py:1 (called at train.py:23): an array" in assumed, done.stdout
